"""int8 layers for towers: a token's result is its own, layers agree with their definition, odd rows stay theirs."""

from __future__ import annotations

import pytest
import torch

from vlmfast_kernels.cpu.w8a8 import why_not_w8a8
from vlmfast_kernels.ops.quant import quantize
from vlmfast_kernels.ops.w8a8 import exact_sums, explain_w8a8, linear_w8a8, prepare_w8a8, quantize_rows

_CPU = torch.device("cpu")
_FORMS = [
    pytest.param("packed", marks=pytest.mark.skipif(bool(why_not_w8a8(_CPU)), reason=why_not_w8a8(_CPU))),
    "float32",
]


@pytest.fixture(params=_FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which form of the layer is taken; the second is the one of CPUs without such products."""
    if request.param == "float32":
        monkeypatch.setattr("vlmfast_kernels.cpu.w8a8.why_not_w8a8", lambda *_: "not in this test")
    return str(request.param)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_is_the_same_alone_and_among_others(form: str, dtype: torch.dtype) -> None:
    """Bit for bit, with neighbours a hundred times as large; a scale for the whole batch would fail here."""
    layer = prepare_w8a8(quantize(_random(96, 192), "int8"), _random(96, seed=1), "gelu_pytorch_tanh")
    x = _random(300, 192, seed=2).to(dtype)
    x[7] *= 100
    together = layer.apply(x, None)
    for rows in (slice(0, 1), slice(5, 9), slice(100, 260), slice(299, 300)):
        assert torch.equal(layer.apply(x[rows], None), together[rows])
    apart = layer.apply(x.view(3, 100, 192), None)
    assert apart.shape == (3, 100, 96) and torch.equal(apart.view(300, 96), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_activation_and_residual(form: str, dtype: torch.dtype) -> None:
    """The layer is the product, then what a layer adds; float32 until the end."""
    weight, bias, x, residual = (
        _random(48, 130),
        _random(48, seed=1),
        _random(140, 130, seed=2),
        _random(140, 48, seed=3),
    )
    x, residual = x.to(dtype), residual.to(dtype)
    product = linear_w8a8.reference(x.float(), weight, bias)
    for activation, before in ((None, residual), ("quick_gelu", None), (None, None)):
        expected = product if activation is None else product * torch.sigmoid(1.702 * product)
        expected = expected if before is None else expected + before.float()
        out = prepare_w8a8(quantize(weight, "int8"), bias, activation).apply(x, before)
        assert out.dtype == dtype
        # the product's own rounding, and that of the result
        torch.testing.assert_close(out.float(), expected, rtol=2 ** (-7 if dtype == torch.bfloat16 else -20), atol=1e-5)
    assert (product - (x.float() @ weight.T + bias)).abs().max() > 1e-3, "int8 is lossy: what is compared is not float"


def test_rows_that_are_not_finite_or_zero(form: str) -> None:
    """An infinity or NaN spoils its own row, all of it; a row of zeros gives the bias."""
    bias = _random(8, seed=1)
    layer = prepare_w8a8(quantize(_random(8, 32), "int8"), bias)
    x = _random(5, 32, seed=2)
    clean = layer.apply(x, None)
    x[1, 3], x[2, 0], x[3] = torch.inf, torch.nan, 0.0
    out = layer.apply(x, None)
    assert out[1].isnan().all() and out[2].isnan().all()
    assert torch.equal(out[3], bias)
    assert torch.equal(out[[0, 4]], clean[[0, 4]])


def test_sums_are_exact_and_codes_full_range() -> None:
    """Largest codes over more inputs than float32 adds up exactly: one wrong unit would show."""
    codes = torch.full((2, 3072), 127, dtype=torch.int8)
    codes[1, ::2] = -126
    expected = codes.to(torch.int64) @ codes.to(torch.int64).T
    assert torch.equal(exact_sums(codes, codes).to(torch.int64), expected)
    quantised, scale = quantize_rows(_random(9, 70))
    assert quantised.abs().amax(-1).eq(127).all() and scale.shape == (9, 1)


def test_says_where_it_does_not_run() -> None:
    assert "CPU only" in why_not_w8a8(torch.device("cuda"))
    assert explain_w8a8(torch.device("cuda")).splitlines()[-1].endswith("without gain: chosen")
    assert explain_w8a8(_CPU).endswith(": chosen")

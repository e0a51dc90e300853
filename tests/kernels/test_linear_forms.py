"""Prepared linear layers against the plain product, in every combination of bias, residual and activation."""

from __future__ import annotations

import itertools

import pytest
import torch

from vlmfast_kernels.cpu.linear import packed_linear, why_not_packed
from vlmfast_kernels.ops.activation import ACTIVATIONS
from vlmfast_kernels.ops.linear import explain_linear, linear, prepare_linear
from vlmfast_models.layers import Linear, prepare_for_inference

_CPU = torch.device("cpu")
_REASON = why_not_packed(_CPU, torch.bfloat16)
needs_packing = pytest.mark.skipif(bool(_REASON), reason=_REASON or "packs here")

_SIZES = [(1, 1, 1), (1, 576, 1536), (3, 7, 5), (17, 33, 65), (5, 64, 1), (130, 48, 144), (2, 1, 9)]


def _inputs(rows: int, width: int, outputs: int, bias: bool, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * 1000 + width + outputs)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    weight = (torch.randn(outputs, width, generator=generator) / width**0.5).to(dtype)
    row = torch.randn(outputs, generator=generator).to(dtype)
    residual = torch.randn(rows, outputs, generator=generator).to(dtype)
    return x, weight, row if bias else None, residual


@needs_packing
@pytest.mark.parametrize("size", _SIZES, ids=str)
@pytest.mark.parametrize(("bias", "residual"), list(itertools.product((False, True), repeat=2)))
def test_packed_equals_reference(size: tuple[int, int, int], bias: bool, residual: bool) -> None:
    """Guards the packed bf16 layer: twice the loss of torch's own bf16 product, plus half a unit of the last place."""
    x, weight, row, extra = _inputs(*size, bias, torch.bfloat16)
    extra = extra if residual else None
    wide = [None if tensor is None else tensor.float() for tensor in (x, weight, row, extra)]
    exact = linear(*wide)
    plain = linear(x, weight, row, extra).float()
    kept = None if extra is None else extra.clone()
    out = packed_linear(weight, row).apply(x, extra)
    allowed = 2 * float((plain - exact).abs().max()) + 4e-3 * float(exact.abs().max())
    assert out.dtype == torch.bfloat16 and out.shape == exact.shape
    assert float((out.float() - exact).abs().max()) <= allowed
    assert kept is None or torch.equal(kept, extra), "the residual was written to"


@needs_packing
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("bias", [False, True])
def test_packed_activations(activation: str, bias: bool) -> None:
    """Guards activations fused into the product, and those applied after it."""
    x, weight, row, _ = _inputs(9, 40, 31, bias, torch.bfloat16)
    exact = linear(x.float(), weight.float(), None if row is None else row.float(), None, activation)
    plain = linear(x, weight, row, None, activation).float()
    out = packed_linear(weight, row, activation).apply(x, None).float()
    allowed = 2 * float((plain - exact).abs().max()) + 8e-3 * float(exact.abs().max())
    assert float((out - exact).abs().max()) <= allowed
    without = packed_linear(weight, row).apply(x, None).float()
    assert float((out - without).abs().max()) > 0.1  # negative control: it is applied


@needs_packing
def test_packed_takes_more_dimensions_and_strides() -> None:
    """Guards inputs as towers hand them in: [P, N, K], and a slice of a wider row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 32, generator=generator).bfloat16()
    weight = torch.randn(7, 16, generator=generator).bfloat16()
    part = x[..., ::2]
    out = packed_linear(weight, None).apply(part, None)
    torch.testing.assert_close(out, linear(part, weight, None), atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("residual", [False, True])
def test_float32_stays_plain_torch(residual: bool) -> None:
    """Guards exactness: in float32 the prepared layer is torch's own product, bit for bit."""
    x, weight, row, extra = _inputs(5, 12, 9, True, torch.float32)
    prepared = prepare_linear(weight, row)
    assert prepared.name == "torch" and not prepared.owns_weight
    extra = extra if residual else None
    assert torch.equal(prepared.apply(x, extra), linear(x, weight, row, extra))
    expected = x @ weight.T + row + (extra if residual else 0)
    torch.testing.assert_close(prepared.apply(x, extra), expected)


def test_explain_names_the_form() -> None:
    """Guards `explain_linear`: the form that is chosen, with a reason where it is not the packed one."""
    assert "only bfloat16" in explain_linear(_CPU, torch.float32)
    assert explain_linear(_CPU, torch.float32).endswith("linear: torch: chosen")
    assert "CPU only" in explain_linear(torch.device("cuda"), torch.bfloat16)
    assert explain_linear(_CPU, torch.bfloat16).endswith("chosen")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_preparing_a_layer_changes_no_number_and_happens_once(dtype: torch.dtype) -> None:
    """Guards `prepare`: same results before and after within the dtype, a second call is harmless."""
    layer = Linear(24, 10, bias=True, activation="gelu")
    with torch.no_grad():
        layer.weight.normal_(generator=torch.Generator().manual_seed(1))
        layer.bias.fill_(0.25)
    layer = layer.to(dtype)
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = layer(x)
    prepare_for_inference(layer)
    prepare_for_inference(layer)
    after = layer(x)
    assert not layer.training and not layer.bias.requires_grad
    torch.testing.assert_close(after, before.detach(), atol=0 if dtype == torch.float32 else 5e-2, rtol=1e-2)

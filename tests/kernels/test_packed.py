"""Weights packed for the compiled products, in both formats, against the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlmfast_kernels.cpu import library as compiled
from vlmfast_kernels.cpu.library import OFF_SWITCH, why_not_compiled
from vlmfast_kernels.cpu.packed import PackedWeight, compiled_linear, quantize_compiled
from vlmfast_kernels.ops.linear import linear
from vlmfast_kernels.ops.quant import (
    Quantization,
    dequantize_weight,
    linear_int4,
    linear_int8,
    quantize,
    quantize_tokens,
    quantize_weight,
)

_CPU = torch.device("cpu")
_REASON = why_not_compiled(_CPU, torch.bfloat16)
_KINDS: tuple[Quantization | None, ...] = (None, "int8", "int4")
needs_compiled = pytest.mark.skipif(bool(_REASON), reason=_REASON or "compiled here")

_SIZES = [(1, 1, 1), (1, 576, 960), (3, 7, 5), (8, 64, 48), (9, 63, 49), (17, 66, 97), (5, 130, 47), (30, 200, 16)]
"""Rows, inputs, outputs: around the blocks of 8 rows, 64 inputs and 48 outputs."""


def _inputs(rows: int, width: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + width + outputs)
    x = torch.randn(rows, width, generator=generator).bfloat16()
    weight = (torch.randn(outputs, width, generator=generator) / width**0.5).bfloat16()
    return x, weight, torch.randn(outputs, generator=generator).bfloat16()


def _packed(weight: torch.Tensor, bias: torch.Tensor | None, kind: Quantization | None) -> PackedWeight:
    return PackedWeight(weight if kind is None else quantize_compiled(weight, kind), bias)


@needs_compiled
@pytest.mark.parametrize("size", _SIZES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_bf16_equals_the_exact_product(size: tuple[int, int, int], bias: bool) -> None:
    """Guards the layout and the tails: bf16 products summed in float32 lose nothing but the order of the sums."""
    x, weight, row = _inputs(*size)
    out = PackedWeight(weight, row if bias else None).apply(x)
    exact = linear(x.double(), weight.double(), row.double() if bias else None)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, exact.float(), atol=2e-6 * size[1] ** 0.5, rtol=1e-5)


@needs_compiled
@pytest.mark.parametrize("size", _SIZES, ids=str)
@pytest.mark.parametrize("op", [linear_int8, linear_int4], ids=lambda op: op.name)
def test_quantised_product_equals_its_reference(size: tuple[int, int, int], op: Any) -> None:
    """Guards the quantised product to the last place: integer sums are exact, only a few float32 steps may differ."""
    x, weight, row = _inputs(*size)
    x[:, 0] *= 30
    out = _packed(weight, row, op.name.removeprefix("linear_")).apply(x)
    reference = op.reference(x.float(), weight.float(), row.float())
    torch.testing.assert_close(out, reference, atol=2e-6 * float(reference.abs().max()), rtol=1e-6)
    # Negative control: it is the quantised product, not the product.
    if size[1] > 1:
        assert not torch.allclose(out, linear(x.float(), weight.float(), row.float()), atol=1e-5, rtol=1e-6)


@needs_compiled
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_alone_among_others_and_on_any_number_of_threads(
    kind: Quantization | None, threads: int
) -> None:
    """Guards exactness of batches and drafts: bit-equal rows. A scale shared by the batch would break it at once."""
    x, weight, row = _inputs(21, 200, 150)
    x[3] *= 100
    packed = _packed(weight, row, kind)
    whole = packed.apply(x)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for start, end in ((0, 1), (3, 4), (4, 5), (2, 9), (5, 21), (20, 21)):
            assert torch.equal(packed.apply(x[start:end]), whole[start:end])
        again = _packed(weight, row, kind)
        assert torch.equal(again.packed, packed.packed)
    finally:
        torch.set_num_threads(before)


@needs_compiled
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_no_number(kind: Quantization | None, bad: float) -> None:
    """Guards against bytes that hide a broken model: NaN and infinity come out as such, in their row only."""
    x, weight, _ = _inputs(3, 130, 20)
    clean = _packed(weight, None, kind).apply(x)
    x[1, 70] = bad
    out = _packed(weight, None, kind).apply(x)
    assert not out[1].isfinite().any()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


@needs_compiled
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_prepared_form(kind: Quantization | None, activation: str | None) -> None:
    """Guards the form that layers are bound to: more dimensions, residual or activation, rounding once."""
    x, weight, row = _inputs(6, 40, 31)
    residual = torch.randn(2, 3, 31, generator=torch.Generator().manual_seed(1)).bfloat16()
    prepared = compiled_linear(_packed(weight, row, kind), activation)
    wide = linear(x.float(), weight.float(), row.float(), None, activation).view(2, 3, 31)
    atol = {None: 1e-2, "int8": 8e-2, "int4": 5e-1}[kind]
    tolerance: dict[str, Any] = {"atol": atol, "rtol": 2e-2 if kind else 8e-3}
    out = prepared.apply(x.view(2, 3, 40), None)
    assert prepared.owns_weight and out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wide, **tolerance)
    if activation is None:
        added = prepared.apply(x.view(2, 3, 40), residual).float()
        torch.testing.assert_close(added, wide + residual.float(), **tolerance)


def test_quantised_weight_is_within_half_a_step() -> None:
    """Guards the reference itself: no value is off by more than half its channel's step, zero rows stay zero."""
    weight = torch.randn(9, 70, generator=torch.Generator().manual_seed(4))
    weight[2] = 0.0
    whole, scale = quantize_weight(weight)
    assert whole.dtype == torch.int8 and int(whole.abs().max()) == 127
    back = dequantize_weight(whole, scale, torch.float32)
    assert ((back - weight).abs() <= scale[:, None] * 0.501).all() and not back[2].any()


@pytest.mark.parametrize("width", [1, 32, 70, 130])
def test_int4_weight_is_as_near_as_sixteen_codes_allow(width: int) -> None:
    """Guards the int4 reference: no group is further off than the plain scale (its largest value / -8) leaves it."""
    weight = torch.randn(40, width, generator=torch.Generator().manual_seed(6))
    weight *= 10.0 ** torch.arange(-20, 20).div(2)[:, None]  # rows of all magnitudes
    weight[:, 32:64] *= 100  # an outlying group
    weight[3] = 0.0
    quantised = quantize(weight, "int4")
    groups = -(-width // 64)
    assert quantised.codes.shape == (40, 32 * groups) and quantised.codes.dtype == torch.uint8
    assert quantised.scale.shape == (40, 2 * groups) and quantised.scale.dtype == torch.bfloat16
    back = quantised.dequantize(torch.float32)
    assert back.shape == weight.shape and not back[3].any()
    for start in range(0, width, 32):
        part, ours = weight[:, start : start + 32].double(), back[:, start : start + 32].double()
        extreme = part.gather(1, part.abs().argmax(1, keepdim=True))
        step = torch.where(extreme == 0, 1.0, extreme / -8)
        plain = (part / step).round().clamp(-8, 7) * step
        off, most = (ours - part).norm(dim=1), (plain - part).norm(dim=1) + 4e-3 * part.norm(dim=1)
        assert (off <= most).all()  # 4e-3: the scale is rounded to bfloat16
    if width > 32:
        assert float((back - weight).norm() / weight.norm()) < 0.1


@needs_compiled
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("size", [(1, 1), (5, 33), (31, 64), (50, 200)], ids=str)
def test_compiled_quantisation_equals_the_reference(kind: Quantization, size: tuple[int, int]) -> None:
    """Guards stored codes: who quantises makes no difference (a tie of two int4 scales may fall either way)."""
    weight = torch.randn(size, generator=torch.Generator().manual_seed(size[1])).bfloat16()
    weight[0, size[1] // 2 :] = 0.0
    ours, reference = quantize_compiled(weight, kind), quantize(weight, kind)
    same = (ours.codes == reference.codes).float().mean()
    assert ours.codes.dtype == reference.codes.dtype and ours.codes.shape == reference.codes.shape
    assert float(same) > 0.99
    torch.testing.assert_close(ours.scale, reference.scale, atol=0.0, rtol=1e-5 if kind == "int8" else 0.1)
    torch.testing.assert_close(ours.dequantize(torch.float32), reference.dequantize(torch.float32), atol=0.1, rtol=0.1)


@needs_compiled
@pytest.mark.parametrize("rows", range(1, 17))
def test_int4_rows_of_every_count(rows: int) -> None:
    """Guards each unrolled number of rows: bit-equal to the rows alone."""
    x, weight, _ = _inputs(16, 150, 100)
    packed = _packed(weight, None, "int4")
    alone = torch.cat([packed.apply(x[row : row + 1]) for row in range(rows)])
    assert torch.equal(packed.apply(x[:rows]), alone)


def test_tokens_are_quantised_by_group_and_by_themselves() -> None:
    """Guards groups: an outlier coarsens its own 64 inputs and its own token only."""
    x = torch.randn(4, 150, generator=torch.Generator().manual_seed(5))
    whole, scale = quantize_tokens(x)
    assert whole.shape == (4, 3, 64) and scale.shape == (4, 3) and not whole[:, 2, 150 - 128 :].any()
    x[1, 70] = 1e4
    again, wider = quantize_tokens(x)
    assert torch.equal(wider != scale, torch.tensor([[False] * 3, [False, True, False], [False] * 3, [False] * 3]))
    assert torch.equal(again[[0, 2, 3]], whole[[0, 2, 3]]) and torch.equal(again[1, ::2], whole[1, ::2])


def test_reasons_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `explain`: each refusal names its cause."""
    assert "CPU only" in why_not_compiled(torch.device("cuda"), torch.bfloat16)
    assert "float32" in why_not_compiled(_CPU, torch.float32)
    monkeypatch.setattr(compiled, "_load", lambda: "not built: it takes a C++ compiler")
    assert "compiler" in why_not_compiled(_CPU, torch.bfloat16)
    monkeypatch.setenv(OFF_SWITCH, "0")
    assert OFF_SWITCH in why_not_compiled(_CPU, torch.bfloat16)


@needs_compiled
def test_structures_are_those_of_the_library() -> None:
    """Guards the interface: a library built from other sources is refused before it is called."""
    assert compiled.library().vlmfast_abi() == compiled._ABI
    original = compiled._ABI
    try:
        compiled._ABI = original + 1
        compiled._load.cache_clear()
        assert "install vlmfast again" in why_not_compiled(_CPU, torch.bfloat16)
    finally:
        compiled._ABI = original
        compiled._load.cache_clear()
    assert not why_not_compiled(_CPU, torch.bfloat16)

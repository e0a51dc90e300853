"""The forms that one linear layer of the decoder could take on a CPU, each on `copies` weights of its own.

All take bfloat16 rows [M, K] and give bfloat16 [M, N]; conversions which a form needs for that are part of its time.
Weights that can be reached lie in huge pages, as the package has them, or pages would be compared and not products;
FBGEMM's and inductor's can not. A form that this build or CPU lacks is a `Missing` with the reason.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from vlmfast_kernels.cpu.library import why_not_compiled
from vlmfast_kernels.cpu.linear import packed_linear, why_not_packed
from vlmfast_kernels.cpu.memory import prefer_huge_pages
from vlmfast_kernels.cpu.packed import PackedWeight, compiled_linear, quantize_compiled
from vlmfast_kernels.cpu.w8a8 import packed_w8a8, why_not_w8a8
from vlmfast_kernels.ops.linear import Apply
from vlmfast_kernels.ops.quant import INT4_GROUP_SIZE, QuantizedWeight, quantize

_LARGEST_ERROR = {"bf16": 0.01, "int8": 0.2, "int4": 0.3}
"""Relative errors above these are no rounding but a wrong product, which is not timed."""
_FLAGS = ("amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx512_f", "avx2")

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One form of the layer, checked."""

    key: str
    title: str
    megabytes: float
    """Weights and scales that a pass over all copies reads, 10^6 bytes."""
    prepare: Callable[[Tensor], Tensor]
    """Makes its input of the rows, outside the clock."""
    run: Callable[[Tensor], Tensor]
    """A pass over all copies; returns the product with the last one."""
    error: float
    """Mean over the rows of |result - float product| / |float product|, norms of a row."""
    row_alone: bool
    """Whether the first row's result has the same bits in every one of the measured batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A form that can not be measured here."""

    key: str
    title: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all forms are measured on: `weights`, each bfloat16 [N, K], and `rows`, bfloat16 [largest M, K]."""

    weights: Sequence[Tensor]
    rows: Tensor
    sizes: Sequence[int]

    @classmethod
    def random(cls, outputs: int, inputs: int, copies: int, sizes: Sequence[int]) -> Setup:
        """Normal weights and rows. As in decoders one input is larger than the rest, and some rows than others."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(max(sizes), inputs, generator=generator)
        rows[:, inputs // 2] *= 8
        rows[1::4] *= 2
        weights = [torch.randn(outputs, inputs, generator=generator) / inputs**0.5 for _ in range(copies)]
        return cls(weights=[weight.bfloat16() for weight in weights], rows=rows.bfloat16(), sizes=tuple(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """A candidate in the making."""

    run: Callable[[Tensor], Tensor]
    bytes_a_copy: int
    prepare: Callable[[Tensor], Tensor] = lambda rows: rows


class _AbsentError(Exception):
    """This form does not run here; the message says why."""


@torch.inference_mode()
def candidates(setup: Setup, inductor: bool) -> Iterator[Candidate | Missing]:
    """All forms in the table's order, each checked against the float product of the unrounded weights."""
    for (key, title, dtype), build in _BUILDERS.items():
        if key.startswith("inductor") and not inductor:
            yield Missing(key=key, title=title, reason="measured with --inductor: it compiles for minutes")
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of eager quantisation, which torch means to retire
                yield _checked(key, title, dtype, build(setup), setup)
        except (_AbsentError, AttributeError, AssertionError, NotImplementedError, RuntimeError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            yield Missing(key=key, title=title, reason=lines[0])


def _checked(key: str, title: str, dtype: str, form: _Form, setup: Setup) -> Candidate:
    wanted = setup.rows.float() @ setup.weights[-1].float().T
    results = [form.run(form.prepare(setup.rows[:size])) for size in setup.sizes]
    errors: list[float] = []
    for size, result in zip(setup.sizes, results, strict=True):
        assert result.dtype == torch.bfloat16 and result.shape == wanted[:size].shape
        gap = (result.float() - wanted[:size]).norm(dim=-1) / wanted[:size].norm(dim=-1)
        errors.append(gap.mean().item())
    worst = max(errors)
    if not worst <= _LARGEST_ERROR[dtype]:
        raise _AbsentError(f"wrong: relative error {worst:.2g}, not timed")
    return Candidate(
        key=key,
        title=title,
        megabytes=form.bytes_a_copy * len(setup.weights) / 1e6,
        prepare=form.prepare,
        run=form.run,
        error=errors[-1],
        row_alone=all(torch.equal(result[0], results[0][0]) for result in results),
    )


def _in_turn(layers: Sequence[Layer]) -> Callable[[Tensor], Tensor]:
    """A pass over the copies."""
    first, *others = layers

    def run(rows: Tensor) -> Tensor:
        out = first(rows)
        for layer in others:
            out = layer(rows)
        return out

    return run


def _without_residual(apply: Apply) -> Layer:
    return lambda rows: apply(rows, None)


def _require(reason: str) -> None:
    if reason:
        raise _AbsentError(reason)


_CPU = torch.device("cpu")


def _onednn_bf16(setup: Setup) -> _Form:
    _require(why_not_packed(_CPU, torch.bfloat16))
    layers = [packed_linear(weight, None).apply for weight in setup.weights]
    run = _in_turn([_without_residual(apply) for apply in layers])
    return _Form(run=run, bytes_a_copy=setup.weights[0].nbytes)


def _inductor(setup: Setup, tuned: bool) -> _Form:
    """One graph of all copies for each size. Each has its input: those of one input would be joined to one product."""
    from torch import _dynamo
    from torch._inductor import config

    class Pass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in setup.weights)

        def forward(self, inputs: Tensor) -> tuple[list[Tensor], Tensor]:
            products = [nnf.linear(rows, weight) for rows, weight in zip(inputs, self.weights, strict=True)]
            # A row of each is kept, so that no product is left out and none of their memory is held.
            return [product[:1].clone() for product in products[:-1]], products[-1]

    options: dict[str, str | int | bool | Callable[..., object]] = {"freezing": True}
    if tuned:
        options |= {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    config.freezing = True  # dynamo asks this one, at the first call, whether weights are constants
    _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, 2 * len(setup.sizes))
    compiled = torch.compile(Pass().eval(), dynamic=False, options=options)
    copies = len(setup.weights)

    def run(rows: Tensor) -> Tensor:
        out: Tensor = compiled(rows.expand(copies, *rows.shape))[1]
        return out

    return _Form(run=run, bytes_a_copy=setup.weights[0].nbytes)


def _compiled(setup: Setup, kind: Literal["int8", "int4"] | None) -> _Form:
    _require(why_not_compiled(_CPU, torch.bfloat16))
    packed = [
        PackedWeight(weight if kind is None else quantize_compiled(weight, kind), None) for weight in setup.weights
    ]
    layers = [compiled_linear(weight).apply for weight in packed]
    run = _in_turn([_without_residual(apply) for apply in layers])
    return _Form(run=run, bytes_a_copy=packed[0].num_bytes)


def _aten_int8(setup: Setup) -> _Form:
    product = torch.ops.aten._weight_int8pack_mm.default

    def layer(quantised: QuantizedWeight) -> Layer:
        scale = quantised.scale.bfloat16()
        prefer_huge_pages(quantised.codes.data_ptr(), quantised.codes.nbytes)
        return lambda rows: product(rows, quantised.codes, scale)

    weights = [_quantised(weight, "int8") for weight in setup.weights]
    outputs, inputs = setup.weights[0].shape
    return _Form(run=_in_turn([layer(weight) for weight in weights]), bytes_a_copy=outputs * (inputs + 2))


def _aten_int4(setup: Setup) -> _Form:
    """The package's int4 codes and scales, so that its error is theirs; zero points are 0."""
    product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default

    def layer(quantised: QuantizedWeight) -> Layer:
        codes = torch.stack((quantised.codes & 15, quantised.codes >> 4), -1).flatten(1)[:, : quantised.inputs]
        packed = pack(codes.int().contiguous(), 1)
        prefer_huge_pages(packed.data_ptr(), packed.nbytes)
        scale = quantised.scale[:, : quantised.inputs // INT4_GROUP_SIZE].T
        scales = torch.stack((scale, torch.zeros_like(scale)), -1).contiguous()  # [groups, N, 2]
        return lambda rows: product(rows, packed, INT4_GROUP_SIZE, scales)

    outputs, inputs = setup.weights[0].shape
    if inputs % INT4_GROUP_SIZE:
        raise _AbsentError(f"needs whole groups of {INT4_GROUP_SIZE} inputs")
    layers = [layer(_quantised(weight, "int4")) for weight in setup.weights]
    return _Form(run=_in_turn(layers), bytes_a_copy=outputs * (inputs // 2 + 4 * inputs // INT4_GROUP_SIZE))


def _fbgemm(setup: Setup) -> _Form:
    """Takes and gives float32, and quantises a batch with one scale."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise _AbsentError("this torch has no FBGEMM")
    prepack, product = torch.ops.quantized.linear_prepack, torch.ops.quantized.linear_dynamic

    def layer(quantised: QuantizedWeight) -> Layer:
        scale = quantised.scale.double()
        zero_points = torch.zeros(len(scale), dtype=torch.int64)
        packed = prepack(
            torch._make_per_channel_quantized_tensor(quantised.codes, scale, zero_points, 0),
            None,
        )
        return lambda rows: product(rows.float(), packed, False).bfloat16()  # False: all 8 bits

    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        layers = [layer(_quantised(weight, "int8")) for weight in setup.weights]
    finally:
        torch.backends.quantized.engine = before
    outputs, inputs = setup.weights[0].shape
    return _Form(run=_in_turn(layers), bytes_a_copy=outputs * (inputs + 4))


def _qlinear_alone(setup: Setup) -> _Form:
    """Codes are made outside the clock, with one scale known beforehand: the least that any use of it costs."""
    _require(why_not_w8a8(_CPU))
    product, prepack = torch.ops.onednn.qlinear_pointwise.default, torch.ops.onednn.qlinear_prepack
    unit = setup.rows.float().abs().max().item() / 127

    def layer(quantised: QuantizedWeight) -> Layer:
        packed, scale = prepack(quantised.codes.contiguous(), None), quantised.scale.clone()
        prefer_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
        zero_points = torch.zeros(len(scale), dtype=torch.int64)
        return lambda codes: product(
            codes, unit, 128, packed, scale, zero_points, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )

    outputs, inputs = setup.weights[0].shape
    return _Form(
        run=_in_turn([layer(_quantised(weight, "int8")) for weight in setup.weights]),
        bytes_a_copy=outputs * (inputs + 4),
        prepare=lambda rows: ((rows.float() / unit).round() + 128).to(torch.uint8),
    )


def _qlinear_tokens(setup: Setup) -> _Form:
    """As the int8 vision tower uses it."""
    _require(why_not_w8a8(_CPU, torch.bfloat16))
    layers = [packed_w8a8(_quantised(weight, "int8"), None).apply for weight in setup.weights]
    outputs, inputs = setup.weights[0].shape
    run = _in_turn([_without_residual(apply) for apply in layers])
    return _Form(run=run, bytes_a_copy=outputs * (inputs + 4))


def _quantised(weight: Tensor, kind: Literal["int8", "int4"]) -> QuantizedWeight:
    compiled = not why_not_compiled(_CPU, torch.bfloat16)
    return quantize_compiled(weight, kind) if compiled else quantize(weight, kind)


_BUILDERS: dict[tuple[str, str, str], Callable[[Setup], _Form]] = {
    ("onednn_bf16", "oneDNN bf16, prepacked", "bf16"): _onednn_bf16,
    ("inductor", "inductor bf16, freezing", "bf16"): lambda setup: _inductor(setup, tuned=False),
    ("inductor_tuned", "inductor bf16, freezing, max-autotune", "bf16"): lambda setup: _inductor(setup, tuned=True),
    ("compiled_bf16", "vlmfast bf16", "bf16"): lambda setup: _compiled(setup, None),
    ("aten_int8", "aten `_weight_int8pack_mm`", "int8"): _aten_int8,
    ("fbgemm", "FBGEMM `quantized.linear_dynamic`", "int8"): _fbgemm,
    ("qlinear", "`onednn.qlinear` u8, product alone", "int8"): _qlinear_alone,
    ("qlinear_tokens", "`onednn.qlinear` u8, a scale a token", "int8"): _qlinear_tokens,
    ("compiled_int8", "vlmfast int8", "int8"): lambda setup: _compiled(setup, "int8"),
    ("aten_int4", "aten `_weight_int4pack_mm_for_cpu`", "int4"): _aten_int4,
    ("compiled_int4", "vlmfast int4", "int4"): lambda setup: _compiled(setup, "int4"),
}
"""(key, title, what its weights are) -> how it is made."""


def cpu_features() -> str:
    """What the CPU multiplies with, and its last cache."""
    has = torch.cpu.get_capabilities()
    names = [flag.upper().replace("_", "-") for flag in _FLAGS if has.get(flag)]
    parts = [", ".join(names) or "no vector instructions known of"]
    if not has.get("amx_tile"):
        parts.append("no AMX")
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    if caches:
        parts.append(f"last cache {caches[-1].read_text(encoding='ascii').strip()}")
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return "; ".join([*parts, *([f"ONEDNN_MAX_CPU_ISA={limit}"] if limit else [])])

"""Which linear layers of a family network are quantised, and to what: the names under which their weights are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast_kernels.ops.quant import GROUP_SIZE, INT4_GROUP_SIZE, Quantization, QuantizedWeight
from vlmfast_models.layers import Linear

Plan = Mapping[str, tuple[Linear, Quantization]]
"""Our name of a weight -> its layer, and what the weight is quantised to."""


def quantization_plan(model: Any) -> Plan:
    """The layers that `prepare_for_inference` will quantise, as `decoder.quantization` and `vision.int8` say."""
    plan: dict[str, tuple[Linear, Quantization]] = {}
    if model.decoder.quantization is not None:
        found: list[tuple[str, nn.Module]] = list(model.decoder.named_modules(prefix="decoder"))
        for name, module in found:
            if isinstance(module, Linear):
                is_head = module is model.decoder.head
                kind = model.decoder.head_quantization if is_head else model.decoder.quantization
                plan[f"{name}.weight"] = module, kind
    if model.vision.int8:
        for name, linear in model.vision.int8_linears().items():
            plan[f"vision.{name}.weight"] = linear, "int8"
    return plan


def quantize_all(plan: Plan) -> dict[str, QuantizedWeight]:
    """Quantises the weights of a plan, those that are not yet."""
    return {name: linear.quantize(kind) for name, (linear, kind) in plan.items()}


def stored_form(plan: Plan) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name -> dtype and shape of the tensors that `parts_of` gives for a plan."""
    form: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, (linear, kind) in plan.items():
        outputs, inputs = linear.weight.shape
        groups = -(-inputs // GROUP_SIZE)
        if kind == "int8":
            form[f"{name}.codes"] = torch.int8, (outputs, inputs)
            form[f"{name}.scale"] = torch.float32, (outputs,)
        else:
            form[f"{name}.codes"] = torch.uint8, (outputs, groups * GROUP_SIZE // 2)
            form[f"{name}.scale"] = torch.bfloat16, (outputs, groups * GROUP_SIZE // INT4_GROUP_SIZE)
    return form


def parts_of(weights: Mapping[str, QuantizedWeight]) -> dict[str, Tensor]:
    """The tensors of quantised weights, under names."""
    return {
        f"{name}.{part}": getattr(weight, part).contiguous()
        for name, weight in weights.items()
        for part in ("codes", "scale")
    }


def with_parts(plan: Plan, tensors: Mapping[str, Tensor]) -> dict[str, QuantizedWeight]:
    """The quantised weights of a plan, of the tensors that `parts_of` gave. Codes are not copied."""
    return {
        name: QuantizedWeight(
            kind=kind,
            codes=tensors[f"{name}.codes"],
            scale=tensors[f"{name}.scale"].clone(),  # outlives the packing
            inputs=linear.weight.shape[1],
        )
        for name, (linear, kind) in plan.items()
    }

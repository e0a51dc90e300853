"""One loop over every operation, implementation, input and dtype; a new kernel is tested by registering it.

The rule is flash-attention's: against the float32 reference, an implementation may lose at most twice what the torch
reference itself loses in that dtype, plus the tolerance that the operation states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vlmfast_kernels.op import Implementation, Op, all_ops

_DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]
_CASES = [
    pytest.param(op, implementation, dtype, id=f"{op.name}-{implementation.name}-{dtype}")
    for op in all_ops().values()
    for implementation in [
        *op.implementations,
        Implementation(name="reference", function=op.reference, supports=lambda device, dtype: ""),
    ]
    for dtype in op.tolerance
]


def _to(arguments: tuple[Any, ...], *, device: str, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """Arguments on a device, floats in a dtype, strides kept."""
    return tuple(
        argument.to(device, dtype if dtype is not None and argument.is_floating_point() else argument.dtype)
        if isinstance(argument, torch.Tensor)
        else argument
        for argument in arguments
    )


def _check(op: Op[Any], function: Callable[..., torch.Tensor], dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(11)
    cases = list(op.make_inputs(dtype, generator))
    assert len(cases) >= 3, "an operation brings at least three inputs"
    for inputs in cases:
        arguments = _to(inputs, device=device)
        kept = [argument.clone() for argument in arguments if isinstance(argument, torch.Tensor)]
        exact = op.reference(*_to(arguments, device=device, dtype=torch.float32))
        with torch.inference_mode():
            out = function(*arguments)
            plain = op.reference(*arguments)
        assert out.dtype == plain.dtype == dtype and out.shape == exact.shape
        allowed = 2 * float((plain.float() - exact).abs().max()) + op.tolerance[dtype] * float(exact.abs().max())
        lost = float((out.float() - exact).abs().max())
        shapes = [list(argument.shape) for argument in kept]
        assert lost <= allowed, f"{op.name} {shapes}: lost {lost:.2e}, allowed {allowed:.2e}"
        after = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        assert all(torch.equal(one, two) for one, two in zip(kept, after, strict=True)), "an input was written to"


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize(("op", "implementation", "dtype"), _CASES)
def test_implementation_keeps_to_its_reference(
    op: Op[Any], implementation: Implementation[Any], dtype: torch.dtype, device: str
) -> None:
    """Guards every kernel against its reference, over shapes that hurt; the inputs must stay as they were."""
    reason = implementation.supports(torch.device(device), dtype)
    if reason:
        pytest.skip(f"{implementation.name}: {reason}")
    _check(op, implementation.function, dtype, device)


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in all_ops().values()])
def test_the_rule_sees_a_wrong_kernel(op: Op[Any]) -> None:
    """Negative control: a result off by 5 %, or with its last row taken from the first, breaks the rule."""
    for dtype in op.tolerance:
        with pytest.raises(AssertionError, match="lost"):
            _check(op, lambda *arguments: op.reference(*arguments) * 1.05, dtype, "cpu")

        def last_row_wrong(*arguments: Any) -> torch.Tensor:
            out = op.reference(*arguments).clone()
            out.flatten()[-1] += out.abs().max()
            return out

        with pytest.raises(AssertionError, match="lost"):
            _check(op, last_row_wrong, dtype, "cpu")


def test_the_ops_we_know_are_found() -> None:
    """Guards the loop above: an operation that is not found is not tested."""
    assert {"rms_norm", "rotate", "silu_mul", "attend", "attend_all"} <= set(all_ops())


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in all_ops().values()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_explain_says_what_resolve_takes(op: Op[Any], dtype: torch.dtype, device: str) -> None:
    """Guards `explain`: it names the chosen function, and a reason for every candidate it passed over."""
    target = torch.device(device)
    lines = op.explain(target, dtype).splitlines()
    assert all(line.startswith(f"{op.name}: ") for line in lines)
    assert [line.endswith(": chosen") for line in lines] == [False] * (len(lines) - 1) + [True]
    chosen = lines[-1].split(": ")[1]
    by_name = {implementation.name: implementation.function for implementation in op.implementations}
    assert op.resolve(target, dtype) is by_name.get(chosen, op.reference)
    assert (chosen == "torch reference") == (op.resolve(target, dtype) is op.reference)
    for line in lines[:-1]:
        assert len(line.split(": ", 2)[2]) > 5


def test_later_implementations_are_preferred_and_refusals_passed_over() -> None:
    """Guards the choice itself on an operation of the test's own."""
    op: Op[Any] = Op(name="twice", reference=lambda x: 2 * x, tolerance={}, make_inputs=lambda dtype, gen: iter(()))
    device = torch.device("cpu")
    assert op.resolve(device, torch.float32) is op.reference
    assert op.explain(device, torch.float32) == "twice: torch reference: chosen"
    first = op.implement("first", supports=lambda device, dtype: "")(lambda x: x + x)
    second = op.implement("second", supports=lambda device, dtype: "float32 only" * (dtype != torch.float32))(
        lambda x: x * 2
    )
    assert op.resolve(device, torch.float32) is second
    assert op.resolve(device, torch.bfloat16) is first
    assert op.explain(device, torch.bfloat16) == "twice: second: float32 only\ntwice: first: chosen"

"""An operation: its torch reference, its other implementations, and the choice between them.

The reference is the definition; an implementation is a faster way to the same numbers within `tolerance`. The choice
is made once per device and dtype with `resolve`, and `explain` tells which was chosen and why not the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_BACKENDS = ("cpu",)
_OP_FILES = ("norm", "rope", "activation", "attention", "merge", "score", "quant", "w8a8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation(Generic[F]):
    """One way to compute an operation. `supports` returns why it can not run here, or an empty string if it can."""

    name: str
    function: F
    supports: Callable[[torch.device, torch.dtype], str]


@dataclass(slots=True, kw_only=True)
class Op(Generic[F]):
    """An operation under a name; called directly it runs the reference."""

    name: str
    reference: F
    tolerance: Mapping[torch.dtype, float]
    """Largest allowed |implementation - float32 reference|, relative to the reference's largest magnitude."""
    make_inputs: Callable[[torch.dtype, torch.Generator], Iterator[tuple[Any, ...]]]
    """Argument tuples that hurt: one row, odd sizes, strides."""
    implementations: list[Implementation[F]] = field(default_factory=list)

    def implement(self, name: str, supports: Callable[[torch.device, torch.dtype], str]) -> Callable[[F], F]:
        """Decorator that registers a function as an implementation; later registrations are preferred."""

        def register(function: F) -> F:
            self.implementations.append(Implementation(name=name, function=function, supports=supports))
            return function

        return register

    def resolve(self, device: torch.device, dtype: torch.dtype) -> F:
        """The fastest implementation that supports the device and dtype, else the reference."""
        _load_backends()
        for implementation in reversed(self.implementations):
            if not implementation.supports(device, dtype):
                return implementation.function
        return self.reference

    def explain(self, device: torch.device, dtype: torch.dtype) -> str:
        """One line a candidate: which one `resolve` takes, and the reason each better one was passed over."""
        _load_backends()
        lines = []
        for implementation in reversed(self.implementations):
            reason = implementation.supports(device, dtype)
            lines.append(f"{self.name}: {implementation.name}: {reason or 'chosen'}")
            if not reason:
                return "\n".join(lines)
        return "\n".join([*lines, f"{self.name}: torch reference: chosen"])


def _load_backends() -> None:
    """Imports the implementation modules, so that they register; a second call costs one dictionary look-up each."""
    for backend in _BACKENDS:
        importlib.import_module(f"vlmfast_kernels.{backend}")


def all_ops() -> dict[str, Op[Any]]:
    """Every operation by name, with all implementations registered."""
    ops: dict[str, Op[Any]] = {}
    for file in _OP_FILES:
        module = importlib.import_module(f"vlmfast_kernels.ops.{file}")
        ops.update({value.name: value for value in vars(module).values() if isinstance(value, Op)})
    _load_backends()
    return ops

"""What options check of their values, and how they keep numbers. No torch."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeVar

from vlmfast.errors import OptionError

T = TypeVar("T")


def given(kind: type[T], name: str, value: T | None) -> T:
    """The options given for an argument, or the default ones.

    Raises:
        OptionError: it is something else. An empty one, such as {}, is not taken for none.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise OptionError(f"{name} must be options or None, got {value!r}; write {name}={kind.__name__}(...)")
    return value


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raises OptionError, which names the option and its value, where a rule does not hold."""
    if not holds:
        raise OptionError(f"{name} must be {rule}, got {value!r}")


def require_kind(kind: type | tuple[type, ...], name: str, value: object, rule: str) -> None:
    """A value of another type would fail in the middle of a step, where others are computed beside it."""
    require(isinstance(value, kind) and not isinstance(value, bool), name, value, rule)


def settle(options: object, kind: Callable[[Any], object], *names: str) -> None:
    """Makes int or float of numbers of other libraries, which options take as well: torch and JSON do not."""
    for name in names:
        if (value := getattr(options, name)) is not None:
            try:
                object.__setattr__(options, name, kind(value))
            except OverflowError as error:
                raise OptionError(f"{name} must be a number that a float can hold, got a far larger one") from error


def require_counts(options: object, *names: str) -> None:
    """Whole numbers from 1 on."""
    for name in names:
        require_kind(Integral, name, getattr(options, name), "a whole number")
        require(getattr(options, name) > 0, name, getattr(options, name), "at least 1")
        settle(options, int, name)


def plain(value: Any) -> Any:
    """The int or float that a number is; of a tuple, each; a name is left alone."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value if isinstance(value, str) else int(value) if isinstance(value, Integral) else float(value)

"""Options check themselves: every range, both ends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vlmfast.errors import OptionError
from vlmfast.options import Batching, Caching, Limits, Sampling

_NAN, _INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", [1, 10**9]),
        ("temperature", [0.0, 1e-9, 100.0]),
        ("top_p", [1e-9, 0.5, 1.0]),
        ("top_k", [0, 1, 10**9]),
        ("repetition_penalty", [1e-3, 1.0, 50.0]),
        ("seed", [None, 0, 2**63 - 1]),
        ("stop", [(), ("a",), ("a", "b")]),
    ],
)
def test_values_in_range_are_taken(name: str, values: list[Any]) -> None:
    """Guards the ends of each range that belong to it."""
    for value in values:
        assert getattr(Sampling(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", [0, -1]),
        ("temperature", [-0.1, _NAN, _INF, 10**400]),
        ("top_p", [0.0, -1.0, 1.01, _NAN]),
        ("top_k", [-1]),
        ("repetition_penalty", [0.0, -1.0, _NAN, _INF]),
        ("seed", [-1, 2**63]),
        ("stop", ["", ("a", "")]),
    ],
)
def test_values_out_of_range_are_named(name: str, values: list[Any]) -> None:
    """Guards case 46 (out of range is an error, not silently off): the message names the option and the value."""
    for value in values:
        with pytest.raises(OptionError, match=name):
            Sampling(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", ["5", 2.5, None, True]),
        ("temperature", ["hot", None, True, 1j]),
        ("top_p", ["all", None]),
        ("top_k", [2.5, "5", None]),
        ("repetition_penalty", [None, "1"]),
        ("seed", [1.5, "1", True]),
        ("stop", [None, 5, (1,), ("a", None), [b"a"]]),
    ],
)
def test_values_of_a_wrong_type_are_named(name: str, values: list[Any]) -> None:
    """Guards the batch: a seed of 1.5 would fail inside a step, and take down the requests computed beside it."""
    for value in values:
        with pytest.raises(OptionError, match=name):
            Sampling(**{name: value})
    with pytest.raises(OptionError, match="max_sequences must be a whole number"):
        Batching(max_sequences=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [Limits, Batching])
def test_limits_are_at_least_one(options: Any) -> None:
    """Guards every whole-number limit of `Limits` and `Batching`, also those added later."""
    fields = [field for field in dataclasses.fields(options) if type(field.default) is int]
    assert len(fields) >= 3
    for field in fields:
        assert getattr(options(**{field.name: 1}), field.name) == 1
        for value in (0, -3):
            with pytest.raises(OptionError, match=rf"{field.name} must be at least 1, got {value}"):
                options(**{field.name: value})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("allow_truncated", [True, False], [1, None, "no"]),
        ("allow_paths", [True, False], [0, "yes"]),
        ("allow_urls", [True, False], [0, None]),
        ("fetch_timeout_s", [1, 0.5, 600.0], [0, -1, _NAN, _INF, "5", True, None]),
        ("formats", [("PNG",), ("JPEG", "WEBP")], [(), "PNG", ("png",), ("EPS",), ("PNG", "WMF"), None, (1,)]),
    ],
)
def test_limits_of_other_kinds(name: str, good: list[Any], bad: list[Any]) -> None:
    """Guards the switches: a text "no" would count as yes, and EPS files start another program."""
    for value in good:
        assert getattr(Limits(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(OptionError, match=name):
            Limits(**{name: value})


def test_formats_are_kept_as_a_tuple() -> None:
    formats = ["PNG", "GIF"]
    limits = Limits(formats=formats)  # type: ignore[arg-type]
    formats.clear()
    assert limits.formats == ("PNG", "GIF")


def test_one_stop_text_may_stand_alone() -> None:
    """Guards `stop="x"`: a string is one stop text, not its letters."""
    assert Sampling(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [Sampling(), Limits(), Batching(), Caching()])
def test_options_are_frozen(options: Any) -> None:
    """Guards values shared between requests: they can not be changed, and unknown names are refused."""
    name = dataclasses.fields(options)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(options, name, 5)
    with pytest.raises(TypeError):
        type(options)(no_such_option=1)


def test_defaults_are_greedy_and_unlimited() -> None:
    """Guards invariant 2 (lossy is asked for): nothing but the length limit is on by default."""
    assert Sampling() == Sampling(
        max_new_tokens=256, temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, stop=(), seed=None
    )


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("features_ram_bytes", [-1, 1.5, "1", None, True]),
        ("features_disk_bytes", [-1]),
        ("prefix_ram_bytes", [-1]),
        ("prefix_disk_bytes", [-1]),
        ("prefix_disk", [1, None, "yes"]),
        ("folder", ["", 5, b"x", "a\0b"]),
        ("salt", [None, b"x", 1]),
    ],
)
def test_caching_checks_itself(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(OptionError, match=name):
            Caching(**{name: value})


def test_caching_can_be_off() -> None:
    off = Caching.off()
    assert not any(getattr(off, field.name) for field in dataclasses.fields(off))

"""Every shape that parity is checked on, with our model and transformers' on the same folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference import Reference
from shapes import SHAPES


class Twin:
    """The same folder loaded by both."""

    def __init__(self, ours: Any, theirs: Reference) -> None:
        self.ours, self.theirs = ours, theirs


@pytest.fixture(scope="session")
def twin_of(checkpoint_of: Callable[..., Path], load_vlm: Callable[..., Any]) -> Callable[[str], Twin]:
    made: dict[str, Twin] = {}

    def make(name: str) -> Twin:
        if name not in made:
            folder = checkpoint_of(SHAPES[name])
            made[name] = Twin(load_vlm(folder), Reference(folder))
        return made[name]

    return make


@pytest.fixture(scope="session", params=list(SHAPES), ids=str)
def twin(request: pytest.FixtureRequest, twin_of: Callable[[str], Twin]) -> Twin:
    """Every shape in turn."""
    return twin_of(request.param)


@pytest.fixture(scope="session")
def plain_twin(twin_of: Callable[[str], Twin]) -> Twin:
    return twin_of("plain")

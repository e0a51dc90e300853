"""What the speculator settles with the gate when the draft model fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vlmfast.options import Sampling
from vlmfast.spec.batch import Asked
from vlmfast.spec.options import Speculation
from vlmfast.spec.speculator import Speculator
from vlmfast.spec.tree import DraftTree


class _Model:
    """Reads prompts in 7 ms and drafts one token, until it is broken."""

    origin = "model"
    is_broken = False

    def __init__(self) -> None:
        self.known: set[int] = set()

    def begin(self, seq_id: int, asked: Asked) -> None:
        self.known.add(seq_id)

    def end(self, seq_id: int) -> None:
        self.known.remove(seq_id)

    def chain_ms(self, length: int) -> float:
        return float(length)

    def reading_ms(self, seq_id: int) -> float:
        return 7.0

    def propose(self, wanted: Sequence[tuple[int, Sequence[int], int]]) -> list[DraftTree]:
        if self.is_broken:
            raise RuntimeError("out of memory")
        return [DraftTree.chain([3], origin=self.origin) for _ in wanted]


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_advanced_is_repaid_once(fails: bool) -> None:
    """Guards a debt that nobody can earn back any more: after a failure, as after an end, none is left; not twice."""
    model = _Model()
    speculator = Speculator(Speculation(drafter="off", adaptive=False), model=model)
    asked = Asked(prompt_ids=(1, 2), images=(), places=(), plans=(), sampling=Sampling(), max_tokens=20)
    for seq_id in (0, 1):
        speculator.begin(seq_id, (1, 2), options=Speculation(drafter="model", draft_model="x"), asked=asked)
    wanted = [(0, [5], 4), (1, [5], 4)]
    assert [len(draft) for draft in speculator.propose(wanted)] == [1, 1]
    assert speculator.gate._advanced_ms == 14.0
    if fails:
        model.is_broken = True
        assert [len(draft) for draft in speculator.propose(wanted)] == [0, 0]
        assert speculator.gate._advanced_ms == 0.0 and not model.known
    for seq_id in (0, 1):
        speculator.end(seq_id)
    assert speculator.gate._advanced_ms == 0.0 and not model.known

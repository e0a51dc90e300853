"""What a drafter proposes and what came of it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

ROOT = -1
"""The parent of a draft's first tokens: the sequence's last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """Tokens that may follow a sequence, as a tree of K nodes. A chain is a tree with one branch.

    sequence ... root --- 0 --- 1 --- 3        tokens   t0 t1 t2 t3
                      \\-- 2                    parents  -1  0 -1  1
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """The node before each, `ROOT` for the first tokens. Parents stand before their children, so the first nodes of
    a tree are a tree."""
    proposals: tuple[Any, ...] = ()
    """For each node the distribution [V] that its token was drawn from, given the siblings before it. Empty: nothing
    was drawn, the tree follows from the context alone. A drawn token may not be left out because of what it is."""
    origin: str = ""
    """Which drafter, and how sure it was: drafts of one origin share the gate's statistics."""

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) and len(self.proposals) in (0, len(self.tokens))
        assert self.is_chain or all(ROOT <= parent < node for node, parent in enumerate(self.parents))

    @classmethod
    def chain(cls, tokens: Sequence[int], *, origin: str = "", proposals: Sequence[Any] = ()) -> DraftTree:
        """One token after the other."""
        return cls(tokens=tuple(tokens), parents=_chain_parents(len(tokens)), proposals=tuple(proposals), origin=origin)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == _chain_parents(len(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root, 1 for its children: what it adds to the root's position."""
        if self.is_chain:
            return tuple(range(1, len(self) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """For each node its depth, its rank among its siblings, and its parent."""
        ranks: dict[int, int] = {}
        found = []
        for depth, parent in zip(self.depths, self.parents, strict=True):
            found.append((depth, ranks.setdefault(parent, 0), parent))
            ranks[parent] += 1
        return found

    def children(self, node: int) -> list[int]:
        """The nodes after one (or after `ROOT`), in order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def first(self, num_nodes: int) -> DraftTree:
        """The tree of the first nodes."""
        if num_nodes >= len(self):
            return self
        return DraftTree(
            tokens=self.tokens[:num_nodes],
            parents=self.parents[:num_nodes],
            proposals=self.proposals[:num_nodes],
            origin=self.origin,
        )


@cache
def _chain_parents(num_nodes: int) -> tuple[int, ...]:
    return tuple(range(ROOT, num_nodes - 1))


NO_DRAFT = DraftTree()


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What verification made of a draft: the accepted path's nodes, and the token that the target chose after it."""

    path: tuple[int, ...]
    token: int


class Drafter(Protocol):
    """Proposes for one sequence. Whatever it proposes, answers stay as they are."""

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        """At most `budget` nodes to follow `context`: prompt and answer so far, the context of the call before with
        tokens added."""
        ...

    def observe(self, draft: DraftTree, acceptance: Acceptance) -> None:
        """Told what came of the last proposal, or of its first nodes."""
        ...

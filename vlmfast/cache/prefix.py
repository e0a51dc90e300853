"""Which prefixes have keys and values already: a radix tree over token ids and pictures. No torch.

A prompt is a row of units: a text token is its id, a picture is one unit however many tokens it has, so no prefix
ends inside a picture. Units are compared as they are, not by a hash. What a node holds for its units is a `Segment`, of
which the tree knows the size and how to split it. One tree for each salt; one byte budget for all.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture in a prompt. Equal ones have the same visual tokens after the same prefix."""

    key: str
    """The picture's ImageKey."""
    ids: tuple[int, ...]
    """Its token ids, placeholders and separators."""
    reduce_id: str = ""
    """How its visual tokens were reduced; empty when they are whole."""


Unit: TypeAlias = int | Picture
Units: TypeAlias = tuple[Unit, ...]


def num_tokens_of(units: Iterable[Unit]) -> int:
    """Tokens that units stand for."""
    return sum(1 if isinstance(unit, int) else len(unit.ids) for unit in units)


class Segment(Protocol):
    """Keys and values of consecutive tokens; never written to."""

    @property
    def num_bytes(self) -> int: ...

    def split(self, at: int) -> tuple[Any, Any]:
        """Two segments that share no memory: the first `at` tokens and the rest."""
        ...


class PrefixStore(Protocol):
    """A slower tier below the tree: segments that end with a picture, by the whole prefix that they end."""

    def load(self, prefix: Units, num_tokens: int) -> Segment | None:
        """The last `num_tokens` tokens of a prefix, or None."""
        ...

    def save(self, prefix: Units, num_tokens: int, copy: Callable[[], Segment]) -> None:
        """Keeps the last `num_tokens` tokens of a prefix; `copy` is not called where they are kept already."""
        ...


@dataclass(slots=True, eq=False)
class _Node:
    """The units between two branchings; `num_tokens` and `segment` belong to these alone. A root has none."""

    units: Units
    num_tokens: int
    segment: Any
    parent: _Node | None
    children: dict[Unit, _Node] = field(default_factory=dict)
    last_used: int = 0


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Match:
    """The longest known prefix of a prompt. It pins: what it reaches stays in the tree until it is released or no
    longer referred to, so that nothing stays pinned by a request that Ctrl-C ended at the wrong moment."""

    num_tokens: int
    segments: list[tuple[Any, int]]
    """(segment, how many of its tokens), in order."""
    node: _Node


class PrefixCache:
    """Least recently used leaves make room. Not locked: the scheduler's owner is its only user.

    Args:
        max_bytes: limit of all segments together.
        bytes_per_token: at most so many bytes hold one token; tells before copying whether a segment will fit.
        store: a second tier for whole picture prefixes. What it gives must fit into the first.
    """

    def __init__(self, max_bytes: int, bytes_per_token: int, store: PrefixStore | None = None) -> None:
        self.max_bytes = max_bytes
        self._bytes_per_token = bytes_per_token
        self._store = store
        self._roots: dict[str, _Node] = {}
        self._matches: WeakSet[Match] = WeakSet()
        self._clock = itertools.count(1)
        self.num_bytes = 0
        self.num_lookups = 0
        self.num_hits = 0
        self.num_cached_tokens = 0
        """Tokens of all hits."""
        self.num_evictions = 0

    def match(self, units: Units, salt: str = "") -> Match:
        """The longest known prefix of `units`."""
        if self._store is not None:
            self._load_pictures(units, salt)
        node, depth, inside = self._walk(units, salt)
        path = [node, *self._ancestors(node)][::-1]
        now = next(self._clock)
        for one in path:
            one.last_used = now
        segments = [(one.segment, one.num_tokens) for one in path if one.parent is not None]
        if inside:  # the last node's edge goes on otherwise after so many units
            segments[-1] = (node.segment, num_tokens_of(node.units[:inside]))
        found = self._pin(node, num_tokens_of(units[:depth]), segments)
        self.num_lookups += 1
        self.num_hits += found.num_tokens > 0
        self.num_cached_tokens += found.num_tokens
        return found

    def insert(self, match: Match, units: Units, copy: Callable[[int, int], Segment], salt: str = "") -> None:
        """Makes `units` known as far as there is room; the pin of `match` moves on to their end.

        copy(start, end) gives the segment of tokens start .. end - 1 and is called for those that are new only.
        """
        node, depth, inside = self._walk(units, salt)
        if inside and depth < len(units):
            node = self._split(node, inside)
        match.node = node
        if depth < len(units):
            start = num_tokens_of(units[:depth])
            end = start + num_tokens_of(units[depth:])
            if not self._make_room((end - start) * self._bytes_per_token):
                return
            segment = copy(start, end)
            leaf = _Node(units[depth:], end - start, segment, node, last_used=next(self._clock))
            self.num_bytes += segment.num_bytes
            node.children[units[depth]] = leaf
            if node.parent is None:
                self._roots[salt] = node
            match.node = leaf

    def persist(self, units: Units, copy: Callable[[int, int], Segment]) -> None:
        """Hands each picture prefix of `units` to the second tier, if there is one."""
        if self._store is not None:
            for prefix, start, end in _picture_prefixes(units):
                self._store.save(prefix, end - start, partial(copy, start, end))

    def clear(self) -> None:
        """Forgets everything that is not pinned."""
        self._evict(until=0)

    def release(self, match: Match) -> None:
        """Ends what a match pins."""
        self._matches.discard(match)

    @property
    def num_pins(self) -> int:
        """Matches that pin."""
        return len(self._matches)

    def check_integrity(self) -> None:
        """Edges are not empty, siblings begin with different units, sizes add up, and what is pinned is there."""
        nodes = list(self._nodes())
        for node in nodes:
            for first, child in node.children.items():
                assert child.parent is node and child.units[0] == first
                assert child.num_tokens == num_tokens_of(child.units) > 0
        assert {id(match.node) for match in self._matches if match.node.parent} <= {id(node) for node in nodes}
        assert self.num_bytes == sum(node.segment.num_bytes for node in nodes if node.parent is not None)
        assert self.num_bytes <= self.max_bytes

    def _walk(self, units: Units, salt: str) -> tuple[_Node, int, int]:
        """The deepest node that `units` reach, how many of them are known, and how many of the node's own if not all.

        units    a b c d e f          edges  a b | c d x
        depth    |------>|            node "c d x", depth 4, inside 2
        """
        node = self._roots.get(salt) or _Node((), 0, None, None)
        depth = 0
        while depth < len(units) and (child := node.children.get(units[depth])) is not None:
            node = child
            common = _num_common(node.units, units[depth : depth + len(node.units)])
            depth += common
            if common < len(node.units):
                return node, depth, common
        return node, depth, 0

    def _pin(self, node: _Node, num_tokens: int, segments: list[tuple[Any, int]]) -> Match:
        match = Match(num_tokens=num_tokens, segments=segments, node=node)
        self._matches.add(match)
        return match

    def _split(self, node: _Node, at: int) -> _Node:
        """Puts a node over the first `at` units of another, which keeps the rest and its pins; returns the new one."""
        assert node.parent is not None
        above = num_tokens_of(node.units[:at])
        upper_segment, lower_segment = node.segment.split(above)
        upper = _Node(node.units[:at], above, upper_segment, node.parent, last_used=node.last_used)
        upper.children[node.units[at]] = node
        lower_units, below = node.units[at:], node.num_tokens - above
        self.num_bytes += upper_segment.num_bytes + lower_segment.num_bytes - node.segment.num_bytes
        node.parent.children[node.units[0]] = upper  # from here on no call: nothing that Ctrl-C could interrupt
        node.units, node.num_tokens, node.segment, node.parent = lower_units, below, lower_segment, upper
        return upper

    def _make_room(self, num_bytes: int) -> bool:
        """Evicts until so many bytes fit; False, and nothing is evicted, where they can not."""
        if self.num_bytes + num_bytes <= self.max_bytes:
            return True
        pinned = {one for match in self._matches for one in (match.node, *self._ancestors(match.node)) if one.parent}
        if sum(one.segment.num_bytes for one in pinned) + num_bytes > self.max_bytes:
            return False
        self._evict(until=self.max_bytes - num_bytes)
        return True

    def _evict(self, until: int) -> None:
        nodes = [node for node in self._nodes() if node.parent is not None]
        # Counted anew: Ctrl-C may have come between a change of the tree and of the sum.
        self.num_bytes = sum(node.segment.num_bytes for node in nodes)
        pinned = {match.node for match in self._matches}
        order = itertools.count()
        leaves = [(node.last_used, next(order), node) for node in nodes if not node.children and node not in pinned]
        heapq.heapify(leaves)
        while self.num_bytes > until and leaves:
            _, _, leaf = heapq.heappop(leaves)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.units[0]]
            self.num_bytes -= leaf.segment.num_bytes
            self.num_evictions += 1
            if parent.parent is not None and not parent.children and parent not in pinned:
                heapq.heappush(leaves, (parent.last_used, next(order), parent))
        self._roots = {salt: root for salt, root in self._roots.items() if root.children}

    def _load_pictures(self, units: Units, salt: str) -> None:
        """Fetches picture prefixes that only the second tier knows, from the front until one is missing."""
        assert self._store is not None
        for prefix, start, end in _picture_prefixes(units):
            node, depth, _ = self._walk(prefix, salt)
            if depth == len(prefix):
                continue
            segment = self._store.load(prefix, end - start)
            if segment is None:
                return
            known = num_tokens_of(prefix[:depth]) - start
            if known < 0:  # what lies before did not fit
                return
            rest = segment.split(known)[1] if known else segment
            self.insert(self._pin(node, 0, []), prefix, partial(_given, rest), salt)

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    @staticmethod
    def _ancestors(node: _Node) -> Iterator[_Node]:
        while node.parent is not None:
            node = node.parent
            yield node


def _num_common(one: Units, other: Units) -> int:
    """Length of the common beginning."""
    if one == other:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _picture_prefixes(units: Units) -> Iterator[tuple[Units, int, int]]:
    """Each prefix that ends with a picture, and the tokens start .. end - 1 of it since the picture before."""
    start = end = 0
    for index, unit in enumerate(units):
        end += num_tokens_of((unit,))
        if isinstance(unit, Picture):
            yield units[: index + 1], start, end
            start = end


def _given(segment: Segment, start: int, end: int) -> Segment:
    return segment

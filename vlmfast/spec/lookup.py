"""Prompt lookup: what followed the last few tokens when they stood in the prompt or the answer before."""

from __future__ import annotations

from collections.abc import Sequence

from vlmfast.spec.tree import NO_DRAFT, Acceptance, DraftTree

_MAX_PLACES = 32
"""Earlier places of an n-gram that are compared; only a text that repeats itself all the time has more."""


class LookupDrafter:
    """Continues the longest n-gram that ends the context at its latest earlier place (as prompt-lookup decoding does).

    Looks at each token once, in one dictionary: places of the shortest n-gram, each with the one before, of which the
    last `_MAX_PLACES` are compared further back.

    Args:
        barriers: tokens that no n-gram and no draft holds: placeholders of pictures, of which all look alike.
        ends: tokens after which nothing is drafted.
    """

    def __init__(
        self,
        *,
        min_ngram: int,
        max_ngram: int,
        barriers: frozenset[int] = frozenset(),
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._barriers, self._ends = barriers, ends
        self._places: dict[tuple[int, ...], int] = {}
        """Shortest n-gram -> where its latest occurrence ended that something follows."""
        self._before: dict[int, int] = {}
        """Such a place -> the one before of the same n-gram."""
        self._num_indexed = 0
        self._clear_from = 0
        """First token behind the last barrier among the indexed ones."""

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        """A chain of what followed."""
        self._index(context)
        size, longest, at = self._min_ngram, 0, -1
        if budget < 1 or len(context) - size < self._clear_from:
            return NO_DRAFT
        place = self._places.get(tuple(context[len(context) - size :]))
        for _ in range(_MAX_PLACES):
            if place is None or longest == self._max_ngram:
                break
            length = self._match(context, place)
            if length > longest:
                longest, at = length, place
            place = self._before.get(place)
        if not longest:
            return NO_DRAFT
        return DraftTree.chain(self._following(context, at, budget), origin=f"lookup/{longest}")

    def observe(self, draft: DraftTree, acceptance: Acceptance) -> None:
        """Nothing to learn: the next context holds it."""

    def _index(self, context: Sequence[int]) -> None:
        """Enters the n-grams that end before the last token."""
        assert self._num_indexed <= len(context), "a context only grows"
        size, places, barriers = self._min_ngram, self._places, self._barriers
        for end in range(self._num_indexed, len(context)):
            if context[end] in barriers:
                self._clear_from = end + 1
            elif end - size >= self._clear_from:
                gram = tuple(context[end - size : end])
                if gram in places:
                    self._before[end] = places[gram]
                places[gram] = end
        self._num_indexed = len(context)

    def _match(self, context: Sequence[int], place: int) -> int:
        """Tokens before a place that are those at the end of the context, up to the longest n-gram and a barrier."""
        length, end = self._min_ngram, len(context)
        most = min(self._max_ngram, place, end - self._clear_from)
        while length < most:
            token = context[place - length - 1]
            if token != context[end - length - 1] or token in self._barriers:
                break
            length += 1
        return length

    def _following(self, context: Sequence[int], place: int, budget: int) -> list[int]:
        """The tokens from a place on; where they reach the end of the context, they go on with themselves."""
        period = len(context) - place
        draft: list[int] = []
        for step in range(budget):
            token = context[place + step % period]
            if token in self._barriers:
                break
            draft.append(token)
            if token in self._ends:
                break
        return draft

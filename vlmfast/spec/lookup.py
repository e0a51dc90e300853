"""Prompt lookup: what followed the last few tokens when they stood in the prompt or the answer before."""

from __future__ import annotations

from collections.abc import Sequence

from vlmfast.spec.tree import NO_DRAFT, Acceptance, DraftTree


class LookupDrafter:
    """Continues the longest n-gram that ends the context at its latest earlier place (as prompt-lookup decoding does).

    Looks at each token once, in up to `max_ngram - min_ngram + 1` dictionary entries.

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
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._barriers, self._ends = barriers, ends
        self._places: dict[tuple[int, ...], int] = {}
        """n-gram -> where its latest occurrence ended that something follows."""
        self._num_indexed = 0
        self._clear_from = 0
        """First token behind the last barrier among the indexed ones."""

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        """A chain of what followed."""
        self._index(context)
        if budget < 1:
            return NO_DRAFT
        for size in self._sizes:
            if len(context) - size < self._clear_from:
                continue
            place = self._places.get(tuple(context[len(context) - size :]))
            if place is not None:
                return DraftTree.chain(self._following(context, place, budget), origin=f"lookup/{size}")
        return NO_DRAFT

    def observe(self, draft: DraftTree, acceptance: Acceptance) -> None:
        """Nothing to learn: the next context holds it."""

    def _index(self, context: Sequence[int]) -> None:
        """Enters the n-grams that end before the last token."""
        assert self._num_indexed <= len(context), "a context only grows"
        for end in range(self._num_indexed, len(context)):
            if end > 0 and context[end] not in self._barriers:
                for size in self._sizes:
                    if end - size >= self._clear_from:
                        self._places[tuple(context[end - size : end])] = end
            if context[end] in self._barriers:
                self._clear_from = end + 1
        self._num_indexed = len(context)

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

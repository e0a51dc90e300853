"""Suffix drafts: what most often followed the end of the context, in this request and in earlier answers. No torch.

The idea is SuffixDecoding's (arXiv 2411.04975): the longer the match, the longer the draft.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vlmfast.spec.automaton import SuffixAutomaton
from vlmfast.spec.tree import NO_DRAFT, Acceptance, DraftTree

_MIN_PROBABILITY = 0.1
"""A draft ends where its share of what was seen falls below this."""
_TOKENS_PER_MATCHED = 2
"""Longest draft, in tokens for each token that matched."""
_MAX_PROMPT = 1024
"""Tokens at the end of a prompt that are looked at."""
_MAX_GAP = 64
"""Tokens that are read after a pause in which nothing was drafted: what is older is left out, as it could not be
drafted, and reading it would cost what the pause saved."""
_MAX_ROW = 1024
"""Tokens of one answer that are kept."""
_MAX_UNREAD = 192
"""Tokens of answers that wait to be read, of those about the same: while nothing is drafted, all but the last ones
are left out."""
_TAIL = 16
"""Prompt tokens kept before an answer: what an answer begins with depends on the end of its question."""


@dataclass(slots=True)
class _Group:
    """Rows that belong together, in two generations: when the newer is full, the older is forgotten.

    Rows are read when they are asked for: most pictures never are again.
    """

    older: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    newer: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    unread: deque[Sequence[int]] = field(default_factory=deque)
    num_unread: int = 0
    """Tokens of the unread rows."""

    @property
    def num_tokens(self) -> int:
        return self.older.num_tokens + self.newer.num_tokens + self.num_unread

    def add(self, row: Sequence[int], most_unread: int) -> None:
        self.unread.append(row)
        self.num_unread += len(row)
        while self.num_unread > most_unread and len(self.unread) > 1:
            self.num_unread -= len(self.unread.popleft())

    def read(self, most_tokens: int) -> None:
        """Reads what waits; `most_tokens` fill a generation."""
        while self.unread:
            row = self.unread.popleft()
            self.num_unread -= len(row)
            if self.newer.num_tokens + len(row) > most_tokens:
                self.older, self.newer = self.newer, SuffixAutomaton()
            self.newer.begin_row()
            for token in row:
                self.newer.append(token)


class AnswerMemory:
    """Earlier answers: those about the same pictures, and all of one salt. Least recently used pictures make room.

    Args:
        max_tokens: kept in all, each in two places; a token takes about 0.7 kB.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._generation = max_tokens // 4
        self._groups: OrderedDict[tuple[str, ...], _Group] = OrderedDict()
        self.num_tokens = 0

    def sources(self, salt: str, pictures: tuple[str, ...]) -> list[tuple[str, SuffixAutomaton]]:
        """(name, automaton) of what may be known: about these pictures (their digests), and under the salt.

        Answers that were added before are read into them now, for those who hold them, too.
        """
        keys = {"picture": (salt, *pictures), "job": (salt,)} if pictures else {"job": (salt,)}
        found = []
        for name, key in keys.items():
            group = self._groups.get(key)
            if group is not None:
                self._groups.move_to_end(key)
                self.num_tokens -= group.num_tokens
                group.read(self._generation)
                self.num_tokens += group.num_tokens
                found += [(name, automaton) for automaton in (group.newer, group.older) if automaton.num_tokens]
        return found

    def add(self, salt: str, pictures: tuple[str, ...], row: Sequence[int]) -> None:
        """Keeps an answer, with the end of its question before it."""
        row = row[:_MAX_ROW]
        for key in {(salt, *pictures), (salt,)}:
            group = self._groups.setdefault(key, _Group())
            self._groups.move_to_end(key)
            self.num_tokens -= group.num_tokens
            group.add(row, min(_MAX_UNREAD, self._generation))
            self.num_tokens += group.num_tokens
        while self.num_tokens > self._max_tokens:
            _, forgotten = self._groups.popitem(last=False)
            self.num_tokens -= forgotten.num_tokens


@dataclass(slots=True)
class _Cursor:
    """How much of the end of a context occurs in an automaton."""

    name: str
    automaton: SuffixAutomaton
    state: int = 0
    length: int = 0


class SuffixDrafter:
    """Continues the longest end of the context that is known, from its own request or from `sources`.

    Args:
        sources: see `AnswerMemory.sources`; of equal matches the first counts.
        barriers: tokens that no match and no draft holds: placeholders of pictures.
        ends: tokens after which nothing is drafted.
        num_prompt: tokens of the context that are the question. That one was asked before makes no draft surer.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, SuffixAutomaton]] = (),
        *,
        num_prompt: int = 0,
        barriers: frozenset[int] = frozenset(),
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self._num_prompt = num_prompt
        self._barriers, self._ends = barriers, ends
        self._own = _Cursor("own", SuffixAutomaton())
        others = [_Cursor(name, automaton) for name, automaton in sources]
        self._cursors = [*(one for one in others if one.name == "picture"), self._own]
        self._cursors += [one for one in others if one.name != "picture"]
        self._num_seen = 0

    def propose(self, context: Sequence[int], budget: int) -> DraftTree:
        """A chain of at most twice as many tokens as matched."""
        if self._num_seen == 0:
            self._num_seen = text_start(context, self._barriers, _MAX_PROMPT)
        elif len(context) - self._num_seen > _MAX_GAP:
            self._num_seen = len(context) - _MAX_GAP
            self._own.automaton.begin_row()
            for cursor in self._cursors:
                cursor.state = cursor.length = 0
        for position in range(self._num_seen, len(context)):
            token = context[position]
            for cursor in self._cursors:
                cursor.state, cursor.length = cursor.automaton.advance(cursor.state, cursor.length, token)
            self._own.automaton.append(token)  # after its cursor: an earlier place is looked for
        self._num_seen = len(context)
        matching = [one for one in self._cursors if one.length] if budget > 0 else []
        for cursor in sorted(matching, key=_length, reverse=True):
            longest = min(budget, _TOKENS_PER_MATCHED * cursor.length)
            tokens = self._cut(cursor.automaton.continuation(cursor.state, longest, _MIN_PROBABILITY))
            if tokens:
                matched = min(cursor.length, max(len(context) - self._num_prompt, 0))
                certainty = min(matched.bit_length(), 5)  # 1, 2-3, 4-7, 8-15, more
                return DraftTree.chain(tokens, origin=f"suffix-{cursor.name}/{certainty}")
        return NO_DRAFT

    def observe(self, draft: DraftTree, acceptance: Acceptance) -> None:
        """Nothing to learn: the next context holds it."""

    def _cut(self, tokens: list[int]) -> list[int]:
        for index, token in enumerate(tokens):
            if token in self._barriers:
                return tokens[:index]
            if token in self._ends:
                return tokens[: index + 1]
        return tokens


def _length(cursor: _Cursor) -> int:
    return cursor.length


def answer_row(prompt_ids: Sequence[int], answer: Sequence[int], barriers: frozenset[int]) -> list[int]:
    """What `AnswerMemory.add` keeps of an answer (its end token included, where the model ended it)."""
    return [*prompt_ids[text_start(prompt_ids, barriers, _TAIL) :], *answer]


def text_start(ids: Sequence[int], barriers: frozenset[int], max_tokens: int) -> int:
    """Where the text at the end begins: behind the last barrier, and at most `max_tokens` before the end."""
    start = max(len(ids) - max_tokens, 0)
    for position in range(len(ids) - 1, start - 1, -1):
        if ids[position] in barriers:
            return position + 1
    return start

"""Every substring of rows of tokens, with how often it occurs: a suffix automaton that grows online. No torch."""

from __future__ import annotations

_MAX_WALK = 64
"""Suffixes counted a token. Only a text that repeats itself has more, and then its shortest ones are undercounted."""


class SuffixAutomaton:
    """States stand for sets of substrings that occur at the same places; at most two states a token.

    Built as in Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), for several rows.
    State 0 is the empty string. A state's link is the longest of its suffixes that occurs elsewhere, too.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._last = 0
        self.num_tokens = 0

    def begin_row(self) -> None:
        """The next token follows none of those before."""
        self._last = 0

    def append(self, token: int) -> None:
        """Adds a token to the row. Amortised constant time."""
        self.num_tokens += 1
        state = self._last = self._extend(self._last, token)
        for _ in range(_MAX_WALK):
            if state == 0:
                break
            self._count[state] += 1
            state = self._link[state]

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of a text that occurs here, as (state, length), when a token is added to the text.

        `state` and `length` are those of the text before; (0, 0) of an empty one.
        """
        while self._length[self._link[state]] >= length > 0:  # the state was split since
            state = self._link[state]
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        following = self._next[state].get(token)
        return (0, 0) if following is None else (following, length + 1)

    def continuation(self, state: int, max_tokens: int, min_probability: float) -> list[int]:
        """What followed most often, then most often after that, and so on (of equals: what came last).

        Ends where the share of all that followed, multiplied up, falls below `min_probability`.
        """
        tokens: list[int] = []
        probability = 1.0
        while len(tokens) < max_tokens and self._next[state]:
            following = self._next[state]
            if len(following) == 1:
                ((token, state),) = following.items()
            else:
                count = self._count
                token = max(reversed(following), key=lambda one: count[following[one]])
                probability *= count[following[token]] / sum(count[one] for one in following.values())
                if probability < min_probability:
                    break
                state = following[token]
            tokens.append(token)
        return tokens

    def _extend(self, last: int, token: int) -> int:
        """The state of the row with a token more."""
        known = self._next[last].get(token)
        if known is not None:
            return known if self._length[known] == self._length[last] + 1 else self._split(last, token, known)
        state = self._add(self._length[last] + 1, {}, 0, 0)
        place = last
        while place >= 0 and token not in self._next[place]:
            self._next[place][token] = state
            place = self._link[place]
        if place >= 0:
            known = self._next[place][token]
            if self._length[known] != self._length[place] + 1:
                known = self._split(place, token, known)
            self._link[state] = known
        return state

    def _split(self, place: int, token: int, state: int) -> int:
        """Gives the strings of a state that `place` leads to a state of their own, which is returned."""
        shorter = self._add(self._length[place] + 1, dict(self._next[state]), self._link[state], self._count[state])
        self._link[state] = shorter
        while place >= 0 and self._next[place].get(token) == state:
            self._next[place][token] = shorter
            place = self._link[place]
        return shorter

    def _add(self, length: int, following: dict[int, int], link: int, count: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        return len(self._next) - 1

"""The radix tree of prefixes against a naive model, with a budget, pins, salts and a second tier."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from vlmfast.cache.prefix import Match, Picture, PrefixCache, Unit, Units, num_tokens_of

_BYTES_PER_TOKEN = 10


@dataclass(frozen=True)
class Tokens:
    """A segment that holds what its tokens are, so that a wrong one is seen."""

    what: tuple[Any, ...]

    @property
    def num_bytes(self) -> int:
        return _BYTES_PER_TOKEN * len(self.what)

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        assert 0 < at < len(self.what)
        return Tokens(self.what[:at]), Tokens(self.what[at:])


class Store:
    """A second tier in a dict."""

    def __init__(self) -> None:
        self.kept: dict[Units, Tokens] = {}

    def load(self, prefix: Units, num_tokens: int) -> Tokens | None:
        return self.kept.get(prefix)

    def save(self, prefix: Units, num_tokens: int, copy: Callable[[], Any]) -> None:
        if prefix not in self.kept:
            self.kept[prefix] = copy()
            assert len(self.kept[prefix].what) == num_tokens


def picture(name: str, num_tokens: int = 3, reduce_id: str = "") -> Picture:
    return Picture(key=name, ids=(0,) * num_tokens, reduce_id=reduce_id)


def told(units: Units, salt: str = "") -> tuple[Any, ...]:
    """What each token of units is, with all that came before: its keys and values depend on that."""
    tokens: list[Any] = []
    for index, unit in enumerate(units):
        tokens += [(salt, units[: index + 1], offset) for offset in range(num_tokens_of((unit,)))]
    return tuple(tokens)


def copier(units: Units, salt: str = "", calls: list[tuple[int, int]] | None = None) -> Callable[[int, int], Tokens]:
    def copy(start: int, end: int) -> Tokens:
        if calls is not None:
            calls.append((start, end))
        return Tokens(told(units, salt)[start:end])

    return copy


def remember(cache: PrefixCache, units: Units, salt: str = "") -> None:
    cache.insert(cache.match(units, salt), units, copier(units, salt), salt)
    cache.check_integrity()


def content(match: Match) -> tuple[Any, ...]:
    """What a match would load."""
    return tuple(token for segment, count in match.segments for token in segment.what[:count])


def cached(cache: PrefixCache, units: Units, salt: str = "") -> int:
    """Length of the longest known prefix; what it holds must be of exactly these units."""
    match = cache.match(units, salt)
    assert content(match) == told(units, salt)[: match.num_tokens]
    return match.num_tokens


def _random_units(random_: random.Random) -> Units:
    alphabet: list[Unit] = [1, 2, 3, picture("a"), picture("b", 2), picture("b", 2, "half")]
    return tuple(random_.choice(alphabet) for _ in range(random_.randint(1, 9)))


def _longest(known: set[tuple[str, Units]], units: Units, salt: str) -> int:
    """The naive model: the longest prefix that some known row of units begins with."""
    depth = 0
    while depth < len(units) and any(s == salt and one[: depth + 1] == units[: depth + 1] for s, one in known):
        depth += 1
    return num_tokens_of(units[:depth])


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_equal_a_naive_model(seed: int) -> None:
    """Guards splits, salts and pictures: 2,000 operations a seed without a limit, so that the model is exact."""
    random_ = random.Random(seed)
    cache = PrefixCache(10**9, _BYTES_PER_TOKEN)
    known: set[tuple[str, Units]] = set()
    for _ in range(2000):
        units, salt = _random_units(random_), random_.choice(["", "tenant"])
        assert cached(cache, units, salt) == _longest(known, units, salt)
        if random_.random() < 0.3:
            remember(cache, units, salt)
            known.add((salt, units))
        if random_.random() < 0.003:
            cache.clear()
            known.clear()
            assert cache.num_bytes == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_within_a_budget(seed: int) -> None:
    """Guards eviction: 2,000 operations a seed. What is found is right, never more than was inserted, what is pinned
    stays, and the limit holds at every moment."""
    random_ = random.Random(seed)
    cache = PrefixCache(_BYTES_PER_TOKEN * random_.choice([12, 40]), _BYTES_PER_TOKEN)
    known: set[tuple[str, Units]] = set()
    pinned: list[tuple[str, Units, Match, int]] = []
    for _ in range(2000):
        units, salt = _random_units(random_), random_.choice(["", "tenant"])
        assert cached(cache, units, salt) <= _longest(known, units, salt)
        match = cache.match(units, salt)
        before = content(match)
        if random_.random() < 0.6:
            cache.insert(match, units, copier(units, salt), salt)
            known.add((salt, units))
        assert content(match) == before, "what a match loads does not change under it"
        if random_.random() < 0.2:
            pinned.append((salt, units, match, cached(cache, units, salt)))
        if len(pinned) > 3 or (pinned and random_.random() < 0.1):
            pinned.pop(random_.randrange(len(pinned)))
        del match
        cache.check_integrity()
        assert cache.num_pins == len(pinned)
        assert all(cached(cache, units, salt) >= num_tokens for salt, units, _, num_tokens in pinned)
    pinned.clear()
    cache.clear()
    assert cache.num_bytes == 0
    assert cache.num_evictions > 100


def test_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache(_BYTES_PER_TOKEN * 6, _BYTES_PER_TOKEN)
    remember(cache, (1, 2))
    remember(cache, (3, 4))
    remember(cache, (5, 6))
    assert cached(cache, (1, 2)) == 2
    remember(cache, (7, 8))
    assert [cached(cache, (one, one + 1)) for one in (1, 3, 5, 7)] == [2, 0, 2, 2]


def test_a_picture_is_whole_or_not_there() -> None:
    """Guards case 14 (mlx-vlm 1311): however two prompts differ in a picture, the match ends where it begins."""
    cache = PrefixCache(10**6, _BYTES_PER_TOKEN)
    remember(cache, (1, picture("a", 5), 2))
    for other in (picture("b", 5), picture("a", 4), picture("a", 5, "half"), Picture(key="a", ids=(0, 0, 0, 0, 1))):
        assert cached(cache, (1, other, 2)) == 1
    assert cached(cache, (1, picture("a", 5), 3)) == 6


def test_a_copy_is_made_of_new_tokens_only() -> None:
    """Guards the cost of a turn: what is known is not copied again, nor is anything that does not fit."""
    cache = PrefixCache(_BYTES_PER_TOKEN * 10, _BYTES_PER_TOKEN)
    calls: list[tuple[int, int]] = []
    for units in ((1, 2, 3), (1, 2, 3), (1, 2, 4), (1, 2), (1, 2, 3, 5, 6)):
        cache.insert(cache.match(units), units, copier(units, calls=calls))
    assert calls == [(0, 3), (2, 3), (3, 5)]
    long = tuple(range(50, 70))
    cache.insert(cache.match(long), long, copier(long, calls=calls))
    assert len(calls) == 3 and cached(cache, (1, 2, 3, 5, 6)) == 5, "an item larger than the cache empties nothing"


def test_a_failing_copy_changes_nothing() -> None:
    cache = PrefixCache(10**6, _BYTES_PER_TOKEN)
    remember(cache, (1, 2, 3, 4))

    def fail(start: int, end: int) -> Any:
        raise MemoryError

    match = cache.match((1, 2, 9))
    with pytest.raises(MemoryError):
        cache.insert(match, (1, 2, 9), fail)
    cache.check_integrity()
    assert cached(cache, (1, 2, 9)) == 2 and cached(cache, (1, 2, 3, 4)) == 4


def test_the_second_tier_gives_whole_picture_prefixes() -> None:
    """Guards a restart: prefixes up to a picture come back, one record a picture; the text after it does not."""
    store = Store()
    units: Units = (1, 2, picture("a"), 3, picture("b", 2), 4, 5)
    first = PrefixCache(10**6, _BYTES_PER_TOKEN, store)
    first.insert(first.match(units), units, copier(units))
    first.persist(units, copier(units))
    assert [len(kept.what) for kept in store.kept.values()] == [5, 3]
    again = PrefixCache(10**6, _BYTES_PER_TOKEN, store)
    assert cached(again, units) == 8
    assert cached(again, (1, 2, picture("a"), 9)) == 5
    assert cached(again, (1, picture("a"))) == 1
    del store.kept[units[:3]]
    assert cached(PrefixCache(10**6, _BYTES_PER_TOKEN, store), units) == 0, "a later record needs the one before"


def test_the_second_tier_joins_what_is_known() -> None:
    """Guards prefixes of which the tree knows a part, and a tree that is too small for what the store gives."""
    units: Units = (1, 2, picture("a"), 3)
    store = Store()
    cache = PrefixCache(10**6, _BYTES_PER_TOKEN, store)
    cache.persist(units, copier(units))
    remember(cache, (1, 2, 7))
    assert cached(cache, units) == 5
    cache.check_integrity()
    more: Units = (*units, picture("b", 1), 4)
    cache.persist(more, copier(more))
    small = PrefixCache(_BYTES_PER_TOKEN * 4, _BYTES_PER_TOKEN, store)
    assert cached(small, more) == 0, "what follows a record that does not fit is of no use"
    small.check_integrity()


def test_what_others_inserted_since_the_match_is_pinned_too() -> None:
    """Guards two requests with one prompt: the second finds the prefix there when it inserts, and must not evict it
    to make room for what it hangs below."""
    cache = PrefixCache(_BYTES_PER_TOKEN * 6, _BYTES_PER_TOKEN)
    slow = cache.match((1, 2, 3, 4))
    remember(cache, (1, 2, 3))
    remember(cache, (8, 9))
    cache.insert(slow, (1, 2, 3, 4, 5), copier((1, 2, 3, 4, 5)))
    cache.check_integrity()
    assert cached(cache, (1, 2, 3, 4, 5)) == 5 and cached(cache, (8, 9)) == 0


def test_counters() -> None:
    cache = PrefixCache(10**6, _BYTES_PER_TOKEN)
    remember(cache, (1, 2, 3))
    assert (cache.num_lookups, cache.num_hits, cache.num_cached_tokens) == (1, 0, 0)
    cached(cache, (1, 2, 4))
    assert (cache.num_lookups, cache.num_hits, cache.num_cached_tokens) == (2, 1, 2)

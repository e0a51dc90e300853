"""Lookup, suffix automaton, earlier answers: each against its definition, spelt out slowly. No torch."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmfast.errors import OptionError
from vlmfast.spec.automaton import SuffixAutomaton
from vlmfast.spec.lookup import LookupDrafter
from vlmfast.spec.options import Speculation
from vlmfast.spec.speculator import Speculator
from vlmfast.spec.suffix import AnswerMemory, SuffixDrafter, answer_row, text_start
from vlmfast.spec.tree import NO_DRAFT, ROOT, Acceptance, DraftTree

_TOKENS = st.lists(st.integers(0, 2), max_size=24)
_ROWS = st.lists(_TOKENS, max_size=4)


# --- trees ---


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    size = draw(st.integers(0, 12))
    parents = tuple(draw(st.integers(ROOT, node - 1)) for node in range(size))
    return DraftTree(tokens=tuple(draw(st.integers(0, 3)) for _ in range(size)), parents=parents)


@given(trees(), st.integers(0, 14))
def test_trees_know_their_shape(tree: DraftTree, number: int) -> None:
    for node, depth in enumerate(tree.depths):
        steps, at = 0, node
        while at != ROOT:
            steps, at = steps + 1, tree.parents[at]
        assert depth == steps
    assert sorted(child for node in range(ROOT, len(tree)) for child in tree.children(node)) == list(range(len(tree)))
    first = tree.first(number)
    assert (first.tokens, first.parents) == (tree.tokens[:number], tree.parents[:number])


def test_a_chain_is_a_tree_with_one_branch() -> None:
    chain = DraftTree.chain((5, 6, 7), origin="x")
    assert chain == DraftTree(tokens=(5, 6, 7), parents=(-1, 0, 1), origin="x")
    assert chain.is_chain and NO_DRAFT.is_chain and not DraftTree(tokens=(1, 1), parents=(-1, -1)).is_chain
    with pytest.raises(AssertionError):
        DraftTree(tokens=(1, 2), parents=(1, -1))  # a child before its parent


# --- lookup ---


def _slow_lookup(context: list[int], low: int, high: int, barriers: frozenset[int], budget: int) -> list[int]:
    for size in range(high, low - 1, -1):
        gram = context[len(context) - size :]
        if len(gram) < size or barriers & set(gram):
            continue
        for place in range(len(context) - 1, size - 1, -1):
            if context[place - size : place] == gram and context[place] not in barriers:
                text, draft = list(context), []
                for step in range(budget):
                    draft.append(text[place + step])
                    text.append(draft[-1])  # it may go on with itself
                return next((draft[:at] for at, token in enumerate(draft) if token in barriers), draft)
    return []


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(0, 6), st.data())
def test_lookup_is_its_definition(context: list[int], budget: int, data: st.DataObject) -> None:
    """Guards the index that grows with the context: the longest n-gram, its latest place, no picture inside."""
    barriers = frozenset({4})
    drafter = LookupDrafter(min_ngram=2, max_ngram=3, barriers=barriers)
    seen = 0
    while seen < len(context):
        seen = data.draw(st.integers(seen + 1, len(context)))
        draft = drafter.propose(context[:seen], budget)
        assert draft.is_chain
        assert list(draft.tokens) == _slow_lookup(context[:seen], 2, 3, barriers, budget)


def test_lookup_drafts_no_more_than_an_answer() -> None:
    """Guards the end token: nothing is drafted behind it."""
    drafter = LookupDrafter(min_ngram=1, max_ngram=3, ends=frozenset({9}))
    assert drafter.propose([1, 2, 3, 9, 4, 1, 2], 8).tokens == (3, 9)


# --- the automaton ---


def _occurrences(rows: list[list[int]], text: tuple[int, ...]) -> list[tuple[int, int]]:
    """(row, end) of every place where a text stands."""
    size = len(text)
    return [
        (index, end)
        for index, row in enumerate(rows)
        for end in range(size, len(row) + 1)
        if tuple(row[end - size : end]) == text
    ]


def _automaton(rows: list[list[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for row in rows:
        automaton.begin_row()
        for token in row:
            automaton.append(token)
    return automaton


@given(_ROWS, _TOKENS)
def test_the_automaton_finds_the_longest_known_suffix(rows: list[list[int]], text: list[int]) -> None:
    """Guards matching and counts against every substring, spelt out; at most two states a token."""
    automaton = _automaton(rows)
    assert len(automaton._next) <= 2 * automaton.num_tokens + 1
    state, length = 0, 0
    for end, token in enumerate(text, 1):
        state, length = automaton.advance(state, length, token)
        known = [size for size in range(1, end + 1) if _occurrences(rows, tuple(text[end - size : end]))]
        assert length == max(known, default=0)
        if length:
            places = _occurrences(rows, tuple(text[end - length : end]))
            assert automaton._count[state] == len(places)
            following = Counter(rows[row][at] for row, at in places if at < len(rows[row]))
            counts = {token: automaton._count[one] for token, one in automaton._next[state].items()}
            assert counts == following


@given(_ROWS, _ROWS, _TOKENS)
def test_matches_survive_growth(rows: list[list[int]], more: list[list[int]], text: list[int]) -> None:
    """Guards a cursor into an automaton that other requests add to: states split under it."""
    automaton = _automaton(rows)
    cut = len(text) // 2
    state, length = 0, 0
    for token in text[:cut]:
        state, length = automaton.advance(state, length, token)
    for row in more:
        automaton.begin_row()
        for token in row:
            automaton.append(token)
    for end, token in enumerate(text[cut:], cut + 1):
        state, length = automaton.advance(state, length, token)
        assert not length or _occurrences([*rows, *more], tuple(text[end - length : end]))
        old = [size for size in range(1, end + 1) if _occurrences(rows, tuple(text[end - size : end]))]
        assert length >= max(old, default=0)
        if length:
            assert automaton._count[state] == len(_occurrences([*rows, *more], tuple(text[end - length : end])))


def test_a_match_is_never_longer_than_it_is() -> None:
    """Guards the same on many short texts of two tokens, where states split most often."""
    rng = random.Random(0)
    for _ in range(400):
        automaton, rows, text = SuffixAutomaton(), list[list[int]](), list[int]()
        state, length = 0, 0
        for _ in range(12):
            text.append(rng.randrange(2))
            state, length = automaton.advance(state, length, text[-1])
            assert length <= len(text) and (not length or _occurrences(rows, tuple(text[len(text) - length :])))
            if rng.random() < 0.5:
                rows.append([rng.randrange(2) for _ in range(rng.randrange(1, 6))])
                automaton.begin_row()
                for token in rows[-1]:
                    automaton.append(token)


def test_continuations_are_the_most_frequent() -> None:
    automaton = _automaton([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [1, 2, 3, 5, 7]])
    state, length = automaton.advance(0, 0, 2)
    assert length == 1
    assert automaton.continuation(state, 9, 0.1) == [3, 5, 7]
    assert automaton.continuation(state, 1, 0.1) == [3]
    assert automaton.continuation(state, 9, 0.6) == [3]  # 3/4, then 3/4 * 2/3
    assert automaton.continuation(state, 9, 0.9) == []


def test_a_text_that_repeats_itself_costs_no_more() -> None:
    """Guards against a walk over every suffix a token, which a looping answer would make quadratic."""
    automaton = _automaton([[7] * 3000])
    assert max(automaton._count) <= 3000
    assert automaton.continuation(automaton.advance(0, 0, 7)[0], 5, 0.1) == [7] * 5


# --- suffix drafts ---


def test_suffix_drafts_from_the_longest_match() -> None:
    """Guards the choice of a source: the longest match, this picture's answers before the job's."""
    memory = AnswerMemory(1000)
    memory.add("", ("cat",), [90, 91, 1, 2, 3, 99])
    memory.add("", ("dog",), [90, 91, 1, 5, 6, 99])
    ends = frozenset({99})

    def draft(picture: str, context: list[int], budget: int = 9) -> DraftTree:
        return SuffixDrafter(memory.sources("", (picture,)), ends=ends).propose(context, budget)

    assert draft("cat", [90, 91]).tokens == (1, 2, 3, 99)
    assert draft("dog", [90, 91]).tokens == (1, 5, 6, 99)
    assert draft("dog", [90, 91]).origin == "suffix-picture/2"
    assert draft("cat", [90, 91, 1, 5]).tokens == (6, 99)  # the job knows more here
    assert draft("cat", [90, 91, 1, 5]).origin == "suffix-job/3"
    assert draft("bird", [2]).tokens == (3, 99)
    assert draft("bird", [2], 0) == draft("bird", [55]) == NO_DRAFT
    # Its own text, and no more than twice as much as matched.
    assert draft("bird", [40, 41, 42, 43, 44, 40]).tokens == (41, 42)
    assert SuffixDrafter((), barriers=frozenset({8})).propose([1, 2, 8, 1], 9) == NO_DRAFT


def test_a_question_makes_no_draft_surer() -> None:
    """Guards first words: that the same was asked before tells little of what is on another picture."""
    memory = AnswerMemory(1000)
    memory.add("", ("cat",), [*range(40, 56), 1, 2, 3])
    drafter = SuffixDrafter(memory.sources("", ("dog",)), num_prompt=16)
    context = list(range(40, 56))
    for token, origin in ((None, "suffix-job/0"), (1, "suffix-job/1"), (2, "suffix-job/2")):
        context += [token] if token else []
        draft = drafter.propose(context, 9)
        assert draft.origin == origin and draft.tokens[-1] == 3


def test_salts_are_apart() -> None:
    """Guards tenants from each other: nothing learnt under one salt is drafted under another."""
    memory = AnswerMemory(1000)
    memory.add("a", ("cat",), [1, 2, 3])
    assert memory.sources("b", ("cat",)) == [] == memory.sources("", ("cat",))
    assert memory.sources("a", ("dog",))  # the job's
    memory.add("a", (), [4, 5])
    assert [name for name, _ in memory.sources("a", ())] == ["job"]


def test_memory_is_bounded() -> None:
    """Guards a long job over many pictures: tokens and pictures reach a plateau, and new answers are known at once."""
    memory = AnswerMemory(400)
    for index in range(300):
        row = [index * 7 % 50 + step for step in range(index % 30)]
        memory.add("", (f"picture {index % 90}",), row)
        groups = list(memory._groups.values())
        assert memory.num_tokens == sum(group.num_tokens for group in groups) <= 400
        held = [automaton for group in groups for automaton in (group.older, group.newer)]
        assert sum(len(automaton._next) for automaton in held) <= 2 * 400 + len(held)
        if len(row) > 2:
            sources = memory.sources("", (f"picture {index % 90}",))
            assert SuffixDrafter(sources).propose(row[:2], 9).tokens[:1] == (row[2],)
    memory.add("", (), [1] * 5000)  # longer than all there is room for
    assert memory.num_tokens <= 400


def test_answers_are_read_when_they_are_asked_for() -> None:
    """Guards jobs that drafting rests in: an answer costs nothing until something is drafted, then only the last do."""
    memory = AnswerMemory(100_000)
    for index in range(500):
        memory.add("", (f"picture {index}",), range(10 * index, 10 * index + 10))
    assert not any(len(group.newer._next) > 1 for group in memory._groups.values())
    assert len(memory._groups[("",)].unread) * 10 <= 192 < 500 * 10
    (picture, job) = memory.sources("", ("picture 3",))
    assert (picture[0], picture[1].num_tokens) == ("picture", 10) and (job[0], job[1].num_tokens) == ("job", 190)
    assert memory.num_tokens == sum(group.num_tokens for group in memory._groups.values())
    assert SuffixDrafter([job]).propose([4990], 3).tokens == (4991, 4992)
    memory.add("", ("page",), range(9000))  # an answer as long as can be kept is kept
    assert SuffixDrafter(memory.sources("", ("page",))).propose([1000], 3).tokens == (1001, 1002)


def test_rows_begin_behind_the_picture() -> None:
    barriers = frozenset({4})
    assert answer_row([1, 4, 4, 7, 8], [5, 6], barriers) == [7, 8, 5, 6]
    assert answer_row(range(100, 200), [5], barriers) == [*range(184, 200), 5]
    assert text_start([4, 4], barriers, 9) == 2


# --- all of it together ---


def test_drafts_for_many_sequences() -> None:
    """Guards the bookkeeping: contexts grow with the answers, tokens that a stop text cut off are never seen."""
    speculator = Speculator(Speculation(drafter="lookup", adaptive=False), ends=frozenset({0}))
    speculator.begin(1, [1, 2, 3, 1, 2])
    speculator.begin(2, [5, 6])
    assert [draft.tokens for draft in speculator.propose([(1, [], 2), (2, [], 4)])] == [(3, 1), ()]
    assert speculator.propose([(2, [7, 5, 6], 3)])[0].tokens == (7, 5, 6)
    draft = speculator.propose([(1, [3], 4)])[0]
    speculator.observe(1, draft, Acceptance(path=(0,), token=9))
    speculator.end(1)
    speculator.end(1)
    assert speculator.gate.acceptance()[draft.origin][0] == 1.0


def test_a_finished_answer_is_known_to_the_next_request() -> None:
    speculator = Speculator(Speculation(drafter="suffix", adaptive=False), barriers=frozenset({4}))
    speculator.remember([4, 4, 7, 8], [10, 11, 12, 0], pictures=("cat",), salt="t")
    for seq_id, salt in enumerate(("t", "u")):
        speculator.begin(seq_id, [4, 4, 7, 8], pictures=("dog",), salt=salt)
    assert [len(draft) for draft in speculator.propose([(0, [], 9), (1, [], 9)])] == [4, 0]
    private = Speculation(drafter="suffix", memory_tokens=0, adaptive=False)
    speculator.remember([5, 6, 3], [13, 14, 15], salt="t", options=private)
    speculator.begin(2, [5, 6, 3], salt="t")
    assert speculator.propose([(2, [], 9)]) == [NO_DRAFT], "a request can ask that its answer is not kept"
    forgetful = Speculator(Speculation(drafter="suffix", memory_tokens=0, adaptive=False))
    forgetful.remember([7, 8], [10])
    forgetful.begin(0, [7, 8])
    assert forgetful.propose([(0, [], 9)]) == [NO_DRAFT]


def test_random_texts_never_break_a_drafter() -> None:
    """Guards contexts of any kind: short, repeated, all barriers."""
    rng = random.Random(3)
    for _ in range(200):
        speculator = Speculator(Speculation(adaptive=False), barriers=frozenset({0}), ends=frozenset({1}))
        context = [rng.randrange(rng.choice((1, 2, 5))) for _ in range(rng.randrange(12))]
        speculator.begin(0, context)
        answer: list[int] = []
        for _ in range(20):
            budget = rng.randrange(6)
            (draft,) = speculator.propose([(0, answer, budget)])
            assert len(draft) <= budget and 0 not in draft.tokens
            answer += [rng.randrange(1, 4) for _ in range(rng.randrange(3))]


@pytest.mark.parametrize(
    "wrong",
    [
        {"drafter": "magic"},
        {"max_draft_tokens": 0},
        {"min_ngram": 3, "max_ngram": 2},
        {"memory_tokens": -1},
        {"adaptive": 1},
    ],
    ids=str,
)
def test_options_check_themselves(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=str(next(reversed(wrong.values())))):
        Speculation(**wrong)  # type: ignore[arg-type]


def test_options_by_name() -> None:
    assert Speculation.of("suffix") == Speculation(drafter="suffix") == Speculation.of(Speculation(drafter="suffix"))
    assert Speculation.of("auto").is_on and not Speculation.of("off").is_on
    assert Speculation().uses("lookup") and Speculation().uses("suffix")
    assert not Speculation.of("off").uses("lookup") and not Speculation.of("suffix").uses("lookup")
    with pytest.raises(OptionError, match=r"auto, off, lookup, suffix.*'on'"):
        Speculation.of("on")


def test_a_request_asks_for_what_was_loaded() -> None:
    """Guards options that a request can not have being ignored, and one folder in two spellings being two."""
    loaded = Speculation(drafter="lookup", draft_model="small/draft", memory_tokens=5, adaptive=False)
    assert loaded.request("suffix") == replace(loaded, drafter="suffix"), "a name changes the drafter alone"
    assert loaded.request(replace(loaded, drafter="model", draft_model=Path("small/draft/"))).uses("model")
    assert loaded.request(replace(loaded, memory_tokens=0)).memory_tokens == 0
    for name, value in (("adaptive", True), ("memory_tokens", 6), ("draft_model", "other")):
        with pytest.raises(OptionError, match=f"{name if name != 'draft_model' else 'loaded is small'}"):
            loaded.request(replace(loaded, **{name: value}))

"""Drafting in the engine: every answer is that of the plain run, whatever was drafted.

Stub drafters that always, never and sometimes fit, chains and trees, alone and in batches, for prompts of none to three
pictures, greedy and drawn. Chance of a false alarm: a wider pass changes the order of float sums, which matters where
two logits are within 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from drafts import ALL, DRAWN, GREEDY, QUESTIONS, SHAPES, always, never, sometimes, tree, twins, with_stub
from oracle import build, check_idle, features_of, merged_embeddings, model_of, noise

from vlmfast import Answer, Batching, FastV, Sampling, Vision
from vlmfast.kv import SequenceKV
from vlmfast.runner import BatchAttention
from vlmfast.spec.attention import TreeAttention, row_parents
from vlmfast.spec.options import Speculation
from vlmfast.spec.tree import DraftTree


@pytest.fixture(scope="module")
def plain(load_vlm: Callable[..., Any]) -> Any:
    """The model without drafts and caches."""
    return load_vlm(speculation="off", caching=False)


@pytest.fixture(scope="module")
def expected(plain: Any) -> dict[Sampling, list[tuple[int, ...]]]:
    answers = {
        sampling: [plain.describe(*question, sampling=sampling).token_ids for question in QUESTIONS]
        for sampling in (GREEDY, DRAWN)
    }
    assert all(len(set(answer)) > 3 for answer in answers[GREEDY])
    assert answers[GREEDY] != answers[DRAWN]
    return answers


def _together(loaded: Any, sampling: Sampling) -> list[Answer]:
    """All questions asked before the first step."""
    streams = [loaded.stream(*question, sampling=sampling) for question in QUESTIONS]
    return [list(stream)[-1].answer for stream in streams]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__.strip("_"))
def test_any_draft_gives_the_plain_answer(
    load_vlm: Callable[..., Any],
    expected: dict[Sampling, list[tuple[int, ...]]],
    shape: Callable[..., DraftTree],
    sampling: Sampling,
) -> None:
    """Guards case 37 (sglang 17276) and 39: token-identical, with draws too; alone, in a batch, with a known prefix."""
    loaded = with_stub(load_vlm(speculation=ALL), shape, expected[sampling])
    alone = [loaded.describe(*question, sampling=sampling) for question in QUESTIONS]
    assert [answer.token_ids for answer in alone] == expected[sampling]
    together = _together(loaded, sampling)
    assert [answer.token_ids for answer in together] == expected[sampling]
    usage = [answer.usage for answer in (*alone, *together)]
    assert all(one.draft_tokens for one in usage)
    if shape is always:
        assert all(one.accepted_tokens == one.draft_tokens for one in usage)
    if shape is never:
        assert not any(one.accepted_tokens for one in usage)
    if shape in (sometimes, tree, twins):
        assert all(0 < one.accepted_tokens < one.draft_tokens for one in usage)
    check_idle(loaded)
    assert not loaded._speculator._sequences


@pytest.mark.parametrize(
    "batching",
    [{"max_step_tokens": 7}, {"max_step_tokens": 1}, {"max_sequences": 2, "max_step_tokens": 30}, {"max_sequences": 1}],
    ids=str,
)
@pytest.mark.parametrize("shape", [sometimes, tree], ids=["chain", "tree"])
def test_drafts_fit_any_step(
    load_vlm: Callable[..., Any],
    expected: dict[Sampling, list[tuple[int, ...]]],
    shape: Callable[..., DraftTree],
    batching: dict[str, int],
) -> None:
    """Guards case 43 (vllm 29594): drafts beside prompts in chunks and many sequences, within the step's tokens."""
    loaded = with_stub(load_vlm(speculation=ALL, batching=Batching(**batching)), shape, expected[GREEDY])
    assert [answer.token_ids for answer in _together(loaded, GREEDY)] == expected[GREEDY]
    check_idle(loaded)


@pytest.mark.parametrize(
    "speculation",
    ["auto", "lookup", "suffix", ALL, Speculation(drafter="lookup", min_ngram=1, adaptive=False)],
    ids=str,
)
def test_real_drafters_give_the_plain_answer(
    load_vlm: Callable[..., Any], expected: dict[Sampling, list[tuple[int, ...]]], speculation: Any
) -> None:
    """Guards the drafters of the product; asked twice, so that the second time the answers are known."""
    loaded = load_vlm(speculation=speculation)
    for sampling in (GREEDY, DRAWN, GREEDY):
        alone = [loaded.describe(*question, sampling=sampling) for question in QUESTIONS]
        assert [answer.token_ids for answer in alone] == expected[sampling]
        assert [answer.token_ids for answer in _together(loaded, sampling)] == expected[sampling]
    if speculation is ALL:
        accepted, written = (
            sum(getattr(one.usage, name) for one in alone) for name in ("accepted_tokens", "completion_tokens")
        )
        assert accepted > written / 2
    check_idle(loaded)


def test_off_is_absent(
    plain: Any, load_vlm: Callable[..., Any], expected: dict[Sampling, list[tuple[int, ...]]]
) -> None:
    """Guards invariant 11: nothing is drafted, timed or remembered; one request can be off or on by itself."""
    answer = plain.describe(*QUESTIONS[0], sampling=GREEDY)
    assert (answer.usage.draft_tokens, answer.usage.accepted_tokens) == (0, 0)
    assert not plain._speculator._sequences and not plain._speculator.gate._costs
    loaded = load_vlm(speculation=ALL)
    for _ in range(2):
        off = loaded.describe(*QUESTIONS[0], sampling=GREEDY, speculation="off")
        assert off.usage.draft_tokens == 0 and off.token_ids == expected[GREEDY][0]
    for _ in range(2):
        on = loaded.describe(*QUESTIONS[0], sampling=GREEDY, speculation="suffix")
    assert on.usage.draft_tokens > 0 and on.token_ids == expected[GREEDY][0]


def test_chats_draft_from_what_was_said(load_vlm: Callable[..., Any], plain: Any) -> None:
    """Guards follow-up turns over reused prefixes: the kept keys and values are those of the accepted tokens."""

    def turns(vlm: Any) -> list[tuple[int, ...]]:
        chat = vlm.chat(noise(50, 40))
        answers = [chat.ask(text, sampling=Sampling(max_new_tokens=16)) for text in ("What is it?", "Again?", "Again?")]
        answers.append(chat.ask("And here?", noise(30, 60), sampling=Sampling(max_new_tokens=16)))
        return [answer.token_ids for answer in answers]

    loaded = load_vlm(speculation=ALL)
    assert turns(loaded) == turns(loaded) == turns(plain)
    check_idle(loaded)


@pytest.mark.parametrize("shape", [sometimes, tree], ids=["chain", "tree"])
def test_pruned_prompts_draft_too(load_vlm: Callable[..., Any], plain: Any, shape: Callable[..., DraftTree]) -> None:
    """Guards pages whose upper layers hold fewer tokens: the same answer as FastV gives without drafts."""
    vision = Vision(fastv=FastV(layer=1, keep=0.5))
    answers = [plain.describe(*question, sampling=GREEDY, vision=vision).token_ids for question in QUESTIONS]
    loaded = with_stub(load_vlm(speculation=ALL), shape, answers)
    streams = [loaded.stream(*question, sampling=GREEDY, vision=vision) for question in QUESTIONS]
    drafted = [list(stream)[-1].answer for stream in streams]
    assert [answer.token_ids for answer in drafted] == answers
    assert all(answer.usage.draft_tokens for answer in drafted)
    check_idle(loaded)


# --- keys and values ---


def _final_kv(loaded: Any, question: tuple[list[Any], str], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The keys and values of prompt and answer at the end of a request, [L, 2, G, S, D]."""
    runner, kept = loaded._engine._runner, []

    def learn(sequence: Any, end: tuple[int, ...]) -> None:
        kept.append(runner.copy_out(sequence.seq_id, 0, sequence.num_computed).rows)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "learn", learn)
        loaded.describe(*question, sampling=GREEDY)
    return kept[0]


@pytest.mark.parametrize("shape", [always, sometimes, tree, twins], ids=lambda shape: shape.__name__.strip("_"))
def test_kept_keys_and_values_are_those_of_the_plain_run(
    load_vlm: Callable[..., Any],
    plain: Any,
    expected: dict[Sampling, list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    shape: Callable[..., DraftTree],
) -> None:
    """Guards compaction: after rejected branches the page holds the accepted path, at its own positions."""
    loaded = with_stub(load_vlm(speculation=ALL), shape, expected[GREEDY])
    for question in (QUESTIONS[0], QUESTIONS[2]):
        ours = _final_kv(loaded, question, monkeypatch)
        torch.testing.assert_close(ours, _final_kv(plain, question, monkeypatch), atol=1e-4, rtol=1e-4)


def _pass(vlm: Any, kv: SequenceKV, ids: Sequence[int], positions: Sequence[int], parents: Any) -> torch.Tensor:
    """Logits [T, V] of rows behind what a page holds."""
    decoder = model_of(vlm).decoder
    parts = [(0, len(ids), kv)]
    chain, tree = BatchAttention(parts, vlm.device, vlm.dtype), TreeAttention(parts, [parents], vlm.device, vlm.dtype)
    hidden = decoder.run(decoder.embed(torch.tensor(ids)), torch.tensor(positions), tree if parents else chain)
    return decoder.logits(hidden)


@pytest.fixture(scope="module")
def prefilled(plain: Any) -> tuple[Any, SequenceKV, int]:
    """A page with a prompt about two pictures."""
    prompt, images = build(plain, *QUESTIONS[4])
    with torch.inference_mode():
        embeddings = merged_embeddings(plain, list(prompt.ids), features_of(plain, images, prompt))
        kv = SequenceKV(model_of(plain).config.text, len(prompt.ids) + 40, plain.device, plain.dtype)
        attention = BatchAttention([(0, len(prompt.ids), kv)], plain.device, plain.dtype)
        model_of(plain).decoder.run(embeddings, torch.arange(len(prompt.ids)), attention)
    return plain, kv, len(prompt.ids)


_DRAFT = DraftTree(tokens=(5, 9, 5, 30, 31, 32, 8), parents=(-1, -1, 0, 0, 2, 1, 4))


def _difference(prefilled: tuple[Any, SequenceKV, int], parents: tuple[int, ...], depths: Sequence[int]) -> float:
    """Largest difference of a tree's logits from those of each node's path run alone."""
    vlm, kv, start = prefilled
    root = 77
    with torch.inference_mode():
        kv.truncate(start)
        together = _pass(vlm, kv, [root, *_DRAFT.tokens], [start, *(start + depth for depth in depths)], parents)
        worst = 0.0
        for node in range(len(_DRAFT)):
            path, at = [], node
            while at >= 0:
                path.insert(0, at)
                at = _DRAFT.parents[at]
            kv.truncate(start)
            ids = [root, *(_DRAFT.tokens[one] for one in path)]
            alone = _pass(vlm, kv, ids, range(start, start + len(ids)), None)
            worst = max(worst, float((together[node + 1] - alone[-1]).abs().max()))
    return worst


def test_a_tree_is_each_of_its_paths_alone(prefilled: tuple[Any, SequenceKV, int]) -> None:
    """Guards mask and positions of one pass over a tree."""
    assert _difference(prefilled, row_parents(1, _DRAFT), _DRAFT.depths) < 1e-4


@pytest.mark.parametrize(
    ("parents", "depths"),
    [
        (tuple(range(-1, 7)), _DRAFT.depths),
        ((-1, 0, 0, 1, 1, 3, 3, 5), _DRAFT.depths),
        ((-1, *(0,) * 7), _DRAFT.depths),
        ((-1, -1, -1, *row_parents(1, _DRAFT)[3:]), _DRAFT.depths),
        (row_parents(1, _DRAFT), tuple(range(1, 8))),
        (row_parents(1, _DRAFT), tuple(depth - 1 for depth in _DRAFT.depths)),
    ],
    ids=["causal", "wrong parent", "no ancestors", "no root", "positions of a row", "positions one short"],
)
def test_wrong_masks_and_positions_are_found_out(
    prefilled: tuple[Any, SequenceKV, int], parents: tuple[int, ...], depths: tuple[int, ...]
) -> None:
    """Negative controls of the test above (case 38, vllm 10350: positions that are off)."""
    assert _difference(prefilled, parents, depths) > 1e-2

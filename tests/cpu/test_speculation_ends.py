"""Several tokens at once: where answers end, what streams, what failures and interruptions leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from drafts import ALL, GREEDY, QUESTIONS, always, sometimes, tree, with_stub
from oracle import build, check_idle, features_of, noise
from PIL import Image

from vlmfast import Answer, Sampling
from vlmfast.cli.main import main
from vlmfast.spec.tree import Acceptance, DraftTree


@pytest.fixture(scope="module")
def plain(load_vlm: Callable[..., Any]) -> Any:
    """The model without drafts and caches."""
    return load_vlm(speculation="off", caching=False)


@pytest.fixture(scope="module")
def expected(plain: Any) -> list[tuple[int, ...]]:
    return [plain.describe(*question, sampling=GREEDY).token_ids for question in QUESTIONS]


def _together(loaded: Any, sampling: Sampling) -> list[Answer]:
    """All questions asked before the first step."""
    streams = [loaded.stream(*question, sampling=sampling) for question in QUESTIONS]
    return [list(stream)[-1].answer for stream in streams]


def _steps(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Counts the engine's steps."""
    count, step = [0], loaded._engine.step

    def counted() -> None:
        count[0] += 1
        step()

    monkeypatch.setattr(loaded._engine, "step", counted)
    while True:
        yield count[0]


def test_right_drafts_save_passes(
    load_vlm: Callable[..., Any], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the point of it all: 24 tokens in three passes, the prompt's, one with 15 drafted and one with 6."""
    loaded = with_stub(load_vlm(speculation=ALL), always, expected)
    count = _steps(loaded, monkeypatch)
    next(count)
    answer = loaded.describe(*QUESTIONS[0], sampling=GREEDY)
    assert next(count) == 3
    assert answer.usage.draft_tokens == answer.usage.accepted_tokens == 21
    assert answer.timings.token_ms == pytest.approx(answer.timings.decode_ms / 23)


@pytest.mark.parametrize("length", range(1, 25, 3))
def test_answers_end_where_they_should(
    load_vlm: Callable[..., Any], plain: Any, expected: list[tuple[int, ...]], length: int
) -> None:
    """Guards `max_new_tokens` in the middle of an accepted draft, and the prefix that is kept of it."""
    loaded = with_stub(load_vlm(speculation=ALL), always, expected)
    sampling = Sampling(max_new_tokens=length)
    for _ in range(2):
        answer = loaded.describe(*QUESTIONS[1], sampling=sampling)
        assert answer.token_ids == expected[1][:length]
        assert answer.finish_reason == "length"
        assert answer.text == plain.describe(*QUESTIONS[1], sampling=sampling).text
    check_idle(loaded)


def test_an_end_token_inside_a_draft_ends_the_answer(
    load_vlm: Callable[..., Any],
    plain: Any,
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards tokens after the end: neither in the text, nor in the answer, nor in the keys and values kept."""
    question, whole = QUESTIONS[0], expected[0]
    for at in (2, 5, 16, 20):
        end = whole[at]
        first = whole.index(end)
        for vlm in (plain, with_stub(load_vlm(speculation=ALL), always, expected)):
            monkeypatch.setattr(vlm._engine, "_eos_token_ids", frozenset({end}))
            for _ in range(2):
                answer = vlm.describe(*question, sampling=GREEDY)
                assert answer.token_ids == whole[:first] and answer.finish_reason == "stop"
                assert answer.usage.accepted_tokens <= answer.usage.completion_tokens
            monkeypatch.undo()
            assert vlm.describe(*question, sampling=GREEDY).token_ids == whole
            check_idle(vlm)


@pytest.mark.parametrize("shape", [always, sometimes, tree], ids=lambda shape: shape.__name__.strip("_"))
def test_stop_texts_and_streams_are_those_of_the_plain_run(
    load_vlm: Callable[..., Any],
    plain: Any,
    expected: list[tuple[int, ...]],
    shape: Callable[..., DraftTree],
) -> None:
    """Guards case 49 (exllamav3 171): the pieces are whole characters and give the same text, stopped or not."""
    loaded = with_stub(load_vlm(speculation=ALL), shape, expected)
    whole = plain.describe(*QUESTIONS[0], sampling=GREEDY).text
    stops = [(), *((whole[at : at + size],) for at in range(3, len(whole) - 4, 7) for size in (1, 4))]
    assert len(stops) > 4
    for stop in stops:
        sampling = Sampling(max_new_tokens=24, stop=stop)
        one = plain.describe(*QUESTIONS[0], sampling=sampling)
        chunks = list(loaded.stream(*QUESTIONS[0], sampling=sampling))
        two = chunks[-1].answer
        assert (two.text, two.token_ids, two.finish_reason) == (one.text, one.token_ids, one.finish_reason)
        assert "".join(chunk.text for chunk in chunks) == two.text
        assert not any("\ufffd" in chunk.text for chunk in chunks) or "\ufffd" in one.text
    check_idle(loaded)


def test_leaving_in_the_middle_frees_everything(load_vlm: Callable[..., Any], expected: list[tuple[int, ...]]) -> None:
    """Guards case 39 (llama.cpp 22673): a reader that goes away between drafted steps, the other goes on."""
    loaded = with_stub(load_vlm(speculation=ALL), sometimes, expected)
    stay = loaded.stream(*QUESTIONS[2], sampling=GREEDY)
    leave = loaded.stream(*QUESTIONS[0], sampling=GREEDY)
    next(leave)
    leave.close()
    assert list(stay)[-1].answer.token_ids == expected[2]
    check_idle(loaded)
    assert not loaded._speculator._sequences


def test_a_drafter_that_fails_harms_no_answer(load_vlm: Callable[..., Any], expected: list[tuple[int, ...]]) -> None:
    """Guards invariant 7: an error in drafting is logged once, and the answer is written without."""
    loaded = load_vlm(speculation=ALL)

    class Broken:
        def propose(self, context: Sequence[int], budget: int) -> DraftTree:
            raise RuntimeError("broken")

        def observe(self, draft: DraftTree, acceptance: Acceptance) -> None: ...

    loaded._speculator._drafters = lambda: [Broken()]
    assert [answer.token_ids for answer in _together(loaded, GREEDY)] == expected
    check_idle(loaded)


def test_an_interrupted_step_is_taken_again(
    load_vlm: Callable[..., Any], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards Ctrl-C inside a drafted pass: the pages are as before, and the others' answers are whole."""
    loaded = with_stub(load_vlm(speculation=ALL), tree, expected)
    streams = [loaded.stream(*question, sampling=GREEDY) for question in QUESTIONS[:2]]
    next(streams[0])
    runner = loaded._engine._runner
    choose, calls = runner._choose, [0]

    def interrupted(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        return choose(*args)

    monkeypatch.setattr(runner, "_choose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(streams[0])
    assert list(streams[1])[-1].answer.token_ids == expected[1]
    check_idle(loaded)


def test_bfloat16_differs_only_where_logits_are_close(load_vlm: Callable[..., Any], plain: Any) -> None:
    """Guards invariant 1: in bf16 a wider pass rounds otherwise; the first other token stands at a near tie.

    The gap is measured in float32 on the tokens that both chose; bf16 keeps 8 bits of logits of about 10.
    """
    from oracle import naive_logits

    packed = load_vlm(dtype="bfloat16", speculation="off")
    drafting = load_vlm(dtype="bfloat16", speculation=ALL)
    for images, question in QUESTIONS:
        one = packed.describe(images, question, sampling=GREEDY).token_ids
        for _ in range(2):
            two = drafting.describe(images, question, sampling=GREEDY).token_ids
            same = next((at for at, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), len(one))
            if same == len(one) == len(two):
                continue
            prompt, loaded = build(plain, images, question)
            features = features_of(plain, loaded, prompt) if loaded else None
            top = naive_logits(plain, [*prompt.ids, *one[:same]], features)[-1].topk(2).values
            assert float(top[0] - top[1]) < 0.05 * float(top[0].abs())


def test_the_command_takes_a_drafter(
    checkpoint_of: Callable[..., Any], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards `--speculation`: usage shows what was drafted, and a wrong name is said before a model is loaded."""
    picture = tmp_path / "picture.png"
    Image.fromarray(noise(30, 20)).save(picture)

    def run(how: str, model: Any) -> tuple[Any, str, str]:
        options = ["--model", str(model), "-p", "What is in the picture?", "--json", "--speculation", how]
        with pytest.raises(SystemExit) as exit_info:
            main(["describe", str(picture), *options])
        return exit_info.value.code, *capsys.readouterr()

    code, out, _ = run("lookup", checkpoint_of())
    usage = json.loads(out)["usage"]
    assert code in (0, None) and 0 <= usage["accepted_tokens"] <= usage["draft_tokens"]
    code, out, err = run("magic", tmp_path / "no model")
    assert (code, out) == (2, "") and "auto, off, lookup, suffix" in err and "'magic'" in err

"""What may befall a request: its caller leaves, a step fails, a picture of a captioning job is broken."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from oracle import check_idle, noise

from vlmfast import Batching, Caching, Sampling
from vlmfast.vision import VisionEncoder

_PICTURE = noise(61, 37)
_QUESTION = "What is in the picture?"
_GREEDY = Sampling(max_new_tokens=16)
_DRAWN = {"max_new_tokens": 16, "temperature": 1.0, "top_p": 0.95}


# --- callers that leave ---


@pytest.mark.parametrize("how", ["never started", "closed midway", "dropped midway", "closed twice", "drained"])
def test_streams_that_end_early_free_everything(load_vlm: Callable[..., Any], how: str) -> None:
    """Guards case 15 (LMCache 3688): page, state and job are freed, and the other request is not touched."""
    loaded = load_vlm(batching=Batching(max_sequences=2))
    expected = loaded.describe(None, _QUESTION, sampling=_GREEDY).token_ids
    other = loaded.stream(None, _QUESTION, sampling=_GREEDY)
    next(other)
    leaving = loaded.stream(_PICTURE, _QUESTION, sampling=_GREEDY)
    waiting = loaded.stream(_PICTURE, "Who?", sampling=_GREEDY)  # no page is left for this one
    if how != "never started":
        next(leaving)
        assert loaded._engine._scheduler.num_free_pages == 0
    if how.startswith("closed"):
        leaving.close()
        if how == "closed twice":
            leaving.close()
        assert loaded._engine._runner.num_states == 1
        assert list(leaving) == []
    if how == "drained":
        list(leaving)
        assert list(leaving) == []
    del leaving
    gc.collect()
    assert list(other)[-1].answer.token_ids == expected
    waiting.close()
    check_idle(loaded)


def test_many_abandoned_streams_leave_no_trace(load_vlm: Callable[..., Any]) -> None:
    """Guards against a slow leak: more left streams than there are pages, then a full answer."""
    loaded = load_vlm(batching=Batching(max_sequences=2))
    for step in range(12):
        stream = loaded.stream(_PICTURE, _QUESTION, sampling=_GREEDY)
        for _ in range(step % 3):
            next(stream)
        del stream
    loaded.describe(_PICTURE, _QUESTION, sampling=_GREEDY)
    check_idle(loaded)


# --- steps that fail ---


@pytest.fixture
def breaks_on_width(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """breaks_on_width(w): from now on encoding a picture of that width fails."""
    original = VisionEncoder.encode

    def install(width: int) -> None:
        def encode(self: VisionEncoder, image: Any, plan: Any, **options: Any) -> Any:
            if image.width == width:
                raise RuntimeError("the tower broke")
            return original(self, image, plan, **options)

        monkeypatch.setattr(VisionEncoder, "encode", encode)

    return install


def test_a_picture_that_breaks_the_tower_fails_alone(
    load_vlm: Callable[..., Any], breaks_on_width: Callable[[int], None]
) -> None:
    """Guards invariant 7: requests in the same step, running and new, are answered; the broken one hears of it."""
    loaded = load_vlm(speculation="off")  # whose steps can be foretold
    good = [noise(61, 37), noise(20, 50)]
    expected = [loaded.describe(image, _QUESTION, sampling=_GREEDY).token_ids for image in good]
    breaks_on_width(47)
    running = loaded.stream(good[0], _QUESTION, sampling=_GREEDY)
    next(running)
    bad = loaded.stream(noise(47, 30), _QUESTION, sampling=_GREEDY)
    new = loaded.stream(good[1], _QUESTION, sampling=_GREEDY)
    assert list(running)[-1].answer.token_ids == expected[0]
    assert loaded._engine._runner.num_states == 1, "the failed request is gone before its caller asks"
    assert list(new)[-1].answer.token_ids == expected[1]
    with pytest.raises(RuntimeError, match="the tower broke"):
        next(bad)
    assert list(bad) == []
    check_idle(loaded)


def test_a_failing_pass_fails_its_batch_and_the_engine_goes_on(
    load_vlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a failure that belongs to no single request: all in the step hear of it, the next are answered."""
    loaded = load_vlm(batching=Batching(max_sequences=2))
    expected = loaded.describe(_PICTURE, _QUESTION, sampling=_GREEDY).token_ids
    runner = loaded._engine._runner
    forward, calls = runner._forward, []

    def failing(*batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(*batch)

    monkeypatch.setattr(runner, "_forward", failing)
    streams = [loaded.stream(_PICTURE, _QUESTION, sampling=_GREEDY) for _ in range(3)]
    for stream in streams[:2]:
        with pytest.raises(RuntimeError, match="out of memory"):
            list(stream)
    assert list(streams[2])[-1].answer.token_ids == expected
    check_idle(loaded)


@pytest.mark.parametrize("tokens_before", [0, 3], ids=["in the prompt", "in the answer"])
@pytest.mark.parametrize("where", ["layer", "logits"])
def test_an_interrupt_harms_only_its_own_request(
    load_vlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tokens_before: int, where: str
) -> None:
    """Guards Ctrl-C inside a decoder pass: some layers have stored the step's tokens, others not; visual tokens were
    placed already. The other requests of the step must not notice."""
    loaded = load_vlm()
    expected = loaded.describe(_PICTURE, _QUESTION, sampling=_GREEDY).token_ids
    mine, theirs = (loaded.stream(_PICTURE, _QUESTION, sampling=_GREEDY) for _ in range(2))
    for _ in range(tokens_before):
        next(mine)
    decoder = loaded._engine._runner._model.decoder
    with monkeypatch.context() as patch:

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

        patch.setattr(decoder.layers[1] if where == "layer" else decoder.norm, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(mine)
    state = next(iter(loaded._engine._runner._states.values()))
    assert len(set(state.kv.lengths)) == 1, "every layer holds the same tokens"
    assert list(theirs)[-1].answer.token_ids == expected
    check_idle(loaded)


# --- captions ---


def test_captions_come_in_order_with_the_broken_one_in_its_place(
    load_vlm: Callable[..., Any], tmp_path: Any, breaks_on_width: Callable[[int], None]
) -> None:
    """Guards case 36 (vllm 10777): nine captions and error rows, whether the file is broken or the tower fails."""
    loaded = load_vlm(caching=Caching.off())  # a picture known from before would need no tower
    pictures: list[Any] = [noise(20 + index, 30) for index in range(10)]
    expected = [loaded.describe(picture, "Describe.", sampling=_GREEDY).token_ids for picture in pictures]
    broken = tmp_path / "three.png"
    broken.write_bytes(b"nothing")
    sources = [*pictures[:3], broken, *pictures[4:]]
    breaks_on_width(26)
    rows = list(loaded.caption(iter(sources), "Describe.", sampling=_GREEDY))
    check_idle(loaded)
    assert len(rows) == 10
    assert (rows[3].kind, rows[3].image) == ("bad_image", str(broken))
    assert (rows[6].kind, rows[6].message) == ("internal", "the tower broke")
    for index in set(range(10)) - {3, 6}:
        assert rows[index].token_ids == expected[index]


def test_captioning_is_lazy_and_can_be_left(load_vlm: Callable[..., Any]) -> None:
    """Guards long jobs: pictures are taken as rows are fetched, and leaving frees what was in flight."""
    loaded = load_vlm(batching=Batching(max_sequences=2))
    taken = []

    def sources() -> Any:
        for index in range(50):
            taken.append(index)
            yield noise(20 + index, 20)

    rows = loaded.caption(sources(), sampling=_GREEDY)
    next(rows)
    next(rows)
    assert len(taken) <= 4
    rows.close()
    del rows
    check_idle(loaded)


def test_an_unnamed_broken_source_is_called_by_its_place(idle_engine: Any) -> None:
    """Guards error rows of bytes and other unnamed sources."""
    rows = list(idle_engine.caption([b"nothing", _PICTURE, 5], sampling=_GREEDY))
    assert [getattr(row, "image", None) for row in rows] == ["bytes #0", None, "int #2"]
    assert rows[0].to_dict()["error"]["kind"] == "bad_image"

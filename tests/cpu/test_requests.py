"""What a request may ask for: seeds, ends, limits, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from oracle import build, check_idle, naive_answer, noise

from vlmfast import VLM, CaptionError, FastV, Limits, Sampling, describe
from vlmfast.errors import ContextLengthError, ImageError, ImageLimitError, InputError, OptionError
from vlmfast.testing import Shape

_PICTURE = noise(61, 37)
_QUESTION = "What is in the picture?"
_GREEDY = Sampling(max_new_tokens=16)
_DRAWN = {"max_new_tokens": 16, "temperature": 1.0, "top_p": 0.95}


# --- seeds ---


def test_a_seed_repeats_its_draws(idle_engine: Any) -> None:
    """Guards repeatable drawing, alone and inside a batch of others; other seeds draw otherwise."""

    def ask(seed: int | None) -> tuple[int, ...]:
        return idle_engine.describe(_PICTURE, _QUESTION, sampling=Sampling(seed=seed, **_DRAWN)).token_ids

    alone = {seed: ask(seed) for seed in (1, 2, 3)}
    assert len(set(alone.values())) == 3
    assert ask(2) == alone[2]
    streams = [
        idle_engine.stream(_PICTURE, _QUESTION, sampling=Sampling(seed=seed, **_DRAWN)) for seed in (3, None, 1, 2)
    ]
    together = [list(stream)[-1].answer.token_ids for stream in streams]
    assert [together[0], together[2], together[3]] == [alone[3], alone[1], alone[2]]
    assert len({ask(None) for _ in range(4)}) > 1


def test_a_cold_temperature_equals_greedy(idle_engine: Any) -> None:
    """Guards the limit: near temperature 0, and with top_k=1, drawing is greedy."""
    greedy = idle_engine.describe(_PICTURE, _QUESTION, sampling=_GREEDY).token_ids
    for options in ({"temperature": 1e-4}, {"temperature": 1.5, "top_k": 1}, {"temperature": 1.5, "top_p": 1e-6}):
        assert (
            idle_engine.describe(_PICTURE, _QUESTION, sampling=Sampling(max_new_tokens=16, **options)).token_ids
            == greedy
        )


def test_repetition_penalty_reaches_the_answer(idle_engine: Any) -> None:
    """Guards the option's way through the engine: a strong penalty forbids repeats, prompt tokens included."""
    options = Sampling(max_new_tokens=40, repetition_penalty=50.0)
    answer = idle_engine.describe(None, _QUESTION, sampling=options)
    assert len(set(answer.token_ids)) == len(answer.token_ids)
    assert answer.token_ids != idle_engine.describe(None, _QUESTION, sampling=Sampling(max_new_tokens=40)).token_ids


# --- ends ---


def test_length_is_the_end_where_nothing_else_is(idle_engine: Any) -> None:
    """Guards max_new_tokens: exactly so many tokens, and longer answers begin with shorter ones."""
    full = idle_engine.describe(_PICTURE, _QUESTION, sampling=_GREEDY)
    assert full.finish_reason == "length" and full.usage.completion_tokens == len(full.token_ids) == 16
    for count in (1, 2, 15):
        answer = idle_engine.describe(_PICTURE, _QUESTION, sampling=Sampling(max_new_tokens=count))
        assert answer.token_ids == full.token_ids[:count]
        assert answer.finish_reason == "length"


def test_end_tokens_end_the_answer(load_vlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the end token: it ends the answer, and is neither in its tokens nor in its text."""
    loaded = load_vlm()
    full = loaded.describe(_PICTURE, _QUESTION, sampling=_GREEDY).token_ids
    stop = full[5]
    monkeypatch.setattr(loaded._engine, "_eos_token_ids", frozenset({stop}))
    answer = loaded.describe(_PICTURE, _QUESTION, sampling=_GREEDY)
    assert answer.token_ids == full[: full.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.text == loaded.checkpoint.tokenizer.decode(answer.token_ids, skip_special_tokens=True).rstrip(
        "\ufffd"
    )
    monkeypatch.setattr(loaded._engine, "_eos_token_ids", frozenset({full[0]}))
    empty = loaded.describe(_PICTURE, _QUESTION, sampling=_GREEDY)
    assert (empty.text, empty.token_ids, empty.finish_reason) == ("", (), "stop")
    check_idle(loaded)


def test_stop_texts_end_the_answer(idle_engine: Any) -> None:
    """Guards stop texts through the engine, wherever in the answer they stand, over token boundaries too."""
    options = {"max_new_tokens": 40}
    whole = idle_engine.describe(None, _QUESTION, sampling=Sampling(**options))
    full = whole.text
    assert len(full) > 20
    for start in range(0, len(full) - 4, 5):
        stop = full[start : start + 4]
        chunks = list(idle_engine.stream(None, _QUESTION, sampling=Sampling(stop=(stop,), **options)))
        answer = chunks[-1].answer
        assert answer.text == full.split(stop)[0] == "".join(chunk.text for chunk in chunks)
        assert answer.finish_reason == "stop"
    answer = idle_engine.describe(None, _QUESTION, sampling=Sampling(stop=("never in it",), **options))
    assert (answer.text, answer.finish_reason) == (full, whole.finish_reason)


def test_chunks_concatenate_to_the_answer(idle_engine: Any) -> None:
    """Guards the stream: only its last chunk carries the answer, and its parts are the text."""
    chunks = list(idle_engine.stream(_PICTURE, _QUESTION, sampling=Sampling(max_new_tokens=60)))
    assert [chunk.answer is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert "".join(chunk.text for chunk in chunks) == chunks[-1].answer.text == str(chunks[-1].answer)
    assert len(chunks) > 5


def test_usage_counts(idle_engine: Any) -> None:
    """Guards the counts that a user is shown against the prompt itself."""
    images = [_PICTURE, noise(32, 32)]
    prompt, _ = build(idle_engine, images, _QUESTION)
    usage = idle_engine.describe(images, _QUESTION, sampling=_GREEDY).usage
    image_id = idle_engine.checkpoint.config.image_token_id
    assert usage.prompt_tokens == len(prompt.ids)
    assert usage.visual_tokens == prompt.ids.count(image_id)
    assert (usage.num_images, usage.completion_tokens) == (2, 16)
    assert usage.num_tiles * idle_engine.checkpoint.config.tokens_per_tile == usage.visual_tokens
    text_only = idle_engine.describe(None, _QUESTION, sampling=_GREEDY).usage
    assert (text_only.visual_tokens, text_only.num_images, text_only.num_tiles) == (0, 0, 0)


def test_timings_are_all_there(idle_engine: Any) -> None:
    """Guards the clocks: none is negative, the parts are within the whole, no picture means no encoding."""
    unseen = noise(45, 31, 7)
    timings = idle_engine.describe(unseen, _QUESTION, sampling=_GREEDY).timings
    parts = timings.image_ms + timings.encode_ms + timings.prefill_ms + timings.decode_ms
    assert min(timings.image_ms, timings.encode_ms, timings.prefill_ms, timings.decode_ms) > 0
    assert timings.first_token_ms <= timings.total_ms and parts <= timings.total_ms
    assert idle_engine.describe(None, _QUESTION, sampling=_GREEDY).timings.encode_ms == 0
    assert timings.token_ms == timings.decode_ms / (_GREEDY.max_new_tokens - 1)


# --- the context ---


@pytest.fixture(scope="module")
def short(load_vlm: Callable[..., Any], checkpoint_of: Callable[..., Any]) -> Any:
    """A model whose context is 96 tokens."""
    text = {**Shape().text, "max_position_embeddings": 96}
    return load_vlm(checkpoint_of(Shape(text=text, initializer_range=0.2)))


def test_a_prompt_beyond_the_context_is_refused(short: Any) -> None:
    """Guards the context's end: refused before anything is streamed, with both numbers and what to do."""
    with pytest.raises(ContextLengthError, match=r"\d+ tokens \(0 of them visual\).*context is 96; shorten"):
        short.stream(None, "word " * 100)
    with pytest.raises(ContextLengthError, match="of them visual"):
        short.describe([_PICTURE, _PICTURE], _QUESTION)
    check_idle(short)


def test_answers_are_clipped_by_the_context(short: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the last position: the answer fills the context to its end and no further, and equals the naive one."""
    monkeypatch.setattr(short._engine, "_eos_token_ids", frozenset())
    monkeypatch.setattr(short, "checkpoint", replace(short.checkpoint, eos_token_ids=frozenset()))
    prompt, _ = build(short, [], _QUESTION)
    room = 96 - len(prompt.ids)
    answer = short.describe(None, _QUESTION, sampling=Sampling(max_new_tokens=500))
    assert len(answer.token_ids) == room and answer.finish_reason == "length"
    assert answer.token_ids == naive_answer(short, [], _QUESTION, room)


def test_a_prompt_that_leaves_room_for_one_token(short: Any) -> None:
    """Guards the edge: 95 tokens of prompt are answered with one, 96 are refused."""
    base, _ = build(short, [], "x")
    question = "x" * (96 - len(base.ids))
    assert len(build(short, [], question)[0].ids) == 95
    assert len(short.describe(None, question).token_ids) == 1
    with pytest.raises(ContextLengthError):
        short.describe(None, question + "x")


# --- bad requests ---


@pytest.mark.parametrize("prompt", ["", "  \n "])
def test_an_empty_question_is_refused(idle_engine: Any, prompt: str) -> None:
    """Guards empty prompts."""
    with pytest.raises(InputError, match="prompt is empty"):
        idle_engine.describe(_PICTURE, prompt)


def test_too_many_pictures_are_refused(load_vlm: Callable[..., Any]) -> None:
    """Guards the limit on pictures of one request, which the message names."""
    loaded = load_vlm(limits=Limits(max_images=2))
    assert loaded.describe([_PICTURE] * 2, _QUESTION, sampling=_GREEDY).usage.num_images == 2
    with pytest.raises(ImageLimitError, match=r"3 pictures.*max_images"):
        loaded.describe([_PICTURE] * 3, _QUESTION)


def test_limits_reach_the_loader(load_vlm: Callable[..., Any]) -> None:
    """Guards `limits` of from_pretrained: they are those that pictures are loaded under, in captions too."""
    loaded = load_vlm(limits=Limits(max_image_pixels=1000))
    with pytest.raises(ImageLimitError):
        loaded.describe(_PICTURE, _QUESTION)
    rows = list(loaded.caption([_PICTURE, noise(20, 20)], sampling=_GREEDY))
    assert isinstance(rows[0], CaptionError) and rows[0].kind == "image_too_large"
    assert rows[1].usage.num_images == 1


def test_a_bad_picture_among_good_ones_is_named(idle_engine: Any, tmp_path: Any) -> None:
    """Guards several pictures in one question: the broken one is named, nothing is left behind."""
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff nothing")
    with pytest.raises(ImageError, match=r"broken\.jpg"):
        idle_engine.describe([_PICTURE, broken, _PICTURE], _QUESTION)


def test_describe_takes_a_loaded_model_or_a_folder(vlm: Any) -> None:
    """Guards the one-line entrance: a VLM, a folder, and the same folder again without loading it anew."""
    from vlmfast import default as module

    expected = vlm.describe(_PICTURE, _QUESTION, sampling=_GREEDY).text
    assert describe(_PICTURE, _QUESTION, model=vlm, sampling=_GREEDY).text == expected
    folder = vlm.checkpoint.folder
    try:
        assert describe(_PICTURE, _QUESTION, model=folder, sampling=_GREEDY).text == expected
        first = module._default
        assert describe(_PICTURE, _QUESTION, model=str(folder), sampling=_GREEDY).text == expected
        assert module._default is first
    finally:
        module._default = None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"vision": FastV()}, r"vision must be options or None, got FastV\(.*write vision=Vision\("),
        ({"vision": "auto"}, "vision must be"),
        ({"vision": {}}, "vision must be"),
        ({"sampling": "greedy"}, r"sampling must be .*write sampling=Sampling\("),
        ({"sampling": {}}, "sampling must be"),
        ({"speculation": "fast"}, "speculation must be"),
    ],
)
def test_options_of_another_kind_are_named(vlm: Any, options: dict[str, Any], named: str) -> None:
    """Guards a part given for the whole: a Python error from deep inside, rows of errors, or taken for none at all."""
    with pytest.raises(OptionError, match=named):
        vlm.describe(_PICTURE, _QUESTION, **options)
    with pytest.raises(OptionError, match=named):
        vlm.caption([_PICTURE], **options)
    chat_options = {name: value for name, value in options.items() if name != "sampling"}
    if chat_options:
        with pytest.raises(OptionError, match=named):
            vlm.chat(_PICTURE, **chat_options)
    else:
        with pytest.raises(OptionError, match=named):
            vlm.chat(_PICTURE).ask(_QUESTION, **options)


@pytest.mark.parametrize("options", [{"caching": {}}, {"batching": 3}, {"limits": "none"}])
def test_options_of_another_kind_are_named_at_loading(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=f"{name} must be options or None"):
        VLM.from_pretrained(**options)

"""Conversations: turns are kept, abandoned turns leave no trace, each answer equals a fresh question of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from oracle import check_idle, noise

from vlmfast import Sampling, load_image
from vlmfast.chat import Chat
from vlmfast.errors import ContextLengthError, ImageError, InputError, OptionError
from vlmfast.prompt import Message
from vlmfast.testing import Shape

_GREEDY = Sampling(max_new_tokens=12)
_PICTURE = noise(40, 30)


def _fresh(vlm: Any, messages: list[Message]) -> tuple[int, ...]:
    return list(vlm.answer_messages(messages, sampling=_GREEDY))[-1].answer.token_ids


def test_turns_are_kept_and_equal_a_fresh_run(idle_engine: Any, load_vlm: Callable[..., Any]) -> None:
    """Guards memory of turns: the second answer is that to the whole conversation, with a picture added in turn 3.

    Fresh runs keep nothing, so this is also cases 12 and 13: reuse over turns changes no answer.
    """
    plain = load_vlm(caching=False)
    chat = idle_engine.chat(_PICTURE, system="Be short.")
    one = chat.ask("What is it?", sampling=_GREEDY)
    two = chat.ask("Which colour?", sampling=_GREEDY)
    other = noise(20, 60)
    three = chat.ask("And this?", other, sampling=_GREEDY)
    history = [
        Message(role="system", text="Be short."),
        Message(role="user", text="What is it?", images=(load_image(_PICTURE),)),
        Message(role="assistant", text=one.text, token_ids=one.token_ids),
        Message(role="user", text="Which colour?"),
        Message(role="assistant", text=two.text, token_ids=two.token_ids),
        Message(role="user", text="And this?", images=(load_image(other),)),
    ]
    assert [(message.role, message.text) for message in chat.messages] == [
        *((message.role, message.text) for message in history),
        ("assistant", three.text),
    ]
    assert [len(message.images) for message in chat.messages] == [0, 1, 0, 0, 0, 1, 0]
    assert one.token_ids == _fresh(plain, history[:2])
    assert two.token_ids == _fresh(plain, history[:4])
    assert three.token_ids == _fresh(plain, history)
    assert two.token_ids != _fresh(plain, [history[0], history[3]]), "the history should matter"


@pytest.mark.parametrize("how", ["never started", "closed", "dropped"])
def test_an_abandoned_turn_leaves_no_trace(idle_engine: Any, how: str) -> None:
    """Guards a reader that leaves: neither question nor half an answer is kept, and the picture is still due."""
    chat = idle_engine.chat(_PICTURE)
    stream = chat.stream("Forget this.", sampling=_GREEDY)
    if how != "never started":
        next(stream)
    if how == "closed":
        stream.close()
    del stream
    assert chat.messages == ()
    answer = chat.ask("What is it?", sampling=_GREEDY)
    assert answer.usage.num_images == 1
    assert answer.token_ids == idle_engine.describe(_PICTURE, "What is it?", sampling=_GREEDY).token_ids


def test_a_refused_turn_leaves_no_trace(idle_engine: Any) -> None:
    """Guards errors in a turn: a broken picture, an empty or too long question change nothing."""
    chat = idle_engine.chat(_PICTURE)
    chat.ask("What is it?", sampling=_GREEDY)
    before = chat.messages
    for question, image, error in (
        ("And?", b"broken", ImageError),
        (" ", None, InputError),
        ("w " * 3000, None, ContextLengthError),
    ):
        with pytest.raises(error):
            chat.ask(question, image, sampling=_GREEDY)
        assert chat.messages == before
    assert chat.ask("Which colour?", sampling=_GREEDY).usage.num_images == 1


def test_a_chat_about_no_picture(idle_engine: Any) -> None:
    """Guards case 34: a text-only turn on a vision-language model works."""
    chat = idle_engine.chat()
    answer = chat.ask("Is there a red circle?", sampling=_GREEDY)
    assert answer.usage.num_images == answer.usage.visual_tokens == 0
    assert answer.token_ids == idle_engine.describe(None, "Is there a red circle?", sampling=_GREEDY).token_ids
    assert answer.token_ids == idle_engine.describe([], "Is there a red circle?", sampling=_GREEDY).token_ids


def test_two_chats_do_not_mix(idle_engine: Any) -> None:
    """Guards case 4: the same words about another picture have their own history and their own answer."""
    pictures = [noise(40, 30), noise(40, 30, 8)]
    chats = [idle_engine.chat(picture) for picture in pictures]
    streams = [chat.stream("What is it?", sampling=_GREEDY) for chat in chats]
    chunks: list[list[Any]] = [[], []]
    for _ in range(60):
        for stream, parts in zip(streams, chunks, strict=True):
            parts += [part for part in [next(stream, None)] if part is not None]
    answers = [parts[-1].answer for parts in chunks]
    for picture, answer, chat in zip(pictures, answers, chats, strict=True):
        assert answer.token_ids == idle_engine.describe(picture, "What is it?", sampling=_GREEDY).token_ids
        assert chat.messages[-1].text == answer.text
    assert answers[0].token_ids != answers[1].token_ids


# --- the past is reused ---


def test_a_follow_up_computes_its_own_words_only(load_vlm: Callable[..., Any]) -> None:
    """Guards cases 12 and 13: each turn begins with all tokens of the turn before, answer and pictures included."""
    loaded = load_vlm()
    chat = loaded.chat(_PICTURE, system="Be short.")
    before = chat.ask("What is it?", sampling=_GREEDY)
    for question, image in (("Which colour?", None), ("And this?", noise(20, 60)), ("Sure?", None)):
        answer = chat.ask(question, image, sampling=_GREEDY)
        # The last token of an answer that its length ended was never put through the decoder.
        assert answer.usage.cached_tokens >= before.usage.prompt_tokens + before.usage.completion_tokens - 1
        assert answer.usage.images_from_prefix == before.usage.num_images
        before = answer
    check_idle(loaded)


def test_the_bundled_model_reuses_its_answers() -> None:
    """Guards the real template (one turn a line, "Assistant:" without a space): a follow-up reuses the whole past."""
    from vlmfast import VLM

    loaded = VLM.from_pretrained(device="cpu", dtype="float32", caching=None)
    chat = loaded.chat(_PICTURE)
    one = chat.ask("What is in the picture?", sampling=_GREEDY)
    prompt = loaded.build_prompt([*chat.messages, Message(role="user", text="And?")])
    asked = loaded.build_prompt(chat.messages[:1])
    assert prompt.ids[: len(asked.ids) + len(one.token_ids)] == asked.ids + one.token_ids
    two = chat.ask("And?", sampling=_GREEDY)
    assert two.usage.cached_tokens >= one.usage.prompt_tokens + one.usage.completion_tokens - 1
    assert loaded.checkpoint.tokenizer.decode(prompt.ids).count("Assistant:") == 2


@pytest.mark.parametrize("stop", ["none", "cut"])
def test_text_that_a_stop_text_cut_counts_as_text(idle_engine: Any, stop: str) -> None:
    """Guards answers whose tokens say more than their text: the next prompt has the text, not the tokens."""
    chat = idle_engine.chat(_PICTURE)
    whole = idle_engine.describe(_PICTURE, "What is it?", sampling=_GREEDY)
    stops = (whole.text[5:7],) if stop == "cut" else ()
    answer = chat.ask("What is it?", sampling=Sampling(max_new_tokens=12, stop=stops))
    assert chat.messages[-1].token_ids == (() if stop == "cut" else answer.token_ids)
    assert chat.messages[-1].text == answer.text


def test_a_template_that_rewrites_answers_has_the_last_word(idle_engine: Any, monkeypatch: Any) -> None:
    """Guards templates that cut or decorate earlier answers: then the prompt is what the template says."""
    builder = idle_engine._prompts
    messages = [
        Message(role="user", text="a"),
        Message(role="assistant", text="the answer", token_ids=(7, 8, 9)),
        Message(role="user", text="b"),
    ]
    assert _inside(builder.build(messages, []).ids, (7, 8, 9)) == (7, 8, 9)
    for change in ("{{ part['text'] | upper }}", "{{ part['text'][:3] }}", "<<{{ part['text'] }}"):
        with monkeypatch.context() as patch:
            patch.setattr(builder, "_template", builder._template.replace("{{ part['text'] }}", change))
            plain = [Message(role=message.role, text=message.text) for message in messages]
            assert builder.build(messages, []).ids == builder.build(plain, []).ids


def _inside(ids: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...] | None:
    places = range(len(ids) - len(wanted) + 1)
    return next((wanted for at in places if ids[at : at + len(wanted)] == wanted), None)


def test_an_image_token_in_an_answer_is_no_picture(load_vlm: Callable[..., Any]) -> None:
    """Guards a model that says its own image token: the follow-up has one picture still, and is answered."""
    loaded = load_vlm(caching=False)
    image_token = loaded.model.config.image_token_id
    messages = [
        Message(role="user", text="a", images=(load_image(_PICTURE),)),
        Message(role="assistant", text="x", token_ids=(7, image_token, 9)),
        Message(role="user", text="b"),
    ]
    answer = list(loaded.answer_messages(messages, sampling=_GREEDY))[-1].answer
    assert answer.usage.num_images == 1 and answer.usage.completion_tokens > 0


# --- edits ---


def test_undo_takes_back_a_turn_and_its_pictures(idle_engine: Any) -> None:
    """Guards undo: the chat is as it was before the question; pictures that had waited for it wait again."""
    chat = idle_engine.chat(_PICTURE)
    one = chat.ask("What is it?", sampling=_GREEDY)
    chat.add_images(noise(20, 60))
    chat.ask("And this?", noise(33, 33), sampling=_GREEDY)
    question = chat.undo()
    assert question.text == "And this?" and len(question.images) == 2
    assert [image.width for image in chat.pending_images] == [20]
    assert [message.text for message in chat.messages] == ["What is it?", one.text]
    chat.undo()
    assert chat.messages == () and [image.width for image in chat.pending_images] == [40, 20]
    with pytest.raises(InputError, match="nothing to undo"):
        chat.undo()
    expected = idle_engine.describe([_PICTURE, noise(20, 60)], "What is it?", sampling=_GREEDY).token_ids
    assert chat.ask("What is it?", sampling=_GREEDY).token_ids == expected


def test_a_fork_goes_its_own_way(idle_engine: Any) -> None:
    chat = idle_engine.chat(_PICTURE, system="Be short.")
    chat.ask("What is it?", sampling=_GREEDY)
    other = chat.fork()
    assert other.messages == chat.messages
    one, two = chat.ask("Which colour?", sampling=_GREEDY), other.ask("How many?", sampling=_GREEDY)
    assert one.token_ids != two.token_ids
    assert [chat.messages[-2].text, other.messages[-2].text] == ["Which colour?", "How many?"]
    other.undo()
    assert other.ask("Which colour?", sampling=_GREEDY).token_ids == one.token_ids


# --- the context ---


@pytest.fixture(scope="module")
def short(load_vlm: Callable[..., Any], checkpoint_of: Callable[..., Any]) -> Any:
    """A model whose context holds a picture and a few turns."""
    text = {**Shape().text, "max_position_embeddings": 256}
    return load_vlm(checkpoint_of(Shape(text=text, initializer_range=0.2)))


def test_a_full_context_is_an_error_that_changes_nothing(short: Any) -> None:
    chat = short.chat(_PICTURE)
    with pytest.raises(ContextLengthError, match="context is 256"):
        for _ in range(30):
            before = chat.messages
            chat.ask("Is there a red circle?", sampling=_GREEDY)
    assert chat.messages == before and len(before) > 2
    with pytest.raises(ContextLengthError):
        chat.ask("Is there a red circle?", sampling=_GREEDY)
    assert chat.undo().text and chat.ask("What?", sampling=_GREEDY)
    check_idle(short)


def test_a_full_context_drops_whole_turns(short: Any) -> None:
    """Guards overflow="drop": the oldest turn without a picture goes, the picture stays whole, answers have room."""
    chat = short.chat(_PICTURE, system="Be short.", overflow="drop")
    for index in range(12):
        answer = chat.ask(f"Is there a red circle {index}?", sampling=_GREEDY)
        assert answer.usage.num_images == 1
        assert answer.usage.completion_tokens == 12 or answer.finish_reason == "stop"
    texts = [message.text for message in chat.messages if message.role != "assistant"]
    assert texts[:2] == ["Be short.", "Is there a red circle 0?"]
    assert texts[-1] == "Is there a red circle 11?" and 3 <= len(texts) < 12
    assert answer.usage.images_from_prefix == 1, "the picture at the front is reused when turns behind it go"
    with pytest.raises(ContextLengthError):
        chat.ask("word " * 300, sampling=_GREEDY)
    assert [message.text for message in chat.messages if message.role != "assistant"] == texts


def test_an_unknown_overflow_is_refused(idle_engine: Any) -> None:
    with pytest.raises(OptionError, match="error, drop"):
        Chat(idle_engine, overflow="forget")

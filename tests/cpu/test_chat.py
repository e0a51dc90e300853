"""Conversations: turns are kept, abandoned turns leave no trace, each answer equals a fresh question of the whole."""

from __future__ import annotations

from typing import Any

import pytest
from oracle import noise

from vlmfast import Sampling, load_image
from vlmfast.errors import ContextLengthError, ImageError, InputError
from vlmfast.prompt import Message

_GREEDY = Sampling(max_new_tokens=12)
_PICTURE = noise(40, 30)


def _fresh(vlm: Any, messages: list[Message]) -> tuple[int, ...]:
    return list(vlm.answer_messages(messages, sampling=_GREEDY))[-1].answer.token_ids


def test_turns_are_kept_and_equal_a_fresh_run(idle_engine: Any) -> None:
    """Guards memory of turns: the second answer is that to the whole conversation, with a picture added in turn 3."""
    chat = idle_engine.chat(_PICTURE, system="Be short.")
    one = chat.ask("What is it?", sampling=_GREEDY)
    two = chat.ask("Which colour?", sampling=_GREEDY)
    other = noise(20, 60)
    three = chat.ask("And this?", other, sampling=_GREEDY)
    history = [
        Message(role="system", text="Be short."),
        Message(role="user", text="What is it?", images=(load_image(_PICTURE),)),
        Message(role="assistant", text=one.text),
        Message(role="user", text="Which colour?"),
        Message(role="assistant", text=two.text),
        Message(role="user", text="And this?", images=(load_image(other),)),
    ]
    assert [(message.role, message.text) for message in chat.messages] == [
        *((message.role, message.text) for message in history),
        ("assistant", three.text),
    ]
    assert [len(message.images) for message in chat.messages] == [0, 1, 0, 0, 0, 1, 0]
    assert one.token_ids == _fresh(idle_engine, history[:2])
    assert two.token_ids == _fresh(idle_engine, history[:4])
    assert three.token_ids == _fresh(idle_engine, history)
    assert two.token_ids != _fresh(idle_engine, [history[0], history[3]]), "the history should matter"


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

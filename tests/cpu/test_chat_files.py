"""Saved chats: they go on as they would have, damaged files are refused by name, and nothing in a file is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import noise

from vlmfast import Limits, Sampling
from vlmfast.chat import Chat
from vlmfast.errors import ImageLimitError, InputError
from vlmfast.options import FastV, Reduce, ToMe, Vision
from vlmfast.testing import Shape

_GREEDY = Sampling(max_new_tokens=12)
_PICTURE = noise(40, 30)


@pytest.fixture
def saved(idle_engine: Any, tmp_path: Path) -> tuple[Chat, Path]:
    """A chat of two turns with a picture that waits, and its file."""
    chat = idle_engine.chat(_PICTURE, system="Be short.", overflow="drop")
    chat.ask("What is it?", sampling=_GREEDY)
    chat.ask("And this? é漢\u2028", [noise(20, 60), _PICTURE], sampling=_GREEDY)
    chat.add_images(noise(33, 33))
    chat.save(tmp_path / "chat.json")
    return chat, tmp_path / "chat.json"


def _edited(path: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return path


def test_a_loaded_chat_goes_on_as_the_saved_one(
    saved: tuple[Chat, Path], load_vlm: Callable[..., Any], tmp_path: Path
) -> None:
    """Guards restarts: same turns, same tokens, same next answer in a new model without any cache; undo works on."""
    chat, path = saved
    other = Chat.load(path, load_vlm(caching=False))
    assert [(one.role, one.text, one.token_ids) for one in other.messages] == [
        (one.role, one.text, one.token_ids) for one in chat.messages
    ]
    assert [[image.digest for image in one.images] for one in other.messages] == [
        [image.digest for image in one.images] for one in chat.messages
    ]
    assert [image.name for image in other.messages[1].images] == [image.name for image in chat.messages[1].images]
    other.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()
    assert other.ask("Sure?", sampling=_GREEDY).token_ids == chat.ask("Sure?", sampling=_GREEDY).token_ids
    for _ in range(3):
        other.undo()
        chat.undo()
    assert [image.width for image in other.pending_images] == [image.width for image in chat.pending_images] == [40, 33]


@pytest.mark.parametrize(
    "vision",
    [
        Vision(),
        Vision(resolution=2, max_pixels=100_000, tome=ToMe(r=(2, 0.1)), reduce=Reduce("saliency", keep=0.5)),
        Vision(
            resolution=np.int64(3), reduce=Reduce("diversity", keep="auto"), fastv=FastV(keep=0.5, then=((3, 0.25),))
        ),
        Vision(resolution="low", reduce=Reduce("random", keep=8, seed=3)),
    ],
)
def test_the_vision_option_is_saved(idle_engine: Any, tmp_path: Path, vision: Vision) -> None:
    """Guards a saved chat that went on with all visual tokens, and so with another prompt than it had."""
    path = tmp_path / "chat.json"
    idle_engine.chat(_PICTURE, vision=vision).save(path)
    loaded = Chat.load(path, idle_engine)
    assert loaded._vision == vision
    assert type(loaded._vision.reduce and loaded._vision.reduce.keep) is type(vision.reduce and vision.reduce.keep)
    other = Vision(resolution="auto")
    assert Chat.load(path, idle_engine, vision=other)._vision == other
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_file_without_a_vision_option_loads(saved: tuple[Chat, Path], idle_engine: Any) -> None:
    """Guards chats saved before the option was, and those of the default."""
    assert Chat.load(saved[1], idle_engine)._vision is None
    assert Chat.load(_edited(saved[1], lambda content: content.pop("vision")), idle_engine)._vision is None


def test_each_picture_is_written_once(saved: tuple[Chat, Path]) -> None:
    content = json.loads(saved[1].read_text())
    assert len(content["images"]) == 3
    assert [turn["images"] for turn in content["turns"]] == [[0], [1, 0]] and content["pending"] == [2]


def test_another_vocabulary_goes_on_from_the_texts(
    saved: tuple[Chat, Path], load_vlm: Callable[..., Any], checkpoint_of: Callable[..., Path]
) -> None:
    """Guards token ids of another model, which would mean other words."""
    other = load_vlm(checkpoint_of(Shape(vocab_size=600)))
    chat = Chat.load(saved[1], other)
    assert [one.text for one in chat.messages] == [one.text for one in saved[0].messages]
    assert all(one.token_ids == () for one in chat.messages)
    chat.ask("Sure?", sampling=_GREEDY)


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content.pop("turns"),
        lambda content: content["turns"][0].update(images=[7]),
        lambda content: content["turns"][0].update(images=[-1]),
        lambda content: content["turns"][0].update(images="ab"),
        lambda content: content["turns"][0].update(token_ids=["x"]),
        lambda content: content["turns"][0].update(answer=None),
        lambda content: content["turns"][0].update(answer="\ud800"),
        lambda content: content.update(turns={"a": 1}),
        lambda content: content.update(overflow="forget"),
        lambda content: content.update(system=3),
        lambda content: content["images"][0].update(png="/etc/passwd"),
        lambda content: content["images"][0].update(png="aGVsbG8="),
        lambda content: content["images"][0].update(png=content["images"][0]["png"][:200]),
        lambda content: content["turns"][0].update(token_ids=[10**9]),
        lambda content: content["turns"][1].update(token_ids=[5, 10**30]),
        lambda content: content.update(vision={"fastv": {"layer": 99}}),
        lambda content: content.update(vision="low"),
        lambda content: content.update(vision={"resolution": "huge"}),
        lambda content: content.update(vision={"resize": 3}),
        lambda content: content.update(vision={"tome": 0.1}),
        lambda content: content.update(vision={"reduce": {"method": "magic"}}),
        lambda content: content.update(version=2),
        lambda content: content.update(format="another"),
    ],
)
def test_a_damaged_file_is_refused(
    saved: tuple[Chat, Path], idle_engine: Any, edit: Callable[[dict[str, Any]], Any]
) -> None:
    """Guards files that others wrote: one clear error, whatever is wrong in them."""
    with pytest.raises(InputError):
        Chat.load(_edited(saved[1], edit), idle_engine)


def test_what_another_model_had_is_refused_by_name(saved: tuple[Chat, Path], idle_engine: Any) -> None:
    """Guards questions that fail one after the other: said at load, with a way on; that of a picture is no answer."""
    tokens = idle_engine.checkpoint.config.text.vocab_size, idle_engine.checkpoint.config.image_token_id
    for token in tokens:
        path = _edited(saved[1], lambda content, token=token: content["turns"][1].update(token_ids=[token]))
        with pytest.raises(InputError, match=rf"chat\.json: .* turn 2 holds token {token}"):
            Chat.load(path, idle_engine)
    path = _edited(path, lambda content: content["turns"][1].update(token_ids=[]))
    _edited(path, lambda content: content.update(vision={"fastv": {"layer": 99}}))
    with pytest.raises(InputError, match=r"chat\.json: .*layer=99"):
        Chat.load(path, idle_engine)
    assert Chat.load(path, idle_engine, vision=Vision()).ask("Sure?", sampling=_GREEDY)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_chat_is_named(idle_engine: Any, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.json: no saved chat"):
        Chat.load(path, idle_engine)
    with pytest.raises(InputError, match="missing"):
        Chat.load(tmp_path / "missing.json", idle_engine)


def test_pictures_in_a_file_keep_to_the_limits(saved: tuple[Chat, Path], load_vlm: Callable[..., Any]) -> None:
    with pytest.raises(ImageLimitError):
        Chat.load(saved[1], load_vlm(limits=Limits(max_image_pixels=100)))


def test_a_failed_save_leaves_the_old_file(
    saved: tuple[Chat, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chat, path = saved
    before = path.read_text()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("vlmfast.chat_file.json.dump", fail)
    with pytest.raises(InputError, match=r"chat\.json can not be written: disk full"):
        chat.save(path)
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match=r"no folder.*No such file"):
        chat.save(tmp_path / "no folder" / "chat.json")
    with pytest.raises(InputError, match="can not be written"):
        chat.save(tmp_path / "a\0b")

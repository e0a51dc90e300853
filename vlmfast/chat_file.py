"""Saved chats: plain JSON, each picture once, as a PNG in base64. Reading one runs nothing and opens nothing else."""

from __future__ import annotations

import base64
import io
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from vlmfast.errors import InputError, OptionError
from vlmfast.options import FastV, Overflow, Reduce, ToMe, Vision
from vlmfast.prompt import Message
from vlmfast.types import ImageInput

_FORMAT = "vlmfast chat"
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A question and its answer. The first `num_pending` pictures of the question had waited for it."""

    question: Message
    answer: Message
    num_pending: int

    def without_tokens(self) -> Turn:
        """The same with the answer as text alone."""
        return replace(self, answer=replace(self.answer, token_ids=()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatState:
    """What a chat is made of."""

    system: str | None
    overflow: Overflow
    vision: Vision | None
    turns: tuple[Turn, ...]
    pending: tuple[ImageInput, ...]
    token_space: str
    """Digest of what the answers' token ids mean."""


def write_chat(path: str | os.PathLike[str], state: ChatState) -> None:
    """Writes a chat; an existing file is replaced at once or not at all.

    Raises:
        InputError: the file can not be written.
    """
    pictures: dict[str, ImageInput] = {}
    for image in (*(image for turn in state.turns for image in turn.question.images), *state.pending):
        pictures.setdefault(image.digest, image)
    places = {digest: index for index, digest in enumerate(pictures)}
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "token_space": state.token_space,
        "system": state.system,
        "overflow": state.overflow.value,
        "vision": None if state.vision is None else asdict(state.vision),
        "images": [{"name": image.name, "png": _png(image)} for image in pictures.values()],
        "turns": [
            {
                "question": turn.question.text,
                "images": [places[image.digest] for image in turn.question.images],
                "num_pending": turn.num_pending,
                "answer": turn.answer.text,
                "token_ids": list(turn.answer.token_ids),
            }
            for turn in state.turns
        ],
        "pending": [places[image.digest] for image in state.pending],
    }
    target = Path(path)
    try:
        _write_whole(target, content)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{target} can not be written: {reason}; choose another file") from error


def _write_whole(target: Path, content: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, suffix=".tmp", delete=False) as file:
        try:
            json.dump(content, file)
            file.close()
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def read_chat(
    path: str | os.PathLike[str], load_images: Callable[[Sequence[bytes]], Sequence[ImageInput]]
) -> ChatState:
    """The chat in a file; `load_images` decodes its pictures and checks them.

    Raises:
        InputError: the file can not be read or is no saved chat.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{os.fspath(path)}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{os.fspath(path)}: no saved chat: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise InputError(f"{os.fspath(path)}: no saved chat")
    if content.get("version") != _VERSION:
        raise InputError(f"{os.fspath(path)}: a chat of version {content.get('version')}, this reads {_VERSION}")
    try:
        return _state(content, load_images)
    except (KeyError, IndexError, TypeError, ValueError, OptionError) as error:
        raise InputError(f"{os.fspath(path)}: a damaged chat: {type(error).__name__}: {error}") from error


def _state(content: dict[str, Any], load_images: Callable[[Sequence[bytes]], Sequence[ImageInput]]) -> ChatState:
    encoded = [base64.b64decode(_text(image["png"]), validate=True) for image in content["images"]]
    pictures = [
        replace(picture, name=_text(image["name"]))
        for picture, image in zip(load_images(encoded), content["images"], strict=True)
    ]

    def images(places: list[int]) -> tuple[ImageInput, ...]:
        return tuple(pictures[_count(place)] for place in places)

    return ChatState(
        system=None if content["system"] is None else _text(content["system"]),
        overflow=Overflow(content["overflow"]),
        vision=_vision(content.get("vision")),  # files of earlier versions have none
        turns=tuple(
            Turn(
                question=Message(role="user", text=_text(turn["question"]), images=images(turn["images"])),
                answer=Message(
                    role="assistant",
                    text=_text(turn["answer"]),
                    token_ids=tuple(_count(token) for token in turn["token_ids"]),
                ),
                num_pending=_count(turn["num_pending"]),
            )
            for turn in content["turns"]
        ),
        pending=images(content["pending"]),
        token_space=_text(content["token_space"]),
    )


def _vision(value: Any) -> Vision | None:
    if not isinstance(value, dict):
        return _options(Vision, value)
    kinds = {"tome": ToMe, "reduce": Reduce, "fastv": FastV}
    parts = {name: _options(kinds[name], part) if name in kinds else part for name, part in value.items()}
    vision: Vision | None = _options(Vision, parts)
    return vision


def _options(kind: Any, value: Any) -> Any:
    """The options of a kind by the names of their fields; None as it is."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TypeError(f"expected the parts of {kind.__name__}, got {value!r}")
    if unknown := value.keys() - {field.name for field in fields(kind)}:
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {type(value).__name__}")
    value.encode()  # half a character is a ValueError here, and none that names the file later
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"expected a whole number, got {value!r}")
    return value


def _png(image: ImageInput) -> str:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(image.pixels).save(out, "PNG", compress_level=1)  # higher levels take seconds for a photograph
    return base64.b64encode(out.getvalue()).decode()

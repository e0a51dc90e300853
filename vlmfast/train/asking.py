"""A loaded model as something to score: greedy answers, as any user gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

from vlmfast.prompt import Message
from vlmfast.types import ImageInput

if TYPE_CHECKING:
    from vlmfast.vlm import VLM


@dataclass(frozen=True, slots=True)
class Asker:
    """The two ways in which questions are asked."""

    vlm: VLM

    def ask(self, picture: Image.Image, prompt: str) -> str:
        return self.vlm.describe(picture, prompt).text

    def continue_chat(self, picture: Image.Image, before: tuple[tuple[str, str], ...], prompt: str) -> str:
        """The answer to `prompt` after these turns (prompt, answer), the first of which came with the picture."""
        messages = conversation(self.vlm.load_images(picture), before, prompt)
        answers = [chunk.answer for chunk in self.vlm.answer_messages(messages)]
        assert answers[-1] is not None
        return answers[-1].text


def conversation(images: tuple[ImageInput, ...], before: Sequence[tuple[str, str]], prompt: str) -> list[Message]:
    """`prompt` after these turns (prompt, answer), the pictures in the first."""
    messages: list[Message] = []
    for asked, told in before:
        messages.append(Message(role="user", text=asked, images=() if messages else images))
        messages.append(Message(role="assistant", text=told))
    return [*messages, Message(role="user", text=prompt, images=() if messages else images)]

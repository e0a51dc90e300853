"""A conversation about pictures: turns are kept, and each question is asked with all that came before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmfast.options import Sampling
from vlmfast.prompt import Message
from vlmfast.types import Answer, Chunk, ImageInput

if TYPE_CHECKING:
    from vlmfast.vlm import VLM, Images


class Chat:
    """Made by `VLM.chat`. A turn enters the history when its answer is complete; an abandoned one leaves no trace."""

    def __init__(self, vlm: VLM, *, images: tuple[ImageInput, ...] = (), system: str | None = None) -> None:
        self._vlm = vlm
        self._pending_images = images
        self._messages: list[Message] = [] if system is None else [Message(role="system", text=system)]

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns so far, oldest first."""
        return tuple(self._messages)

    def ask(self, text: str, images: Images = None, *, sampling: Sampling | None = None) -> Answer:
        """Asks the next question, with more pictures if given.

        Raises:
            InputError: a picture can not be used, or the conversation no longer fits the model's context.
        """
        answer = None
        for chunk in self.stream(text, images, sampling=sampling):
            answer = chunk.answer
        assert answer is not None
        return answer

    def stream(self, text: str, images: Images = None, *, sampling: Sampling | None = None) -> Iterator[Chunk]:
        """As `ask`, piece by piece; the last chunk carries the answer."""
        started = time.perf_counter()
        question = Message(role="user", text=text, images=self._pending_images + self._vlm.load_images(images))
        chunks = self._vlm.answer_messages([*self._messages, question], sampling=sampling, started=started)
        return self._record(question, chunks)

    def _record(self, question: Message, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            if chunk.answer is not None:
                self._messages += [question, Message(role="assistant", text=chunk.answer.text)]
                self._pending_images = ()
            yield chunk

"""A conversation about pictures: turns are kept, and each question is asked with all that came before."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmfast.chat_file import ChatState, Turn, read_chat, write_chat
from vlmfast.checks import given
from vlmfast.errors import ContextLengthError, InputError, OptionError
from vlmfast.image.identity import digest_of
from vlmfast.options import Overflow, Sampling, Vision
from vlmfast.prompt import Message
from vlmfast.spec.options import Drafting
from vlmfast.types import Answer, Chunk, ImageInput

if TYPE_CHECKING:
    from vlmfast.vlm import VLM, Images

_log = logging.getLogger(__name__)


class Chat:
    """Made by `VLM.chat`. A turn enters the history when its answer is complete; an abandoned one leaves no trace.

    The prompt of a turn begins with the tokens of the turn before, its answer as it was generated included, so that
    with a prefix cache a question costs its own words only.
    """

    def __init__(
        self,
        vlm: VLM,
        *,
        images: tuple[ImageInput, ...] = (),
        system: str | None = None,
        overflow: Overflow | str = Overflow.ERROR,
        vision: Vision | None = None,
        speculation: Drafting | None = None,
    ) -> None:
        vlm.check(vision=vision, speculation=speculation)
        self._vlm = vlm
        self._pending = images
        self._system = system
        self._turns: list[Turn] = []
        self._overflow = Overflow.of(overflow)
        self._vision = vision
        self._speculation = speculation

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns so far, oldest first."""
        return tuple(self._messages(self._turns))

    @property
    def pending_images(self) -> tuple[ImageInput, ...]:
        """Pictures that go with the next question."""
        return self._pending

    @property
    def vision(self) -> Vision:
        """How many visual tokens its questions are computed on."""
        return Vision() if self._vision is None else self._vision

    def add_images(self, images: Images) -> None:
        """Gives pictures to the next question.

        Raises:
            ImageError: one of them can not be used.
        """
        self._pending += self._vlm.load_images(images)

    def ask(self, text: str, images: Images = None, *, sampling: Sampling | None = None) -> Answer:
        """Asks the next question, with more pictures if given.

        Raises:
            InputError: a picture can not be used.
            ContextLengthError: the conversation no longer fits the model's context, see `Overflow`.
        """
        answer = None
        for chunk in self.stream(text, images, sampling=sampling):
            answer = chunk.answer
        assert answer is not None
        return answer

    def stream(self, text: str, images: Images = None, *, sampling: Sampling | None = None) -> Iterator[Chunk]:
        """As `ask`, piece by piece; the last chunk carries the answer."""
        started = time.perf_counter()
        sampling = given(Sampling, "sampling", sampling)
        num_pending = len(self._pending)
        question = Message(role="user", text=text, images=self._pending + self._vlm.load_images(images))
        turns, dropped = list(self._turns), []
        room = 1 if self._overflow is Overflow.ERROR else min(sampling.max_new_tokens, self._vlm.max_context // 4)
        while True:
            messages = [*self._messages(turns), question]
            try:
                chunks = self._vlm.answer_messages(
                    messages,
                    sampling=sampling,
                    vision=self._vision,
                    started=started,
                    room=room,
                    speculation=self._speculation,
                )
                break
            except ContextLengthError:
                if not turns and room > 1:
                    room = 1  # nothing is left to drop: what room there is must do
                    continue
                if self._overflow is Overflow.ERROR or not turns:
                    raise
                dropped.append(_least_missed(turns))
                turns.remove(dropped[-1])
        return self._record(question, num_pending, dropped, chunks, sampling)

    def undo(self) -> Message:
        """Takes back the last turn and returns its question; pictures that waited for it wait again.

        Raises:
            InputError: there is no turn.
        """
        if not self._turns:
            raise InputError("nothing to undo: the chat has no turn")
        turn = self._turns.pop()
        self._pending = turn.question.images[: turn.num_pending] + self._pending
        return turn.question

    def fork(self) -> Chat:
        """A chat with the same past that goes its own way from here."""
        other = Chat(
            self._vlm,
            images=self._pending,
            system=self._system,
            overflow=self._overflow,
            vision=self._vision,
            speculation=self._speculation,
        )
        other._turns = list(self._turns)
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the chat, pictures included, to a JSON file; an existing one is replaced at once or not at all."""
        state = ChatState(
            system=self._system,
            overflow=self._overflow,
            vision=self._vision,
            turns=tuple(self._turns),
            pending=self._pending,
            token_space=_token_space(self._vlm),
        )
        write_chat(path, state)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        vlm: VLM,
        *,
        vision: Vision | None = None,
        speculation: Drafting | None = None,
    ) -> Chat:
        """The chat in a file written by `save`. Another model than it was held with goes on from its texts.

        Its `vision` is that of the file, unless one is given (`Vision()` for all tokens). `speculation` is not in the
        file: give the same again to go on as before.

        Raises:
            InputError: the file can not be read, is no saved chat, or holds what this model does not have.
            ImageError: a picture in it can not be used within the model's `Limits`.
        """
        state = read_chat(path, vlm.load_images)
        same = state.token_space == _token_space(vlm)
        _check_fits(state, vlm, f"{os.fspath(path)}", tokens=same, vision=vision is None)
        chat = cls(
            vlm,
            images=state.pending,
            system=state.system,
            overflow=state.overflow,
            vision=state.vision if vision is None else vision,
            speculation=speculation,
        )
        chat._turns = [turn if same else turn.without_tokens() for turn in state.turns]
        return chat

    def _messages(self, turns: list[Turn]) -> list[Message]:
        system = [] if self._system is None else [Message(role="system", text=self._system)]
        return system + [message for turn in turns for message in (turn.question, turn.answer)]

    def _record(
        self, question: Message, num_pending: int, dropped: list[Turn], chunks: Iterator[Chunk], sampling: Sampling
    ) -> Iterator[Chunk]:
        for chunk in chunks:
            if chunk.answer is not None:
                if dropped:
                    _log.info("%d turns were dropped: the model's context is full", len(dropped))
                answer = self._answer_message(chunk.answer, sampling)
                kept = [turn for turn in self._turns if turn not in dropped]
                self._turns = [*kept, Turn(question=question, answer=answer, num_pending=num_pending)]
                self._pending = self._pending[num_pending:]
            yield chunk

    def _answer_message(self, answer: Answer, sampling: Sampling) -> Message:
        """The answer as a turn. Its tokens go beyond its text where a stop text cut it; then the text alone counts."""
        ids = answer.token_ids
        if sampling.stop:
            whole = str(self._vlm.checkpoint.tokenizer.decode(ids, skip_special_tokens=True))
            ids = () if any(stop in whole for stop in sampling.stop) else ids
        return Message(role="assistant", text=answer.text, token_ids=ids)


def _least_missed(turns: list[Turn]) -> Turn:
    """The oldest turn without a picture, or the oldest: later questions are about the pictures."""
    return next((turn for turn in turns if not turn.question.images), turns[0])


def _check_fits(state: ChatState, vlm: VLM, where: str, *, tokens: bool, vision: bool) -> None:
    """Raises InputError where a file's answers (`tokens`) or its `vision` are none that the model can have."""
    config = vlm.checkpoint.config
    for number, turn in enumerate(state.turns if tokens else (), start=1):
        for token in turn.answer.token_ids:
            if token >= config.text.vocab_size or token == config.image_token_id:
                raise InputError(
                    f"{where}: a damaged chat: the answer of turn {number} holds token {token}, which this model does "
                    "not write; empty its token_ids to go on from its text"
                )
    if vision:
        try:
            vlm.check(vision=state.vision)
        except OptionError as error:
            raise InputError(f"{where}: this model can not go on with it: {error}; or load it with a vision") from error


def _token_space(vlm: VLM) -> str:
    """Digest of what token ids mean to a model."""
    return digest_of(vlm.checkpoint.tokenizer.backend_tokenizer.to_str(), vlm.checkpoint.chat_template)

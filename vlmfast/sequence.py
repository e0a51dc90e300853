"""A request as the user made it, and the sequence that the engine makes of it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from vlmfast.cache.prefix import Match, Picture, Units
from vlmfast.options import Sampling, Vision
from vlmfast.prompt import Prompt
from vlmfast.prune.plan import Pruning
from vlmfast.spec.options import NO_SPECULATION, Speculation
from vlmfast.types import ImageInput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What is asked: a prompt, the pictures of its spans in order, and how to answer."""

    prompt: Prompt
    images: tuple[ImageInput, ...]
    sampling: Sampling
    salt: str = ""
    """Shares computed prefixes with requests of the same salt only."""
    speculation: Speculation = NO_SPECULATION
    room: int = 1
    """Tokens of answer that the context must have room for, or the request is refused."""
    vision: Vision = field(default_factory=Vision)
    """How the pictures' features are made and cut down."""
    pruning: Pruning | None = None
    """FastV of this prompt. It is computed in one pass, and shares no prefix: what it keeps depends on what follows."""


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """The engine's state of one request. Only the scheduler changes it.

    prompt ids            output ids
    |--------------------|---------|
    |-- num_cached --|                 keys and values were known before
    |---- num_computed ----|           keys and values exist for these tokens
    """

    seq_id: int
    request: Request
    max_tokens: int
    """Prompt and answer together may not grow beyond this."""
    status: Status = Status.WAITING
    page_id: int | None = None
    num_computed: int = 0
    num_cached: int = 0
    prefix: Match | None = None
    """The known prefix, from the first step until the sequence ends; None without a prefix cache."""
    output_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt.ids) + len(self.output_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt.ids)

    @property
    def max_draft_tokens(self) -> int:
        """Tokens that are worth drafting now: the last one of the answer never is."""
        if not self.request.speculation.is_on:
            return 0
        return min(self.request.speculation.max_draft_tokens, self.max_tokens - self.num_tokens - 1)

    @property
    def first_new_image(self) -> int:
        """Index of the first picture that is not in the known prefix. Those before need no encoding."""
        spans = self.request.prompt.spans
        return next((index for index, span in enumerate(spans) if span.start >= self.num_cached), len(spans))

    def units(self, end: int) -> Units:
        """The tokens 0 .. end - 1 as the prefix cache takes them, up to a picture that is cut or has no key."""
        units: list[int | Picture] = []
        position = 0
        for span in self.request.prompt.spans:
            if span.start >= end:
                break
            units += self.tokens(position, span.start)
            if span.end > end or not span.key:
                return tuple(units)
            ids = self.request.prompt.ids[span.start : span.end]
            units.append(Picture(key=span.key, ids=ids, reduce_id=span.reduce_id))
            position = span.end
        return (*units, *self.tokens(position, end))

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids start .. end - 1 of prompt and output together."""
        num_prompt = self.num_prompt_tokens
        prompt = self.request.prompt.ids[start:end] if start < num_prompt else ()
        return [*prompt, *self.output_ids[max(start - num_prompt, 0) : max(end - num_prompt, 0)]]

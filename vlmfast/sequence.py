"""A request as the user made it, and the sequence that the engine makes of it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from vlmfast.options import Sampling
from vlmfast.prompt import Prompt
from vlmfast.types import ImageInput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What is asked: a prompt, the pictures of its spans in order, and how to answer."""

    prompt: Prompt
    images: tuple[ImageInput, ...]
    sampling: Sampling


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
    |--- num_computed ---|             keys and values exist for these tokens
    """

    seq_id: int
    request: Request
    max_tokens: int
    """Prompt and answer together may not grow beyond this."""
    status: Status = Status.WAITING
    page_id: int | None = None
    num_computed: int = 0
    output_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt.ids) + len(self.output_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt.ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids start .. end - 1 of prompt and output together."""
        num_prompt = self.num_prompt_tokens
        prompt = self.request.prompt.ids[start:end] if start < num_prompt else ()
        return [*prompt, *self.output_ids[max(start - num_prompt, 0) : max(end - num_prompt, 0)]]

"""From a conversation to token ids: the checkpoint's chat template, pictures expanded, user text kept as text."""

from __future__ import annotations

import re
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from vlmfast.errors import ConfigError, InputError
from vlmfast.types import ImageInput
from vlmfast_models.geometry import TilePlan

_GUARDS = tuple(chr(code) for code in range(0xE000, 0xE100))
"""Private-use characters; one that occurs in no text of the conversation marks typed special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn: a role ("system", "user", "assistant"), its pictures, then its text."""

    role: str
    text: str
    images: tuple[ImageInput, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """The part of a prompt that stands for one picture, separators included: tokens start .. end - 1."""

    start: int
    end: int
    digest: str
    plan: TilePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids with the places of the pictures among them."""

    ids: tuple[int, ...]
    spans: tuple[ImageSpan, ...]

    @property
    def num_visual_tokens(self) -> int:
        return sum(span.plan.n_tokens for span in self.spans)


class PromptBuilder:
    """Builds prompts for one checkpoint.

    Args:
        tokenizer: a transformers fast tokenizer.
        chat_template: the checkpoint's jinja template.
        image_token: the special token that a template writes for a picture, and that stands for a visual token.
        placeholder: the text of a plan's visual tokens and separators (`Family.placeholder`).
    """

    def __init__(self, tokenizer: Any, chat_template: str, image_token: str, placeholder: Any) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template
        self._image_token = image_token
        self._placeholder = placeholder
        added = tokenizer.get_added_vocab()
        if image_token not in added:
            raise ConfigError(f"the tokenizer has no '{image_token}' token")
        self._added: dict[str, int] = dict(added)
        longest_first = sorted(self._added, key=len, reverse=True)
        self._added_pattern = re.compile("|".join(re.escape(token) for token in longest_first))

    def build(self, messages: SequenceOf[Message], plans: SequenceOf[TilePlan]) -> Prompt:
        """The prompt of a conversation, ending where the assistant's next turn begins.

        `plans` holds one plan for each picture of the messages, in order. A special token that a user typed stays
        text: it is split inside, so that no tokenizer rule can join it.

        Raises:
            InputError: the template wrote another number of pictures than there are.
        """
        images = [image for message in messages for image in message.images]
        guard = self._guard(messages)
        rendered = self._render(messages, guard)
        pieces = rendered.split(self._image_token)
        if len(pieces) - 1 != len(images) or len(plans) != len(images):
            raise InputError(
                f"the chat template made room for {len(pieces) - 1} pictures, {len(images)} were given; "
                "this model may take fewer"
            )
        ids: list[int] = []
        spans: list[ImageSpan] = []
        text = pieces[0]
        # A placeholder begins and ends with special tokens, so text on its two sides is tokenized apart anyway.
        for image, plan, following in zip(images, plans, pieces[1:], strict=True):
            ids += self._encode(text, guard)
            start = len(ids)
            ids += self._encode(self._placeholder(plan), guard)
            spans.append(ImageSpan(start=start, end=len(ids), digest=image.digest, plan=plan))
            text = following
        ids += self._encode(text, guard)
        return Prompt(ids=tuple(ids), spans=tuple(spans))

    def _guard(self, messages: SequenceOf[Message]) -> str:
        for guard in _GUARDS:
            if all(guard not in message.text for message in messages):
                return guard
        raise InputError("the text uses every private-use character from U+E000 to U+E0FF; remove one of them")

    def _render(self, messages: SequenceOf[Message], guard: str) -> str:
        def guarded(text: str) -> str:
            return self._added_pattern.sub(lambda match: match[0][0] + guard + match[0][1:], text)

        conversation = [
            {
                "role": message.role,
                "content": [
                    *({"type": "image"} for _ in message.images),
                    *([{"type": "text", "text": guarded(message.text)}] if message.text or not message.images else []),
                ],
            }
            for message in messages
        ]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation, chat_template=self._template, tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:  # a template is a program, and may raise anything
            raise InputError(f"the checkpoint's chat template refuses this conversation: {error}") from error

    def _encode(self, text: str, guard: str) -> list[int]:
        """Token ids of template text: added tokens by their id, what lies between them by the tokenizer."""
        ids: list[int] = []
        position = 0
        for match in self._added_pattern.finditer(text):
            ids += self._encode_plain(text[position : match.start()], guard)
            ids.append(self._added[match[0]])
            position = match.end()
        return ids + self._encode_plain(text[position:], guard)

    def _encode_plain(self, text: str, guard: str) -> list[int]:
        ids: list[int] = []
        for part in text.split(guard):
            if part:
                ids += self._tokenizer.encode(part, add_special_tokens=False)
        return ids

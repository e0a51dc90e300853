"""From a conversation to token ids: the checkpoint's chat template, pictures expanded, user text kept as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

from vlmfast.errors import ConfigError, InputError
from vlmfast.types import ImageInput
from vlmfast_models.geometry import TilePlan

_GUARDS = tuple(chr(code) for code in range(0xE000, 0xE100))
"""Private-use characters that occur in no text of the conversation: one marks typed special tokens, one stands for the
answers whose tokens are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn: a role ("system", "user", "assistant"), its pictures, then its text. `mixed` makes other orders."""

    role: str
    text: str
    images: tuple[ImageInput, ...] = ()
    token_ids: tuple[int, ...] = ()
    """Of an answer: the tokens that it was generated as, which need not be those its text is split into. Where the
    template writes the text as it is, the prompt repeats them, and so begins with all that was computed before."""
    parts: tuple[str | ImageInput, ...] = ()
    """Pieces of text and pictures where they are mixed; `text` and `images` hold the same."""

    @classmethod
    def mixed(cls, role: str, parts: Iterable[str | ImageInput]) -> Message:
        """A turn of text and pictures in this order."""
        pieces: list[str | ImageInput] = []
        for part in parts:
            if isinstance(part, str) and pieces and isinstance(pieces[-1], str):
                pieces[-1] += part  # one text, so that no special token is put together from two
            else:
                pieces.append(part)
        text = "".join(part for part in pieces if isinstance(part, str))
        images = tuple(part for part in pieces if not isinstance(part, str))
        return cls(role=role, text=text, images=images, parts=tuple(pieces))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """The part of a prompt that stands for one picture, separators included: tokens start .. end - 1."""

    start: int
    end: int
    digest: str
    plan: TilePlan
    key: str = ""
    """What the picture's visual tokens follow from, in hex: spans of one key have the same keys and values in one
    context. Empty: known by nothing, never reused."""
    reduce_id: str = ""
    """How its visual tokens were cut down (`vlmfast.prune.counts.reduce_id`); empty when they are whole."""
    counts: tuple[int, ...] | None = None
    """Tokens that were left of each run of `plan.runs`; None when they are whole."""

    @property
    def num_visual_tokens(self) -> int:
        """Visual tokens in the prompt."""
        return self.plan.n_tokens if self.counts is None else sum(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids with the places of the pictures among them."""

    ids: tuple[int, ...]
    spans: tuple[ImageSpan, ...]

    @property
    def num_visual_tokens(self) -> int:
        return sum(span.num_visual_tokens for span in self.spans)

    @property
    def num_skipped(self) -> int:
        """Visual tokens that were cut. Those left, and the text behind them, stay at their positions."""
        return sum(span.plan.n_tokens - span.num_visual_tokens for span in self.spans)


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
        self._added = {token for token in added if len(token) > 1}
        self._added_lengths = sorted({len(token) for token in self._added})
        begins = "".join(sorted({re.escape(token[0]) for token in self._added}))
        self._may_begin_added = re.compile(f"[{begins}]")
        self._never, self._may_fold = _never_typed(tokenizer)
        bos = tokenizer.bos_token_id
        self._bos = [bos] if bos is not None and tokenizer.encode("", add_special_tokens=True)[:1] == [bos] else []
        self._anchor = len(self._ids(image_token))
        self._takes_parts = self._template_takes_parts()

    def build(
        self, messages: SequenceOf[Message], plans: SequenceOf[TilePlan], keys: SequenceOf[str] | None = None
    ) -> Prompt:
        """The prompt of a conversation, ending where the assistant's next turn begins.

        `plans` (and `keys`) hold one for each picture of the messages, in order. A special token that a user typed
        stays text: it is split inside, so that no tokenizer rule can join it. So is what the tokenizer's normalizer
        would make one of (full-width letters under NFKC, capitals where it lowers them).

        The tokenizer's beginning-of-text token comes first, as the checkpoint's own processor has it, unless the
        template writes it.

        Raises:
            InputError: the template wrote another number of pictures than there are, or the text holds a character that
                the tokenizer can only read as a special token.
        """
        images = [image for message in messages for image in message.images]
        guard, slot = self._guards(messages)
        rendered, answers = self._with_slots(messages, self._render(messages, guard), guard, slot)
        placeholders = [self._placeholder(plan) for plan in plans]
        pieces = self._around_pictures(rendered, placeholders)
        ids = [] if self._bos and rendered.startswith(self._tokenizer.bos_token) else list(self._bos)
        spans: list[ImageSpan] = []

        def encode(text: str, *, start: bool = False) -> list[int]:
            first, *others = text.split(slot)
            return self._encode(first, guard, start=start) + [
                token for part in others for token in (*next(answers), *self._encode(part, guard))
            ]

        ids += encode(pieces[0], start=True)
        keys = keys or [""] * len(images)
        spanned = zip(images, plans, keys, placeholders, pieces[1:], strict=True)
        for image, plan, key, placeholder, following in spanned:
            start = len(ids)
            ids += encode(placeholder)
            spans.append(ImageSpan(start=start, end=len(ids), digest=image.digest, plan=plan, key=key))
            ids += encode(following)
        return Prompt(ids=tuple(ids), spans=tuple(spans))

    def _around_pictures(self, rendered: str, placeholders: list[str]) -> list[str]:
        """The text around the pictures, each of which is one image token or, where the template wrote it, the whole
        placeholder."""
        pieces = rendered.split(self._image_token)
        if len(pieces) - 1 == len(placeholders):
            return pieces
        whole, rest = [], rendered
        for placeholder in placeholders:
            before, found, rest = rest.partition(placeholder)
            whole.append(before if found else self._image_token)
        whole.append(rest)
        if any(self._image_token in piece for piece in whole):
            raise InputError(
                f"the chat template made room for {len(pieces) - 1} pictures, {len(placeholders)} were given; "
                "this model may take fewer"
            )
        return whole

    def _guards(self, messages: SequenceOf[Message]) -> tuple[str, str]:
        free = [guard for guard in _GUARDS if all(guard not in message.text for message in messages)]
        if len(free) < 2:
            raise InputError("the text uses every private-use character from U+E000 to U+E0FF; remove two of them")
        return free[0], free[1]

    def _with_slots(
        self, messages: SequenceOf[Message], rendered: str, guard: str, slot: str
    ) -> tuple[str, Iterator[tuple[int, ...]]]:
        """The rendered text with a slot in place of each answer whose tokens are known, and these tokens in order.

        Without slots where the template writes an answer otherwise than it was generated: cut, or not directly after
        what it opens a turn with. White space in between was generated, or the template alone wants it.
        """
        generated = [message for message in messages if message.token_ids]
        unchanged = rendered, iter(())
        if not generated:
            return unchanged
        marked = self._render([replace(one, text=slot) if one.token_ids else one for one in messages], guard)
        first, *others = marked.split(slot)
        texts = [self._guarded(message.text, guard) for message in generated]
        if len(others) != len(texts) or rendered != first + "".join(
            text + piece for text, piece in zip(texts, others, strict=True)
        ):
            return unchanged
        opening = self._opening(messages, guard)
        pieces = [first, *others]
        for index, piece in enumerate(pieces[:-1]):
            end = piece.rfind(opening) + len(opening)
            if not opening or opening not in piece or piece[end:].strip():
                return unchanged
            pieces[index] = piece[:end]
        return slot.join(pieces), iter([message.token_ids for message in generated])

    def _opening(self, messages: SequenceOf[Message], guard: str) -> str:
        """What the template ends a prompt with for the assistant to go on."""
        asked, opened = (self._render(messages, guard, generate=generate) for generate in (False, True))
        return opened[len(asked) :] if opened.startswith(asked) else ""

    def _guarded(self, text: str, guard: str) -> str:
        """The text with a guard inside all that would be read as an added token: behind its first character, or where
        it takes a normalizer to see one, in the middle of what holds it."""

        def begun(match: re.Match[str]) -> str:
            start = match.start()
            begins = any(text[start : start + length] in self._added for length in self._added_lengths)
            return match[0] + guard if begins else match[0]

        text = self._may_begin_added.sub(begun, text)
        return guard.join(self._apart(part, guard) for part in text.split(guard)) if self._may_fold else text

    def _apart(self, text: str, guard: str) -> str:
        """The text halved with guards until no part of it comes out as a special token."""
        wrong = next((token for token in self._encode(text, guard) if token in self._never), None)
        if wrong is None:
            return text
        if len(text) == 1:
            raise InputError(
                f"the text holds {text!r} (U+{ord(text):04X}), which this model's tokenizer reads as its special token "
                f"{self._never[wrong]!r}; leave it out or write it otherwise"
            )
        middle = len(text) // 2
        return self._apart(text[:middle], guard) + guard + self._apart(text[middle:], guard)

    def _render(self, messages: SequenceOf[Message], guard: str, *, generate: bool = True) -> str:
        conversation = [{"role": message.role, "content": self._content(message, guard)} for message in messages]
        try:
            return self._apply(conversation, generate=generate)
        except Exception as error:  # a template is a program, and may raise anything
            raise InputError(f"the checkpoint's chat template refuses this conversation: {error}") from error

    def _content(self, message: Message, guard: str) -> list[dict[str, str]] | str:
        """What a template gets of a turn: its parts or, if it takes one string, that, with each picture on a line."""
        parts = message.parts or (*message.images, *([message.text] if message.text or not message.images else []))
        texts = [self._guarded(part, guard) if isinstance(part, str) else None for part in parts]
        if self._takes_parts:
            return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts]
        return "".join(f"{self._image_token}\n" if text is None else text for text in texts)

    def _apply(self, conversation: list[dict[str, Any]], *, generate: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                conversation, chat_template=self._template, tokenize=False, add_generation_prompt=generate
            )
        )

    def _template_takes_parts(self) -> bool:
        """Whether a turn's content is a list of parts to this template, not a string as to those of text models."""

        def shown(content: list[dict[str, str]] | str) -> str:
            try:
                return self._apply([{"role": "user", "content": content}], generate=False)
            except Exception:  # a template is a program, and may raise anything
                return ""

        as_parts = shown([{"type": "text", "text": "x"}])
        return "'type'" not in as_parts and bool(as_parts or not shown("x"))

    def _encode(self, text: str, guard: str, *, start: bool = False) -> list[int]:
        """Token ids of template text, cut at guards. `start`: nothing but the beginning-of-text token comes before.

        Some tokenizers put a space before the first word of what they are given: text that follows something is given
        to them behind an image token.
        """
        ids: list[int] = []
        for index, part in enumerate(text.split(guard)):
            if part and start and index == 0:
                ids += self._ids(part)
            elif part:
                ids += self._ids(self._image_token + part)[self._anchor :]
        return ids

    def _ids(self, text: str) -> list[int]:
        """Token ids of text alone. Prompts that are too long are refused later, with a remedy: no warning here."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _never_typed(tokenizer: Any) -> tuple[dict[int, str], bool]:
    """The tokens that no text of a user may become, by id, and whether their spelling alone does not tell.

    It does not where a normalizer runs before tokens are looked for, and where one is a single character, inside which
    nothing can be split.
    """
    added = tokenizer.added_tokens_decoder
    never = {token_id: token for token_id, token in added.items() if len(token.content) > 1 or token.special}
    normalizes = tokenizer.backend_tokenizer.normalizer is not None
    may_fold = any(len(token.content) == 1 or (normalizes and token.normalized) for token in never.values())
    return {token_id: token.content for token_id, token in never.items()}, may_fold

"""From a conversation to what is computed: a prompt with room for the visual tokens left, and the turns FastV ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

from vlmfast.compose import check_layers
from vlmfast.errors import InputError
from vlmfast.options import Batching, FastV, Vision
from vlmfast.prompt import ImageSpan, Message, Prompt, PromptBuilder
from vlmfast.prune.counts import reduce_id
from vlmfast.prune.plan import Pruning, Turn
from vlmfast.vision import VisionEncoder
from vlmfast_models.config import ModelConfig


class PromptPlanner:
    """Plans the prompts of one loaded model; looks at sizes of pictures, and at pixels for keep="auto" only."""

    def __init__(self, vision: VisionEncoder, prompts: PromptBuilder, config: ModelConfig, batching: Batching) -> None:
        self._vision = vision
        self._prompts = prompts
        self._config = config
        self._batching = batching

    def check(self, vision: Vision) -> None:
        """Raises OptionError for what this model can do with no picture."""
        self._vision.check(vision)
        if vision.fastv is not None:
            check_layers(vision.fastv, self._config.text.num_layers)

    def prompt(self, messages: Sequence[Message], vision: Vision) -> Prompt:
        """The token ids that a conversation becomes, ending where the assistant's next turn begins.

        Raises:
            InputError: the chat template refuses the conversation, or the model can not do what `vision` asks for.
        """
        self.check(vision)
        return self._prompts_of(messages, vision, [len(messages)])[0]

    def pruning(self, messages: Sequence[Message], vision: Vision, prompt: Prompt) -> Pruning | None:
        """What FastV is to rank in the prompt of a conversation; None without FastV or pictures.

        Raises:
            InputError: the prompt does not fit one pass.
        """
        if vision.fastv is None or not prompt.spans:
            return None
        if len(prompt.ids) > self._batching.max_step_tokens:
            raise InputError(
                f"FastV computes a prompt in one pass; this one has {len(prompt.ids)} tokens, "
                f"Batching.max_step_tokens is {self._batching.max_step_tokens}; raise it, or ask without FastV"
            )
        ends = [index + 1 for index, message in enumerate(messages) if message.images]
        # The last turn's is the prompt itself: a single question is not read twice.
        earlier = [end for end in ends if end < len(messages)]
        turn_prompts = self._prompts_of(messages, vision, earlier) if earlier else []
        turn_prompts += [prompt] * (len(ends) - len(earlier))
        return pruning_of(prompt, turn_prompts, vision.fastv, self._config.image_token_id)

    def _prompts_of(self, messages: Sequence[Message], vision: Vision, ends: Sequence[int]) -> list[Prompt]:
        """The prompt of each beginning `messages[:end]` of a conversation."""
        images = [image for message in messages for image in message.images]
        plans = [self._vision.plan(image, vision, num_images=len(images)) for image in images]
        keys = [self._vision.key(image, plan, vision) for image, plan in zip(images, plans, strict=True)]
        counts = [self._vision.counts(image, plan, vision) for image, plan in zip(images, plans, strict=True)]
        prompts = []
        for end in ends:
            num_images = sum(len(message.images) for message in messages[:end])
            whole = self._prompts.build(messages[:end], plans[:num_images], keys[:num_images])
            reduction = reduce_id(vision.reduce)
            prompts.append(reduced_prompt(whole, counts[:num_images], reduction, self._config.image_token_id))
        return prompts


def reduced_prompt(
    prompt: Prompt, counts: Sequence[tuple[int, ...] | None], reduce_id: str, image_token_id: int
) -> Prompt:
    """The prompt with room for `counts` tokens of each run of each picture (None: all of them). Separators stay."""
    if all(count is None for count in counts):
        return prompt
    ids: list[int] = []
    spans: list[ImageSpan] = []
    position = 0
    for span, count in zip(prompt.spans, counts, strict=True):
        ids += prompt.ids[position : span.start]
        start = len(ids)
        inside = prompt.ids[span.start : span.end]
        ids += inside if count is None else _thinned(inside, span.plan.runs, count, image_token_id)
        spans.append(
            replace(span, start=start, end=len(ids), counts=count, reduce_id="" if count is None else reduce_id)
        )
        position = span.end
    ids += prompt.ids[position:]
    return Prompt(ids=tuple(ids), spans=tuple(spans))


def whole_positions(prompt: Prompt, places: Sequence[Sequence[int] | None], image_token_id: int) -> list[int]:
    """The position of every token of a reduced prompt: where it stands, or would stand, in the whole one.

    A network knows by position where in a picture a token lies; closing the gaps would move all that is left.

    Args:
        places: for each picture the place, among its whole visual tokens, of each one that is left; None where the
            positions inside it do not matter, because its keys are known.
    """
    positions: list[int] = []
    skipped = 0
    for span, known in zip(prompt.spans, places, strict=True):
        positions += range(len(positions) + skipped, span.start + skipped)
        counts = span.counts or span.plan.runs
        starts = [sum(span.plan.runs[:run]) for run in range(len(counts))]
        left = iter(
            known
            if known is not None
            else [start + n for start, count in zip(starts, counts, strict=True) for n in range(count)]
        )
        separators, run, inside = 0, 0, 0
        for at in range(span.start, span.end):
            if prompt.ids[at] != image_token_id:
                separators += 1
                whole = sum(span.plan.runs[:run])
                positions.append(span.start + skipped + whole + separators - 1)
                continue
            positions.append(span.start + skipped + next(left) + separators)
            inside += 1
            if inside == counts[run]:
                run, inside = run + 1, 0
        skipped += span.plan.n_tokens - span.num_visual_tokens
    return positions + list(range(len(positions) + skipped, len(prompt.ids) + skipped))


def pruning_of(prompt: Prompt, turn_prompts: Sequence[Prompt], fastv: FastV, image_token_id: int) -> Pruning:
    """What FastV is to rank: the visual tokens of each turn, by the last token of the prompt that ends with this turn.

    Args:
        turn_prompts: the prompt up to each turn with pictures, opened for its answer.

    Raises:
        InputError: the template writes the beginning of a conversation otherwise when more follows.
    """
    turns: list[Turn] = []
    position = 0
    for one in turn_prompts:
        end = len(one.ids)
        if prompt.ids[:end] != one.ids:
            raise InputError(
                "FastV ranks a turn's pictures by the prompt up to its answer, and this checkpoint's chat template "
                "writes earlier turns otherwise once a conversation goes on; ask without FastV, or in a new chat"
            )
        spans = [span for span in prompt.spans if position <= span.start < end]
        visual = [at for span in spans for at in range(span.start, span.end) if prompt.ids[at] == image_token_id]
        seed = zlib.crc32(repr((prompt.ids[:end], [span.digest for span in spans])).encode())
        turns.append(Turn(rank_at=end - 1, visual=tuple(visual), seed=seed))
        position = end
    return Pruning(turns=tuple(turns), steps=fastv.steps, rank=fastv.rank)


def _thinned(ids: Sequence[int], runs: tuple[int, ...], counts: tuple[int, ...], image_token_id: int) -> list[int]:
    """A picture's ids with only the first `counts` image tokens of each run."""
    left: list[int] = []
    run, inside = 0, 0
    for token in ids:
        if token != image_token_id:
            left.append(token)
            continue
        if inside < counts[run]:
            left.append(token)
        inside += 1
        if inside == runs[run]:
            run, inside = run + 1, 0
    assert run == len(runs) and inside == 0, "the placeholder and the plan disagree"
    return left

"""VLM: a loaded checkpoint that answers. Wires the parts; holds no algorithm."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from vlmfast.caches import ModelCaches
from vlmfast.captions import captions
from vlmfast.checkpoint import Checkpoint, read_checkpoint, resolve_folder
from vlmfast.checks import given
from vlmfast.device import check_vision_dtype, explain, resolve_device, resolve_dtype
from vlmfast.draft_model import load_draft_model
from vlmfast.engine import Engine
from vlmfast.errors import InputError
from vlmfast.image.load import ImageSource, is_image_source, load_image, load_images
from vlmfast.kv import within_memory
from vlmfast.options import Batching, Caching, Limits, Overflow, Sampling, Vision
from vlmfast.planner import PromptPlanner
from vlmfast.prompt import Message, Prompt, PromptBuilder
from vlmfast.quantized import load_weights
from vlmfast.runner import Runner
from vlmfast.scheduler import Scheduler
from vlmfast.sequence import Request
from vlmfast.spec.options import DEFAULT_DRAFTER, Drafting, Speculation
from vlmfast.spec.speculator import Speculator
from vlmfast.types import Answer, CaptionError, Chunk, ImageInput
from vlmfast.vision import VisionEncoder
from vlmfast_models.families import family
from vlmfast_models.layers import prepare_for_inference
from vlmfast_models.weights import allocate

if TYPE_CHECKING:
    from vlmfast.chat import Chat

_log = logging.getLogger(__name__)

Images: TypeAlias = "ImageSource | Sequence[ImageSource] | None"
"""A picture, several pictures for one question, or none."""


class VLM:
    """A vision-language model, loaded and ready. Make one with `from_pretrained`; share it between threads freely."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        limits: Limits,
        batching: Batching,
        caching: Caching,
        speculation: Speculation,
    ) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self.model = model  # the networks: vision, connector, decoder
        self.limits = limits
        self._batching = batching
        self._caching = caching
        self._speculation = speculation
        self._load_ms = 0.0
        """Taken by the first request."""
        caches = ModelCaches(checkpoint, model, caching, batching, device=device, dtype=dtype)
        self.counters = caches.counters
        self._pictures = caches.pictures
        self._vision = VisionEncoder(
            model,
            checkpoint.preprocess,
            device=device,
            dtype=dtype,
            max_tiles=batching.max_encode_tiles,
            fingerprint=caches.fingerprint,
            cache=caches.features,
        )
        draft_model = None
        if speculation.draft_model is not None:
            draft_model = load_draft_model(
                speculation.draft_model,
                checkpoint,
                device=device,
                dtype=dtype,
                quantization=model.decoder.quantization,
                max_tiles=batching.max_encode_tiles,
                caches=caches,
                target_model=model,
                target_vision=self._vision,
            )
        self._speculator = Speculator(
            speculation,
            barriers=frozenset({checkpoint.config.image_token_id}),
            ends=checkpoint.eos_token_ids,
            model=draft_model,
        )
        self._prompts = PromptBuilder(
            checkpoint.tokenizer, checkpoint.chat_template, model.image_token, model.placeholder
        )
        self._planner = PromptPlanner(self._vision, self._prompts, checkpoint.config, batching)
        max_context = checkpoint.config.text.max_positions
        self._engine = Engine(
            Scheduler(batching, caches.prefixes),
            Runner(model, self._vision, self._speculator, device=device, dtype=dtype, capacity=max_context),
            tokenizer=checkpoint.tokenizer,
            eos_token_ids=checkpoint.eos_token_ids,
            max_context=max_context,
        )

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str] | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        vision_dtype: str = "auto",
        revision: str | None = None,
        limits: Limits | None = None,
        batching: Batching | None = None,
        caching: Caching | Literal[False] | None = None,
        speculation: Drafting = DEFAULT_DRAFTER,
        progress: Callable[[int, int], None] | None = None,
    ) -> VLM:
        """Loads a checkpoint.

        Args:
            name_or_path: a checkpoint folder, or a Hugging Face hub name (downloaded once); None is the small model
                that comes with vlmfast.
            device: "auto", "cpu", "cuda" or "cuda:N".
            dtype: "auto", "float32", "bfloat16", "float16" (CUDA only), "int8" or "int4" (CPU only; lossy): the
                decoder's weights in so many bits (int4: its head in 8), everything else in bfloat16.
            vision_dtype: "auto" (as everything else) or "int8" (CPU only; lossy): weights and activations of the vision
                tower in int8, but for its patch embedding, norms and last block.
            revision: branch, tag or commit on the hub.
            limits: what a request may cost.
            batching: how much one step takes on.
            caching: what is kept of earlier work, for this process and the next; False keeps nothing.
            speculation: how tokens are drafted ahead: "auto", "lookup", "suffix", "off", or `Speculation`, which can
                also name a smaller model to draft with.
            progress: called as progress(tensors loaded, tensors in all).

        Raises:
            ModelError: the checkpoint is missing, incomplete, of another architecture, or does not match its weights.
            DeviceError: the device or dtype is not available.
        """
        started = time.perf_counter()
        speculation = Speculation.of(speculation).loadable()  # a wrong one is said at once
        limits, batching = given(Limits, "limits", limits), given(Batching, "batching", batching)
        keeping = Caching.off() if caching is False else given(Caching, "caching", caching)
        checkpoint = read_checkpoint(resolve_folder(name_or_path, revision=revision))
        torch_device = resolve_device(device)
        torch_dtype = resolve_dtype(dtype, checkpoint.stored_dtype, torch_device)
        checkpoint = replace(checkpoint, config=within_memory(checkpoint.config, torch_device, torch_dtype))
        check_vision_dtype(vision_dtype, torch_device)
        network = family(checkpoint.config.model_type)
        model = allocate(lambda: network(checkpoint.config), device=torch_device, dtype=torch_dtype)
        load_weights(model, checkpoint, keeping, dtype=dtype, vision_dtype=vision_dtype, progress=progress)
        prepare_for_inference(model)
        vlm = cls(
            checkpoint,
            model,
            device=torch_device,
            dtype=torch_dtype,
            limits=limits,
            batching=batching,
            caching=keeping,
            speculation=speculation,
        )
        vlm._load_ms = (time.perf_counter() - started) * 1e3
        return vlm

    @property
    def name(self) -> str:
        """The checkpoint folder's name."""
        return Path(self.checkpoint.folder).name

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.checkpoint.config.text.max_positions

    def describe(
        self,
        images: Images,
        prompt: str,
        *,
        sampling: Sampling | None = None,
        vision: Vision | None = None,
        speculation: Drafting | None = None,
    ) -> Answer:
        """Answers one question about a picture, or about several together.

        Args:
            images: a picture (see `load_image`), a list of them, or None (or an empty list) for a question about none.
            prompt: the question, plain text; special tokens typed in it stay text.
            sampling: how to answer; greedy by default.
            vision: compute on fewer visual tokens (lossy); all of them by default.
            speculation: how to draft for this answer; None is as the model was loaded.

        Raises:
            InputError: a picture, the prompt or an option can not be used; the message names it.
        """
        answer = None
        for chunk in self.stream(images, prompt, sampling=sampling, vision=vision, speculation=speculation):
            answer = chunk.answer
        assert answer is not None
        return answer

    def stream(
        self,
        images: Images,
        prompt: str,
        *,
        sampling: Sampling | None = None,
        vision: Vision | None = None,
        speculation: Drafting | None = None,
    ) -> Iterator[Chunk]:
        """As `describe`, handing out text as it is certain; the last chunk carries the answer.

        Bad input raises here, before the first chunk. Closing the iterator cancels the request.
        """
        started = time.perf_counter()
        message = Message(role="user", text=prompt, images=self.load_images(images))
        return self._submit([message], sampling, vision, started, speculation=speculation)

    def caption(
        self,
        images: Iterable[ImageSource],
        prompt: str = "Describe the picture.",
        *,
        sampling: Sampling | None = None,
        vision: Vision | None = None,
        speculation: Drafting | None = None,
    ) -> Iterator[Answer | CaptionError]:
        """Asks the same of each picture, several at a time; yields in input order.

        A picture that can not be answered yields a `CaptionError` in its place and harms no other. What would be wrong
        with every picture raises here: the prompt or an option.
        """
        self.check(prompt, sampling=sampling, vision=vision, speculation=speculation)
        if is_image_source(images):
            images = [images]  # one picture, not a row of letters, bytes or pixel rows
        if not isinstance(images, Iterable):
            raise InputError(f"caption takes pictures, one or many; got {type(images).__name__}")

        def submit(image: ImageInput) -> Iterator[Chunk]:
            message = Message(role="user", text=prompt, images=(image,))
            return self._submit([message], sampling, vision, time.perf_counter(), speculation=speculation)

        return captions(
            images,
            load=partial(load_image, limits=self.limits, known=self._pictures),
            submit=submit,
            max_running=self._batching.max_sequences,
            look_ahead=self._batching.max_sequences,
        )

    def chat(
        self,
        images: Images = None,
        *,
        system: str | None = None,
        overflow: Overflow | str = Overflow.ERROR,
        vision: Vision | None = None,
        speculation: Drafting | None = None,
    ) -> Chat:
        """A conversation that keeps its turns; `images` belong to the first question.

        `vision` and `speculation` hold for all turns.
        """
        from vlmfast.chat import Chat

        return Chat(
            self,
            images=self.load_images(images),
            system=system,
            overflow=overflow,
            vision=vision,
            speculation=speculation,
        )

    def answer_messages(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling | None = None,
        vision: Vision | None = None,
        started: float | None = None,
        room: int = 1,
        speculation: Drafting | None = None,
    ) -> Iterator[Chunk]:
        """Streams the assistant's next turn of a conversation; it is refused without room for so many tokens."""
        return self._submit(messages, sampling, vision, started or time.perf_counter(), room, speculation)

    def load_images(self, images: Images) -> tuple[ImageInput, ...]:
        """Decodes the pictures of one request, within the limits.

        Raises:
            ImageError: one of them can not be used; it is named.
            ImageLimitError: too many of them, one too large, or all together.
        """
        if images is None:
            return ()
        sources: list[Any] = list(images) if isinstance(images, (list, tuple)) else [images]
        return load_images(sources, limits=self.limits, known=self._pictures)

    def build_prompt(self, messages: Sequence[Message], vision: Vision | None = None) -> Prompt:
        """The token ids that a conversation becomes, ending where the assistant's next turn begins.

        Raises:
            InputError: the checkpoint's chat template refuses it, or the model can not do what `vision` asks for.
        """
        return self._planner.prompt(messages, given(Vision, "vision", vision))

    def check(
        self,
        prompt: str | None = None,
        *,
        sampling: Sampling | None = None,
        vision: Vision | None = None,
        speculation: Drafting | None = None,
    ) -> None:
        """Says what is wrong with a question, whatever its pictures; answers nothing.

        Raises:
            InputError: the prompt can not be asked, or this model can not do what an option asks for.
        """
        if prompt is not None:
            _check_text(prompt)
        given(Sampling, "sampling", sampling)
        self._planner.check(given(Vision, "vision", vision))
        self._drafting(speculation)

    def explain(self) -> str:
        """Which implementation each operation runs on, and why not a faster one."""
        return explain(self.model, self.device, self.dtype)

    def _submit(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None,
        vision: Vision | None,
        started: float,
        room: int = 1,
        speculation: Drafting | None = None,
    ) -> Iterator[Chunk]:
        _check_text(messages[-1].text)
        images = tuple(image for message in messages for image in message.images)
        vision = given(Vision, "vision", vision)
        prompt = self._planner.prompt(messages, vision)
        request = Request(
            prompt=prompt,
            images=images,
            sampling=given(Sampling, "sampling", sampling),
            salt=self._caching.salt,
            room=room,
            speculation=self._drafting(speculation),
            vision=vision,
            pruning=self._planner.pruning(messages, vision, prompt),
        )
        image_ms = (time.perf_counter() - started) * 1e3
        seq_id = self._engine.submit(request, started=started, image_ms=image_ms, load_ms=self._load_ms)
        self._load_ms = 0.0
        return self._engine.stream(seq_id)

    def _drafting(self, asked: Drafting | None) -> Speculation:
        return self._speculation if asked is None else self._speculation.request(asked)


def _check_text(text: object) -> None:
    """Raises InputError for what no tokenizer takes, and for nothing."""
    if not isinstance(text, str):
        raise InputError(f"the prompt must be text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the prompt holds half a character at position {error.start}; give valid Unicode") from error
    if not text.strip():
        raise InputError('the prompt is empty; ask something, for example "What is in the picture?"')

"""VLM: a loaded checkpoint that answers. Wires the parts; holds no algorithm."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from vlmfast.checkpoint import Checkpoint, read_checkpoint, resolve_folder
from vlmfast.device import resolve_device, resolve_dtype
from vlmfast.engine import Engine
from vlmfast.errors import ImageLimitError, InputError, VLMFastError
from vlmfast.image.load import ImageSource, load_image, source_name
from vlmfast.options import Batching, Limits, Sampling
from vlmfast.prompt import Message, PromptBuilder
from vlmfast.runner import Runner
from vlmfast.scheduler import Scheduler
from vlmfast.sequence import Request
from vlmfast.types import Answer, CaptionError, Chunk, ImageInput
from vlmfast.vision import VisionEncoder
from vlmfast_kernels.op import all_ops
from vlmfast_kernels.ops.linear import explain_linear
from vlmfast_models.families import family
from vlmfast_models.layers import prepare_for_inference
from vlmfast_models.weights import allocate, load_checkpoint

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
    ) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self.limits = limits
        self._batching = batching
        self._vision = VisionEncoder(
            model, checkpoint.preprocess, device=device, dtype=dtype, max_tiles=batching.max_encode_tiles
        )
        self._prompts = PromptBuilder(
            checkpoint.tokenizer, checkpoint.chat_template, model.image_token, model.placeholder
        )
        max_context = checkpoint.config.text.max_positions
        self._engine = Engine(
            Scheduler(batching),
            Runner(model, self._vision, device=device, dtype=dtype, capacity=max_context),
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
        revision: str | None = None,
        limits: Limits | None = None,
        batching: Batching | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> VLM:
        """Loads a checkpoint.

        Args:
            name_or_path: a checkpoint folder, or a Hugging Face hub name (downloaded once); None is the small model
                that comes with vlmfast.
            device: "auto", "cpu", "cuda" or "cuda:N".
            dtype: "auto", "float32", "bfloat16" or "float16" (CUDA only).
            revision: branch, tag or commit on the hub.
            limits: what a request may cost.
            batching: how much one step takes on.
            progress: called as progress(tensors loaded, tensors in all).

        Raises:
            ModelError: the checkpoint is missing, incomplete, of another architecture, or does not match its weights.
            DeviceError: the device or dtype is not available.
        """
        checkpoint = read_checkpoint(resolve_folder(name_or_path, revision=revision))
        torch_device = resolve_device(device)
        torch_dtype = resolve_dtype(dtype, checkpoint.stored_dtype, torch_device)
        network = family(checkpoint.config.model_type)
        model = allocate(lambda: network(checkpoint.config), device=torch_device, dtype=torch_dtype)
        load_checkpoint(model, checkpoint.folder, progress=progress)
        prepare_for_inference(model)
        return cls(
            checkpoint,
            model,
            device=torch_device,
            dtype=torch_dtype,
            limits=limits or Limits(),
            batching=batching or Batching(),
        )

    @property
    def name(self) -> str:
        """The checkpoint folder's name."""
        return Path(self.checkpoint.folder).name

    def describe(self, images: Images, prompt: str, *, sampling: Sampling | None = None) -> Answer:
        """Answers one question about a picture, or about several together.

        Args:
            images: a picture (see `load_image`), a list of them, or None (or an empty list) for a question about none.
            prompt: the question, plain text; special tokens typed in it stay text.
            sampling: how to answer; greedy by default.

        Raises:
            InputError: a picture or the prompt can not be used; the message names it.
        """
        answer = None
        for chunk in self.stream(images, prompt, sampling=sampling):
            answer = chunk.answer
        assert answer is not None
        return answer

    def stream(self, images: Images, prompt: str, *, sampling: Sampling | None = None) -> Iterator[Chunk]:
        """As `describe`, handing out text as it is certain; the last chunk carries the answer.

        Bad input raises here, before the first chunk. Closing the iterator cancels the request.
        """
        started = time.perf_counter()
        message = Message(role="user", text=prompt, images=self.load_images(images))
        return self._submit([message], sampling, started)

    def caption(
        self, images: Iterable[ImageSource], prompt: str = "Describe the picture.", *, sampling: Sampling | None = None
    ) -> Iterator[Answer | CaptionError]:
        """Asks the same of each picture, several at a time; yields in input order.

        A picture that can not be answered yields a `CaptionError` in its place and harms no other.
        """
        if isinstance(images, (str, bytes, os.PathLike, Image.Image, np.ndarray, ImageInput)):
            images = [images]  # one picture, not a row of letters, bytes or pixel rows
        pending: deque[tuple[str, Iterator[Chunk] | CaptionError]] = deque()
        for index, source in enumerate(images):
            name = source_name(source, index)
            pending.append((name, self._submit_caption(source, name, prompt, sampling)))
            if len(pending) >= self._batching.max_sequences:
                yield _fetch_caption(*pending.popleft())
        while pending:
            yield _fetch_caption(*pending.popleft())

    def chat(self, images: Images = None, *, system: str | None = None) -> Chat:
        """A conversation that keeps its turns; `images` belong to the first question."""
        from vlmfast.chat import Chat

        return Chat(self, images=self.load_images(images), system=system)

    def answer_messages(
        self, messages: Sequence[Message], *, sampling: Sampling | None = None, started: float | None = None
    ) -> Iterator[Chunk]:
        """Streams the assistant's next turn of a conversation."""
        return self._submit(messages, sampling, started or time.perf_counter())

    def load_images(self, images: Images) -> tuple[ImageInput, ...]:
        """Decodes the pictures of one request, within the limits.

        Raises:
            ImageError: one of them can not be used; it is named.
            ImageLimitError: too many of them, or one too large.
        """
        if images is None:
            return ()
        sources: list[Any] = list(images) if isinstance(images, (list, tuple)) else [images]
        if len(sources) > self.limits.max_images:
            raise ImageLimitError(
                f"{len(sources)} pictures in one request, the limit is {self.limits.max_images}; "
                "raise Limits(max_images=...)"
            )
        return tuple(load_image(source, limits=self.limits) for source in sources)

    def explain(self) -> str:
        """Which implementation each operation runs on, and why not a faster one."""
        lines = [op.explain(self.device, self.dtype) for op in all_ops().values()]
        return "\n".join([f"device {self.device}, dtype {self.dtype}", explain_linear(self.device, self.dtype), *lines])

    def _submit(self, messages: Sequence[Message], sampling: Sampling | None, started: float) -> Iterator[Chunk]:
        _check_text(messages[-1].text)
        if not messages[-1].text.strip():
            raise InputError('the prompt is empty; ask something, for example "What is in the picture?"')
        images = tuple(image for message in messages for image in message.images)
        plans = [self._vision.plan(image) for image in images]
        request = Request(prompt=self._prompts.build(messages, plans), images=images, sampling=sampling or Sampling())
        image_ms = (time.perf_counter() - started) * 1e3
        return self._engine.stream(self._engine.submit(request, started=started, image_ms=image_ms))

    def _submit_caption(
        self, source: ImageSource, name: str, prompt: str, sampling: Sampling | None
    ) -> Iterator[Chunk] | CaptionError:
        started = time.perf_counter()
        try:
            message = Message(role="user", text=prompt, images=(load_image(source, limits=self.limits),))
            return self._submit([message], sampling, started)
        except VLMFastError as error:
            return CaptionError(image=name, kind=error.code, message=str(error))


def _check_text(text: object) -> None:
    """Raises InputError for what no tokenizer takes."""
    if not isinstance(text, str):
        raise InputError(f"the prompt must be text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the prompt holds half a character at position {error.start}; give valid Unicode") from error


def _fetch_caption(name: str, pending: Iterator[Chunk] | CaptionError) -> Answer | CaptionError:
    """The finished answer of one picture. An error in it is its own row, whatever the kind (and is logged)."""
    if isinstance(pending, CaptionError):
        return pending
    try:
        answer = None
        for chunk in pending:
            answer = chunk.answer
        assert answer is not None
        return answer
    except Exception as error:
        _log.warning("captioning %s failed", name, exc_info=not isinstance(error, VLMFastError))
        code = error.code if isinstance(error, VLMFastError) else "internal"
        return CaptionError(image=name, kind=code, message=str(error))


_default: tuple[str | None, VLM] | None = None
"""The one piece of global state: the model behind `describe`, with the name it was asked for by."""


def describe(
    images: Images, prompt: str, *, model: VLM | str | os.PathLike[str] | None = None, sampling: Sampling | None = None
) -> Answer:
    """Answers a question about a picture: `print(vlmfast.describe("dog.png", "What is in the picture?"))`.

    Args:
        images: a path, bytes, data URL, PIL picture, numpy array, or a list of these (one question over all of them).
        prompt: the question.
        model: a loaded `VLM`, a checkpoint folder or hub name (kept loaded until another is named), or None for the
            small model that comes with vlmfast.
        sampling: how to answer; greedy by default.

    Raises:
        VLMFastError: see `VLM.describe` and `VLM.from_pretrained`.
    """
    global _default
    if isinstance(model, VLM):
        return model.describe(images, prompt, sampling=sampling)
    name = None if model is None else os.fspath(model)
    if _default is None or _default[0] != name:
        _default = (name, VLM.from_pretrained(name))
    vlm = _default[1]
    return vlm.describe(images, prompt, sampling=sampling)

"""transformers' side: the processor and the networks of a checkpoint folder, as that library makes them.

This is the one module that runs networks of transformers; nothing of the product's answers passes through it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vlmfast.errors import UnsupportedModelError
from vlmfast.types import ImageInput
from vlmfast.verify.taps import See, decoder_taps, vision_taps


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How transformers' networks of a `model_type` take the tiles of the pictures of one prompt."""

    padded: bool
    """`pixel_values` is [pictures, most tiles, C, S, S], filled up with zeros; else [all tiles, C, S, S]."""
    batched: bool = False
    """One more dimension in front, for the prompts of a batch."""
    global_first: bool = False
    """A picture's global frame comes before its other tiles; ours comes last."""
    extra: Callable[[Sequence[ImageInput]], dict[str, Tensor]] = lambda images: {}
    """What else they take."""

    def pixel_values(self, pictures: Sequence[Tensor]) -> Tensor:
        """Our tiles [P, C, S, S] of each picture in their form."""
        theirs = [torch.roll(tiles, 1, 0) for tiles in pictures] if self.global_first else list(pictures)
        if self.padded:
            return nn.utils.rnn.pad_sequence(theirs, batch_first=True)
        return torch.cat(theirs)[None] if self.batched else torch.cat(theirs)

    def our_order(self, tiles: Tensor, counts: Sequence[int]) -> Tensor:
        """Their tiles [P, ...] of all pictures (`counts` of each) in our order; unchanged if the numbers differ."""
        if not self.global_first or sum(counts) != len(tiles):
            return tiles
        return torch.cat([torch.roll(picture, -1, 0) for picture in tiles.split(list(counts))])


def _sizes(images: Sequence[ImageInput]) -> dict[str, Tensor]:
    """(height, width) of each picture as it came."""
    return {"image_sizes": torch.tensor([[image.height, image.width] for image in images])}


LAYOUTS: dict[str, Layout] = {
    "idefics3": Layout(padded=False, batched=True),
    "smolvlm": Layout(padded=False, batched=True),
    "llava": Layout(padded=False),
    "llava_next": Layout(padded=True, global_first=True, extra=_sizes),
    "llava_onevision": Layout(
        padded=True,
        global_first=True,
        extra=lambda images: _sizes(images) | {"batch_num_images": torch.tensor([len(images)])},
    ),
}
"""One for each family of `vlmfast_models.families.FAMILIES`."""


class Processor:
    """transformers' processor of a folder: its text, ids and pixels for a question.

    Raises:
        ProcessorMissing: it can not be built here; the message says why.
    """

    def __init__(self, folder: Path, model_type: str) -> None:
        self.processor = _load_processor(folder, model_type)

    def inputs(self, images: Sequence[Image.Image], question: str) -> dict[str, Tensor]:
        """`input_ids` [1, T], with pictures `pixel_values`, and what else the networks take."""
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": question}]
        return dict(
            self.processor.apply_chat_template(
                [{"role": "user", "content": content}],
                chat_template=self.processor.chat_template or self.processor.tokenizer.chat_template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        )


class ProcessorMissing(Exception):
    """transformers can not build the checkpoint's processor in this environment."""


def _load_processor(folder: Path, model_type: str) -> Any:
    import transformers

    # Pillow's resampling is the checkpoint's own; torchvision's differs by grey levels and may not be installed.
    options = {"trust_remote_code": False, "backend": "pil"}
    try:
        processor = transformers.AutoProcessor.from_pretrained(folder, **options)
    except Exception as error:  # missing packages and unreadable files raise whatever they like
        try:
            processor = _without_video(transformers, model_type).from_pretrained(folder, **options)
        except Exception:
            raise ProcessorMissing(" ".join(str(error).split()) or type(error).__name__) from error
    _complete(processor, transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False), folder)
    return processor


def _without_video(transformers: Any, model_type: str) -> Any:
    """The processor class of a type that takes videos too, without that part, which needs torchvision."""
    if model_type == "smolvlm":
        return transformers.Idefics3Processor  # writes the same ids and tiles; SmolVLM's own wants num2words as well
    full = getattr(transformers, transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES[model_type])
    parts = [part for part in full.get_attributes() if part != "video_processor"]
    return type(full.__name__, (full,), {"get_attributes": classmethod(lambda cls: parts), "video_processor": None})


def _complete(processor: Any, config: Any, folder: Path) -> None:
    """Sets what LLaVA's processors need to know of config.json where their own file, absent in old checkpoints, does
    not say it: transformers leaves that to its user."""
    file, vision = folder / "processor_config.json", config.vision_config
    said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    needed = {
        "patch_size": vision.patch_size,
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", None),
        "num_additional_image_tokens": int(vision.model_type == "clip_vision_model"),  # the class token
        "num_image_tokens": (vision.image_size // vision.patch_size) ** 2,
        "vision_aspect_ratio": getattr(config, "vision_aspect_ratio", None),
    }
    for name, value in needed.items():
        if hasattr(processor, name) and name not in said:
            setattr(processor, name, value)


class Networks:
    """transformers' networks of a folder.

    Raises:
        UnsupportedModelError: this transformers has no class for it, or can not load it.
    """

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        import transformers

        try:
            with _no_bars():
                model = transformers.AutoModelForImageTextToText.from_pretrained(
                    folder, dtype=dtype, trust_remote_code=False
                )
        except (ValueError, KeyError, ImportError, AttributeError, OSError) as error:
            raise UnsupportedModelError(
                f"{folder}: transformers {transformers.__version__} can not load it to compare with: {error}"
            ) from error
        self.model = model.to(device).eval()
        self._device, self._dtype = device, dtype
        self.model_type = str(model.config.model_type)
        if self.model_type not in LAYOUTS:
            raise UnsupportedModelError(
                f"how transformers' '{self.model_type}' takes pictures is not known here; known: "
                f"{', '.join(sorted(LAYOUTS))}"
            )
        self.layout = LAYOUTS[self.model_type]
        self._vision, self._decoder = model.get_encoder(modality="image"), model.get_decoder()
        others = [module for module in model.base_model.children() if module not in (self._vision, self._decoder)]
        self._connector = others[0] if others else None

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer of `generate`."""
        ids = self.model.generation_config.eos_token_id
        return frozenset() if ids is None else frozenset(ids if isinstance(ids, list) else [ids])

    @torch.inference_mode()
    def run(
        self,
        ids: Sequence[int],
        pixels: Sequence[Tensor],
        images: Sequence[ImageInput],
        see: See,
    ) -> Tensor:
        """Logits [T, V] of a whole sequence, computed from our ids and our pixels.

        `see` gets every stage as it passes, under the names of `vlmfast.verify.taps`.
        """
        inputs: dict[str, Tensor] = {"input_ids": torch.tensor([ids], device=self._device)}
        if pixels:
            inputs["pixel_values"] = self.layout.pixel_values(pixels).to(self._device, self._dtype)
            inputs |= self.layout.extra(images)
        counts = [len(tiles) for tiles in pixels]

        def see_tiles(name: str, seen: Tensor) -> None:
            see(name, self.layout.our_order(seen, counts))

        with vision_taps(self._vision, self._connector, see_tiles), decoder_taps(self._decoder, see):
            logits: Tensor = self.model(**inputs, use_cache=False).logits[0]
        return logits


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keeps transformers' own progress bars off the terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def pixel_tiles(pixel_values: Tensor) -> Tensor:
    """All tiles [P, C, S, S] of a processor's `pixel_values`, in order, without the zeros it fills batches up with."""
    tiles = pixel_values.reshape(-1, *pixel_values.shape[-3:])
    return tiles[tiles.flatten(1).any(1)]

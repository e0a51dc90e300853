"""Preprocessing against transformers' own image processors, on the photographs of assets/photos, at equal pixels.

One round makes every photograph's tiles once: decoded picture in, normalised tiles out. The sizes are those of the
checkpoints on the hub; nothing of a network runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from side_by_side import Comparison, Options, alternate, parse_options, prepare, report

_PHOTOS = Path(__file__).resolve().parents[1] / "assets" / "photos"
_NEXT = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_ONEVISION = [[384 * rows, 384 * cols] for rows in range(1, 7) for cols in range(1, 7)]
_CLIP = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's image processor with the settings of one of its checkpoints."""

    key: str
    title: str
    model_type: str
    processor: str
    settings: dict[str, Any]
    patches_per_side: int


FAMILIES = (
    Family(
        key="preprocess_x",
        title="SmolVLM, 2048 px, tiles of 512",
        model_type="idefics3",
        processor="Idefics3ImageProcessorPil",
        settings={
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        patches_per_side=32,
    ),
    Family(
        key="preprocess_llava_x",
        title="LLaVA-1.5, 336 px",
        model_type="llava",
        processor="LlavaImageProcessorPil",
        settings=_CLIP,
        patches_per_side=24,
    ),
    Family(
        key="preprocess_llava_next_x",
        title="LLaVA-NeXT, tiles of 336",
        model_type="llava_next",
        processor="LlavaNextImageProcessorPil",
        settings={**_CLIP, "image_grid_pinpoints": _NEXT},
        patches_per_side=24,
    ),
    Family(
        key="preprocess_llava_onevision_x",
        title="LLaVA-OneVision, tiles of 384",
        model_type="llava_onevision",
        processor="LlavaOnevisionImageProcessorPil",
        settings={"size": {"height": 384, "width": 384}, "image_grid_pinpoints": _ONEVISION},
        patches_per_side=27,
    ),
)


def contenders(family: Family) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Ours (of an ImageInput) and theirs (of a Pillow picture), each giving float32 tiles [P, 3, S, S]."""
    import transformers

    from vlmfast.image.preprocess import preprocess
    from vlmfast_models.config import PreprocessConfig
    from vlmfast_models.geometry import idefics3_plan, llava_next_plan, llava_plan

    processor = getattr(transformers, family.processor)(**family.settings)
    config = PreprocessConfig.from_hf(processor.to_dict(), model_type=family.model_type)
    side = family.patches_per_side

    def plan(width: int, height: int) -> Any:
        if family.model_type == "idefics3":
            return idefics3_plan(width, height, config, 64)
        if family.model_type == "llava":
            return llava_plan(width, height, config, side**2)
        most = 9 if family.model_type == "llava_onevision" else None
        return llava_next_plan(width, height, config, side**2, patches_per_side=side, max_grid_tiles=most)

    def ours(image: Any) -> Any:
        return preprocess(image, plan(image.width, image.height), config).pixels

    def theirs(picture: Any) -> Any:
        tiles = processor([[picture]], return_tensors="pt")["pixel_values"][0]
        return tiles[None] if tiles.ndim == 3 else tiles

    return ours, theirs


def compare(family: Family, rounds: int) -> Comparison:
    """Checks a family's pixels on every photograph, then times both."""
    import numpy as np
    from PIL import Image

    from vlmfast.image.load import load_image

    pictures = [Image.open(file).convert("RGB") for file in sorted(_PHOTOS.glob("*.jpg"))]
    images = [load_image(np.asarray(picture)) for picture in pictures]
    ours, theirs = contenders(family)
    worst, num_tiles = 0.0, 0
    for image, picture in zip(images, pictures, strict=True):
        expected = theirs(picture)
        if "image_grid_pinpoints" in family.settings:
            expected = expected.roll(-1, 0)  # the global frame, which they put first
        got = ours(image)
        if got.shape != expected.shape:
            raise SystemExit(f"{family.title}: {list(got.shape)} tiles, transformers makes {list(expected.shape)}")
        worst = max(worst, float((got - expected).abs().max()))
        num_tiles += len(got)
    if worst > 1e-4:
        raise SystemExit(f"{family.title}: pixels differ by {worst}")

    def timed(make: Callable[[Any], Any], inputs: list[Any]) -> Callable[[int], float]:
        def sample(_: int) -> float:
            started = time.perf_counter()
            for one in inputs:
                make(one)
            return (time.perf_counter() - started) * 1e3

        return sample

    times = alternate(timed(ours, images), timed(theirs, pictures), rounds=rounds)
    check = f"{len(pictures)} photographs, {num_tiles} tiles, largest difference {worst:.1e}"
    return Comparison(key=family.key, title=family.title, ours=times[0], theirs=times[1], check=check)


def main(options: Options) -> None:
    """Times every family."""
    prepare(options)
    rounds = options.rounds or (2 if options.quick else 15)
    report([compare(family, rounds) for family in FAMILIES], (), options)


if __name__ == "__main__":
    main(parse_options(__doc__.split("\n", 1)[0]))

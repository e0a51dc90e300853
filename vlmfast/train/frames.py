"""Scenes rendered ahead: the 256-pixel frames exactly as the model sees them, and a label for each patch.

A folder holds memory-mapped arrays, so that training never waits for drawing and never holds all frames in memory.
Frame i is scene `first + i * step` of its key; the scene itself is cheap and is sampled again where it is needed.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlmfast.train.render import Rendering, render
from vlmfast.train.scenes import Kind, Scene, Split, Style, Thing, sample_scene
from vlmfast.train.vocabulary import COLOURS, SHAPES, SIGN_CHARACTERS, SIGN_WORDS, sticker_names
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.geometry import idefics3_plan

LABELS = ("thing", "colour", "character", "word")
IGNORED = 255
"""Label of a patch that a head should not learn from."""

_COVERED = 0.20
_BARE = 0.05
_CHARACTER_COVERED = 0.30


def num_classes() -> dict[str, int]:
    """Classes of each label; class 0 of `thing` is the background, of `character` a patch between characters."""
    return {
        "thing": 1 + len(sticker_names()) + len(SHAPES) + 1,
        "colour": len(COLOURS),
        "character": 1 + len(SIGN_CHARACTERS),
        "word": len(SIGN_WORDS),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSet:
    """Which scenes a folder of frames holds."""

    split: Split
    seed: int
    count: int
    style: Style
    step: int = 1
    """2 takes one of each pair of twins."""

    def scene(self, position: int) -> Scene:
        return sample_scene(self.seed, position * self.step, split=self.split, style=self.style)

    def describe(self) -> str:
        """A text that differs whenever the frames would."""
        return json.dumps({**asdict(self), "split": self.split.value}, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """An open folder: pixels [N, side, side, 3] and one [N, rows, columns] array of uint8 for each label."""

    members: FrameSet
    pixels: npt.NDArray[np.uint8]
    labels: dict[str, npt.NDArray[np.uint8]]

    def first(self, count: int) -> Frames:
        """The first frames only; nothing is copied."""
        return Frames(
            members=self.members,
            pixels=self.pixels[:count],
            labels={name: values[:count] for name, values in self.labels.items()},
        )


def open_frames(
    folder: Path, members: FrameSet, preprocess: PreprocessConfig, patch_size: int, *, workers: int = 2
) -> Frames:
    """The frames of `members`, drawn into `folder` unless they already lie there."""
    stamp = folder / "frames.json"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != members.describe():
        folder.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        _draw_all(folder, members, preprocess, patch_size, workers)
        stamp.write_text(members.describe(), encoding="utf-8")
    return Frames(
        members=members,
        pixels=np.load(folder / "pixels.npy", mmap_mode="r"),
        labels={name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in LABELS},
    )


def model_frame(picture: Image.Image, preprocess: PreprocessConfig) -> Image.Image:
    """The picture after the checkpoint's two resizes; for pictures that stay one frame."""
    plan = idefics3_plan(picture.width, picture.height, preprocess, tokens_per_tile=0)
    if plan.num_tiles != 1:
        raise ValueError(
            f"a {picture.width}x{picture.height} scene becomes {plan.num_tiles} tiles; training expects one"
        )
    resample = Image.Resampling(preprocess.resample)
    return picture.resize(plan.resized, resample).resize(plan.canvas, resample)


def patch_labels(scene: Scene, rendering: Rendering, side: int, patch_size: int) -> dict[str, npt.NDArray[np.uint8]]:
    """One [rows, columns] array for each of `LABELS`."""
    owners, coverage = _majority(_patches(rendering.owners, side, patch_size), len(scene.things))
    owners = np.where(coverage >= _COVERED, owners, 0)
    unsure = (coverage < _COVERED) & (coverage > _BARE)
    rows = [_thing_labels(None, scene.background), *(_thing_labels(thing, scene.background) for thing in scene.things)]
    table = np.array(rows, dtype=np.uint8)[owners]  # [rows, columns, 3]
    table[unsure] = IGNORED
    characters, coverage = _majority(_patches(rendering.characters, side, patch_size), len(SIGN_CHARACTERS))
    characters = np.where(coverage >= _CHARACTER_COVERED, characters, 0)
    on_sign = table[..., 2] != IGNORED
    return {
        "thing": table[..., 0],
        "colour": table[..., 1],
        "word": table[..., 2],
        "character": np.where(on_sign, characters, IGNORED).astype(np.uint8),
    }


def _thing_labels(thing: Thing | None, background: str) -> tuple[int, int, int]:
    """(thing, colour, word) classes of a patch that shows the thing, or nothing."""
    if thing is None:
        return 0, COLOURS.index(background), IGNORED
    num_stickers = len(sticker_names())
    if thing.kind is Kind.STICKER:
        return 1 + sticker_names().index(thing.name), IGNORED, IGNORED
    if thing.kind is Kind.SHAPE:
        return 1 + num_stickers + SHAPES.index(thing.shape or ""), COLOURS.index(thing.colour or ""), IGNORED
    return 1 + num_stickers + len(SHAPES), IGNORED, SIGN_WORDS.index(thing.text or "")


def _patches(pixel_map: npt.NDArray[np.uint8], side: int, patch_size: int) -> npt.NDArray[np.uint8]:
    """The map at the frame's size, cut into patches: [rows, columns, pixels of the patch]."""
    frame = np.asarray(Image.fromarray(pixel_map).resize((side, side), Image.Resampling.NEAREST))
    cells = side // patch_size
    return frame.reshape(cells, patch_size, cells, patch_size).swapaxes(1, 2).reshape(cells, cells, patch_size**2)


def _majority(patches: npt.NDArray[np.uint8], num_values: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """The most frequent value from 1 up in each patch, and the part of the patch it covers."""
    present = [value for value in np.unique(patches) if 0 < value <= num_values]
    if not present:
        return np.zeros(patches.shape[:2], np.intp), np.zeros(patches.shape[:2])
    shares = np.stack([(patches == value).mean(axis=-1) for value in present])
    return np.array(present, dtype=np.intp)[shares.argmax(axis=0)], shares.max(axis=0)


def _draw_all(folder: Path, members: FrameSet, preprocess: PreprocessConfig, patch_size: int, workers: int) -> None:
    side = preprocess.tile_size
    cells = side // patch_size
    shapes = {"pixels": (members.count, side, side, 3)} | dict.fromkeys(LABELS, (members.count, cells, cells))
    for name, shape in shapes.items():
        np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.uint8, shape=shape)
    jobs = [(folder, members, preprocess, patch_size, part) for part in _parts(members.count, 64)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for _ in pool.imap_unordered(_draw_part, jobs):
            pass


def _parts(count: int, part: int) -> Iterator[range]:
    for start in range(0, count, part):
        yield range(start, min(start + part, count))


def _draw_part(job: tuple[Path, FrameSet, PreprocessConfig, int, range]) -> None:
    folder, members, preprocess, patch_size, positions = job
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r+") for name in ("pixels", *LABELS)}
    for position in positions:
        scene = members.scene(position)
        rendering = render(scene)
        arrays["pixels"][position] = np.asarray(model_frame(rendering.picture, preprocess))
        for name, values in patch_labels(scene, rendering, preprocess.tile_size, patch_size).items():
            arrays[name][position] = values

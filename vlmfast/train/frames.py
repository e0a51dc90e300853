"""Scenes rendered ahead: their frames exactly as the model sees them (tiles, then the global one), and a label for each
patch.

A folder holds memory-mapped arrays, so that training never waits for drawing and never holds all frames in memory.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlmfast.image.load import load_image
from vlmfast.image.preprocess import preprocess
from vlmfast.train.render import Rendering
from vlmfast.train.scenes import Kind, Scene, Thing
from vlmfast.train.sources import Source
from vlmfast.train.vocabulary import CHARACTERS, COLOURS, SHAPES, SIGN_WORDS, sticker_names
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.geometry import TilePlan, idefics3_plan

GRID = (2, 2)
"""Rows and columns of tiles of every training picture."""
LABELS = ("thing", "colour", "character", "word")
IGNORED = 255
"""Label of a patch that a head should not learn from."""

_COVERED = 0.20
_BARE = 0.05
_CHARACTER_COVERED = 0.30
_PLAIN, _LETTERED = 0, 1


def num_classes() -> dict[str, int]:
    """Classes of each label; class 0 of `thing` is the background, of `character` a patch between characters."""
    return {
        "thing": 1 + len(sticker_names()) + len(SHAPES) + 1,
        "colour": len(COLOURS),
        "character": 1 + len(CHARACTERS),
        "word": len(SIGN_WORDS),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """An open folder: pixels [N, F, side, side, 3] and one [N, F, rows, columns] array of uint8 for each label.

    The F frames of a picture are the tiles of `plan` row by row and the global one; all pictures have the same grid.
    """

    source: Source
    folder: Path
    plan: TilePlan
    pixels: npt.NDArray[np.uint8]
    labels: dict[str, npt.NDArray[np.uint8]]

    def first(self, count: int) -> Frames:
        """The first frames only; nothing is copied."""
        return Frames(
            source=self.source,
            folder=self.folder,
            plan=self.plan,
            pixels=self.pixels[:count],
            labels={name: values[:count] for name, values in self.labels.items()},
        )

    def single(self) -> Frames:
        """Every frame as a picture of its own, [N * F, 1, ...]: for what looks at tiles alone. Nothing is copied."""
        return Frames(
            source=self.source,
            folder=self.folder,
            plan=self.global_plan,
            pixels=self.pixels.reshape(-1, 1, *self.pixels.shape[2:]),
            labels={name: values.reshape(-1, 1, *values.shape[2:]) for name, values in self.labels.items()},
        )

    def whole(self) -> Frames:
        """The global frame of every picture alone, [N, 1, ...]. Nothing is copied."""
        return Frames(
            source=self.source,
            folder=self.folder,
            plan=self.global_plan,
            pixels=self.pixels[:, -1:],
            labels={name: values[:, -1:] for name, values in self.labels.items()},
        )

    @property
    def global_plan(self) -> TilePlan:
        """The plan of a picture that shows its global frame only."""
        return replace(self.plan, rows=0, cols=0)


def open_frames(
    folder: Path, source: Source, preprocessing: PreprocessConfig, patch_size: int, *, workers: int = 2
) -> Frames:
    """The frames of `source`, drawn into `folder` unless they already lie there."""
    stamp = folder / "frames.json"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != source.describe():
        folder.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        _draw_all(folder, source, preprocessing, patch_size, workers)
        stamp.write_text(source.describe(), encoding="utf-8")
    return Frames(
        source=source,
        folder=folder,
        plan=_grid_plan(preprocessing, patch_size),
        pixels=np.load(folder / "pixels.npy", mmap_mode="r"),
        labels={name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in LABELS},
    )


def _grid_plan(preprocessing: PreprocessConfig, patch_size: int) -> TilePlan:
    """The plan that all training pictures share but for their own sizes; two by two patches make a visual token."""
    side = preprocessing.longest_edge
    return idefics3_plan(side, side, preprocessing, tokens_per_tile=(preprocessing.tile_size // patch_size // 2) ** 2)


def picture_frames(picture: Image.Image, preprocessing: PreprocessConfig) -> npt.NDArray[np.uint8]:
    """The frames of a picture, [F, side, side, 3], by the runtime's own preprocessing.

    Raises:
        ValueError: the picture's shape gives another grid than `GRID`.
    """
    plan = idefics3_plan(picture.width, picture.height, preprocessing, tokens_per_tile=0)
    if (plan.rows, plan.cols) != GRID:
        raise ValueError(
            f"a {picture.width}x{picture.height} scene becomes {plan.rows} x {plan.cols} tiles; training expects "
            f"{GRID[0]} x {GRID[1]}"
        )
    normalised = preprocess(load_image(picture), plan, preprocessing).pixels.numpy()
    pixels = (normalised * np.float32(preprocessing.std[0]) + np.float32(preprocessing.mean[0])) * 255
    return np.ascontiguousarray(pixels.round().astype(np.uint8).transpose(0, 2, 3, 1))


def patch_labels(scene: Scene, rendering: Rendering, side: int, patch_size: int) -> dict[str, npt.NDArray[np.uint8]]:
    """One [F, rows, columns] array for each of `LABELS`."""
    rows = [_ground_labels(scene), *map(_thing_labels, scene.things)]
    table = np.array(rows, dtype=np.uint8)
    owners, characters = _map_frames(rendering.owners, side), _map_frames(rendering.characters, side)
    frames = [_frame_labels(*maps, table, patch_size) for maps in zip(owners, characters, strict=True)]
    return {name: np.stack([labels[name] for labels in frames]) for name in LABELS}


def _map_frames(pixel_map: npt.NDArray[np.uint8], side: int) -> list[npt.NDArray[np.uint8]]:
    """A map of the picture's size cut as the picture itself is: tiles of the grid, then the whole of it."""
    rows, cols = GRID
    picture = Image.fromarray(pixel_map)
    canvas = np.asarray(picture.resize((cols * side, rows * side), Image.Resampling.NEAREST))
    tiles = [
        canvas[row * side : (row + 1) * side, col * side : (col + 1) * side]
        for row in range(rows)
        for col in range(cols)
    ]
    return [*tiles, np.asarray(picture.resize((side, side), Image.Resampling.NEAREST))]


def _frame_labels(
    owner_map: npt.NDArray[np.uint8],
    character_map: npt.NDArray[np.uint8],
    table: npt.NDArray[np.uint8],
    patch_size: int,
) -> dict[str, npt.NDArray[np.uint8]]:
    """Labels of one frame, [rows, columns] each; `table` [1 + things, 4] has the classes of every owner."""
    owners, coverage = _majority(_patches(owner_map, patch_size), len(table) - 1)
    owners = np.where(coverage >= _COVERED, owners, 0)
    unsure = (coverage < _COVERED) & (coverage > _BARE)
    classes = table[owners]  # [rows, columns, 4]
    classes[unsure] = IGNORED
    characters, coverage = _majority(_patches(character_map, patch_size), len(CHARACTERS))
    characters = np.where(coverage >= _CHARACTER_COVERED, characters, 0)
    lettered = classes[..., 3] == _LETTERED
    return {
        "thing": classes[..., 0],
        "colour": classes[..., 1],
        "word": classes[..., 2],
        "character": np.where(lettered, characters, IGNORED).astype(np.uint8),
    }


def _ground_labels(scene: Scene) -> tuple[int, int, int, int]:
    """(thing, colour, word, lettered) classes of a patch that shows nothing but background or page."""
    colour = COLOURS.index(scene.background) if scene.background in COLOURS else IGNORED
    return 0, colour, IGNORED, _LETTERED if scene.page is not None else _PLAIN


def _thing_labels(thing: Thing) -> tuple[int, int, int, int]:
    """(thing, colour, word, lettered) classes of a patch that shows the thing."""
    num_stickers = len(sticker_names())
    if thing.kind is Kind.STICKER:
        return 1 + sticker_names().index(thing.name), IGNORED, IGNORED, _PLAIN
    if thing.kind is Kind.SHAPE:
        return 1 + num_stickers + SHAPES.index(thing.shape or ""), COLOURS.index(thing.colour or ""), IGNORED, _PLAIN
    word = SIGN_WORDS.index(thing.text) if thing.text in SIGN_WORDS else IGNORED  # a code is no word
    return 1 + num_stickers + len(SHAPES), IGNORED, word, _LETTERED


def _patches(frame: npt.NDArray[np.uint8], patch_size: int) -> npt.NDArray[np.uint8]:
    """A square map cut into patches: [rows, columns, pixels of the patch]."""
    cells = len(frame) // patch_size
    return frame.reshape(cells, patch_size, cells, patch_size).swapaxes(1, 2).reshape(cells, cells, patch_size**2)


def _majority(patches: npt.NDArray[np.uint8], num_values: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """The most frequent value from 1 up in each patch, and the part of the patch it covers."""
    present = [value for value in np.unique(patches) if 0 < value <= num_values]
    if not present:
        return np.zeros(patches.shape[:2], np.intp), np.zeros(patches.shape[:2])
    shares = np.stack([(patches == value).mean(axis=-1) for value in present])
    return np.array(present, dtype=np.intp)[shares.argmax(axis=0)], shares.max(axis=0)


def _draw_all(folder: Path, source: Source, preprocessing: PreprocessConfig, patch_size: int, workers: int) -> None:
    side = preprocessing.tile_size
    cells = side // patch_size
    frames = (source.count, GRID[0] * GRID[1] + 1)
    shapes = {"pixels": (*frames, side, side, 3)} | dict.fromkeys(LABELS, (*frames, cells, cells))
    for name, shape in shapes.items():
        np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.uint8, shape=shape)
    jobs = [(folder, source, preprocessing, patch_size, part) for part in _parts(source.count, 64)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for _ in pool.imap_unordered(_draw_part, jobs):
            pass


def _parts(count: int, part: int) -> Iterator[range]:
    for start in range(0, count, part):
        yield range(start, min(start + part, count))


def _draw_part(job: tuple[Path, Source, PreprocessConfig, int, range]) -> None:
    folder, source, preprocessing, patch_size, positions = job
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r+") for name in ("pixels", *LABELS)}
    for position in positions:
        drawn = source.draw(position)
        picture = drawn if isinstance(drawn, Image.Image) else drawn[1].picture
        arrays["pixels"][position] = picture_frames(picture, preprocessing)
        for name in LABELS:
            arrays[name][position] = IGNORED
        if not isinstance(drawn, Image.Image):
            for name, values in patch_labels(*drawn, preprocessing.tile_size, patch_size).items():
                arrays[name][position] = values

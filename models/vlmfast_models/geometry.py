"""From a picture's size to its tiles: the one place that decides resized size, grid and token count. No torch.

Prompt building, preprocessing and the tower all read the same `TilePlan`, so counts can not disagree with pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlmfast_models.config import PreprocessConfig
from vlmfast_models.errors import GeometryError

_IDEFICS3_MAX_SIDE = 4096
"""Upper bound of the first resize, fixed in the family's reference processor and absent from its config files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """What becomes of a picture of one size; sizes are (width, height) in pixels.

    A picture is resized to `resized`, then to `canvas` (whole tiles), cut row by row into `rows` x `cols` tiles, and
    followed by one global frame. `rows == cols == 0` means that the canvas itself is the only frame.
    """

    source: tuple[int, int]
    resized: tuple[int, int]
    canvas: tuple[int, int]
    rows: int
    cols: int
    tile_size: int
    tokens_per_tile: int

    @property
    def num_tiles(self) -> int:
        """Frames the tower encodes, the global one included."""
        return self.rows * self.cols + 1

    @property
    def n_tokens(self) -> int:
        """Visual tokens in the prompt (separators not counted)."""
        return self.num_tiles * self.tokens_per_tile


def idefics3_plan(width: int, height: int, config: PreprocessConfig, tokens_per_tile: int) -> TilePlan:
    """Plan of the Idefics3 / SmolVLM family, as transformers' `Idefics3ImageProcessor` resizes and splits.

    Raises:
        GeometryError: a side is below one pixel.
    """
    if width < 1 or height < 1:
        raise GeometryError(f"the picture is {width}x{height} pixels; both sides must be at least 1")
    tile = config.tile_size
    resized = _cap_longest(*_scale_longest(width, height, config.longest_edge), _IDEFICS3_MAX_SIDE)
    canvas = _whole_tiles(*resized, tile) if config.split else (tile, tile)
    cols, rows = canvas[0] // tile, canvas[1] // tile
    if rows == cols == 1:
        rows = cols = 0
    return TilePlan(
        source=(width, height),
        resized=resized,
        canvas=canvas,
        rows=rows,
        cols=cols,
        tile_size=tile,
        tokens_per_tile=tokens_per_tile,
    )


def _scale_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Longer side set to `longest`, the other kept in proportion and made even (never below one pixel)."""
    ratio = width / height
    if width >= height:
        other = int(longest / ratio)
        return longest, max(other + other % 2, 1)
    other = int(longest * ratio)
    return max(other + other % 2, 1), longest


def _cap_longest(width: int, height: int, limit: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > limit:
        width, height = limit, int(limit / ratio)
    elif height > width and height > limit:
        width, height = int(limit * ratio), limit
    return max(width, 1), max(height, 1)


def _whole_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """The longer side rounded up to whole tiles, the other recomputed from the ratio and rounded up as well."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return width, height

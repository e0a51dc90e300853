"""From a picture's size to its tiles: the one place that decides resized size, grid and token count. No torch.

Prompt building, preprocessing and the tower all read the same `TilePlan`, so counts can not disagree with pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vlmfast_models.config import PreprocessConfig
from vlmfast_models.errors import GeometryError

_IDEFICS3_MAX_SIDE = 4096
"""Upper bound of the first resize, fixed in the family's reference processor and absent from its config files."""


_MAX_RESIZED = 2**26
"""Most pixels that a picture is scaled to before its middle is cut out: 256 MB, a ratio of 594 to 1 at 336 pixels."""
_MAX_SQUARE = 16_384
"""Longest side, in pixels, of a picture that is put on a square of its own size before it is scaled: 800 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """What becomes of a picture of one size; sizes are (width, height) in pixels.

    A picture is resized to `resized`, brought to `canvas` (whole tiles), cut row by row into `rows` x `cols` tiles, and
    followed by one global frame. `rows == cols == 0` means that the canvas itself is the only frame.
    """

    source: tuple[int, int]
    resized: tuple[int, int]
    canvas: tuple[int, int]
    rows: int
    cols: int
    tile_size: int
    tokens_per_tile: int
    squared: bool = False
    """The source is first put in the middle of a square of the mean colour."""
    offset: tuple[int, int] | None = None
    """Where the resized picture's corner lies on the canvas: what sticks out is cut off, what stays free is black.
    None: it is resized a second time, to the whole canvas."""
    kept: tuple[int, int, int, int] | None = None
    """Left, top, right, bottom in patches of the part of the tiles' grid that holds picture (LLaVA-NeXT)."""
    grid: tuple[int, int] | None = None
    """Columns and rows of visual tokens that the kept part is pooled to; each row ends with a line break token. None:
    every tile gives its tokens unchanged."""

    @property
    def num_tiles(self) -> int:
        """Frames the tower encodes, the global one included."""
        return self.rows * self.cols + 1

    @property
    def n_tokens(self) -> int:
        """Visual tokens in the prompt (separators not counted)."""
        if self.grid is None:
            return self.num_tiles * self.tokens_per_tile
        cols, rows = self.grid
        return self.tokens_per_tile + rows * (cols + 1)

    @property
    def runs(self) -> tuple[int, ...]:
        """Lengths of the runs of visual tokens that the prompt separates: a frame each, or all in one."""
        return (self.tokens_per_tile,) * self.num_tiles if self.grid is None else (self.n_tokens,)


def idefics3_plan(width: int, height: int, config: PreprocessConfig, tokens_per_tile: int) -> TilePlan:
    """Plan of the Idefics3 / SmolVLM family, as transformers' `Idefics3ImageProcessor` resizes and splits.

    Raises:
        GeometryError: a side is below one pixel.
    """
    _check_size(width, height)
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


def idefics3_levels(config: PreprocessConfig) -> tuple[PreprocessConfig, ...]:
    """The same preprocessing with a longest edge of one tile, two tiles, and so on up to the checkpoint's own."""
    edges = range(config.tile_size, config.longest_edge, config.tile_size)
    return (*(replace(config, longest_edge=edge) for edge in edges), config) if config.split else (config,)


def pinpoint_levels(config: PreprocessConfig) -> tuple[PreprocessConfig, ...]:
    """The same preprocessing with pinpoints of few tiles only, then of more, up to all of the checkpoint's own."""
    areas = sorted({width * height for width, height in config.pinpoints})
    return tuple(
        replace(config, pinpoints=tuple(size for size in config.pinpoints if size[0] * size[1] <= area))
        for area in areas
    )


def llava_plan(width: int, height: int, config: PreprocessConfig, tokens_per_tile: int) -> TilePlan:
    """Plan of LLaVA-1.5: one square frame, as the CLIP, SigLIP and LLaVA processors of transformers make it.

    Raises:
        GeometryError: a side is below one pixel, the square around the picture is too large, or the picture is so
            long that its middle shows next to nothing of it.
    """
    _check_size(width, height)
    tile = config.tile_size
    squared = config.pad_square and width != height
    if squared:
        _check_square(width, height)
    resized, offset = (tile, tile), None
    if config.shortest_edge:
        source = (max(width, height),) * 2 if squared else (width, height)
        resized = _scale_shortest(*source, config.shortest_edge)
        if resized[0] * resized[1] > _MAX_RESIZED:
            raise GeometryError(
                f"the picture is {width}x{height} pixels, too long and narrow for this model, which sees the middle "
                f"square of it; cut it into parts"
            )
        offset = _middle(resized[0], tile), _middle(resized[1], tile)
    return TilePlan(
        source=(width, height),
        resized=resized,
        canvas=(tile, tile),
        rows=0,
        cols=0,
        tile_size=tile,
        tokens_per_tile=tokens_per_tile,
        squared=squared,
        offset=offset,
    )


def llava_next_plan(
    width: int,
    height: int,
    config: PreprocessConfig,
    tokens_per_tile: int,
    *,
    patches_per_side: int,
    max_grid_tiles: int | None = None,
    num_images: int = 1,
) -> TilePlan:
    """Plan of LLaVA-NeXT (any resolution) and LLaVA-OneVision, as transformers' processors fit, pad, unpad and pool.

    Args:
        max_grid_tiles: LLaVA-OneVision's bound on the grid of tokens, in tiles; None never pools.
        num_images: pictures of the whole prompt. With `max_grid_tiles`, several are one square frame each.

    Raises:
        GeometryError: a side is below one pixel, or the square around one of several pictures is too large.
    """
    _check_size(width, height)
    tile = config.tile_size
    if max_grid_tiles is not None and num_images > 1:
        _check_square(width, height)
        return TilePlan(
            source=(width, height),
            resized=(tile, tile),
            canvas=(tile, tile),
            rows=0,
            cols=0,
            tile_size=tile,
            tokens_per_tile=tokens_per_tile,
            squared=width != height,
            grid=(0, 1),
        )
    canvas = _best_canvas(width, height, config.pinpoints)
    resized = _fit(width, height, *canvas)
    cols, rows = canvas[0] // tile, canvas[1] // tile
    kept = _unpadded(width, height, cols * patches_per_side, rows * patches_per_side)
    grid = kept[2] - kept[0], kept[3] - kept[1]
    if max_grid_tiles is not None:
        grid = _pooled(*grid, max_grid_tiles * patches_per_side**2)
    return TilePlan(
        source=(width, height),
        resized=resized,
        canvas=canvas,
        rows=rows,
        cols=cols,
        tile_size=tile,
        tokens_per_tile=tokens_per_tile,
        offset=((canvas[0] - resized[0]) // 2, (canvas[1] - resized[1]) // 2),
        kept=kept,
        grid=grid,
    )


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise GeometryError(f"the picture is {width}x{height} pixels; both sides must be at least 1")


def _check_square(width: int, height: int) -> None:
    if max(width, height) > _MAX_SQUARE:
        raise GeometryError(
            f"the picture is {width}x{height} pixels; this model puts it on a square, whose side may have at most "
            f"{_MAX_SQUARE}; scale it down or cut it"
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


def _scale_shortest(width: int, height: int, shortest: int) -> tuple[int, int]:
    """Shorter side set to `shortest`, the other in proportion, rounded down."""
    if width <= height:
        return shortest, int(shortest * height / width)
    return int(shortest * width / height), shortest


def _middle(side: int, tile: int) -> int:
    """Where a picture's side begins on a tile that shows its middle; a smaller picture is moved right and down."""
    return -((side - tile) // 2)


def _best_canvas(width: int, height: int, canvases: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The canvas that shows most of the picture's pixels, of equal ones that with the least unused area, then the
    first (transformers' `select_best_resolution`)."""

    def score(canvas: tuple[int, int]) -> tuple[int, int]:
        scale = min(canvas[0] / width, canvas[1] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - canvas[0] * canvas[1]

    return max(canvases, key=score)  # the first of equals


def _fit(width: int, height: int, canvas_width: int, canvas_height: int) -> tuple[int, int]:
    """The picture's size scaled to touch the canvas, its other side rounded up."""
    across, down = canvas_width / width, canvas_height / height
    if across < down:
        return canvas_width, min(math.ceil(height * across), canvas_height)
    return min(math.ceil(width * down), canvas_width), canvas_height


def _unpadded(width: int, height: int, cols: int, rows: int) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of the picture's part of a cols x rows grid of patches, the borders taken off evenly."""
    if width / height > cols / rows:
        border = (rows - int(round(height * (cols / width), 7))) // 2
        return 0, border, cols, rows - border
    border = (cols - int(round(width * (rows / height), 7))) // 2
    return border, 0, cols - border, rows


def _pooled(cols: int, rows: int, most: int) -> tuple[int, int]:
    """The grid's size after pooling to about `most` tokens; it is left alone up to 1.1 times that in each direction."""
    ratio = math.sqrt(cols * rows / most)
    return (int(cols // ratio), int(rows // ratio)) if ratio > 1.1 else (cols, rows)

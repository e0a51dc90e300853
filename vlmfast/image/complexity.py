"""How much of a picture's detail a smaller size would lose: what `resolution="auto"` decides by. Looks at pixels only.

A picture is scaled down and up again. What comes back wrong, block by block and relative to the contrast of the block,
is the detail lost: edges of large things lose little of their contrast, strokes of small text most of it, and a flat
block has none to lose. A block is a square of the smaller picture's pixels, so that the same edge counts the same at
every size. The worst blocks decide and not the mean: a line of text on an otherwise plain page keeps its resolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

_BLOCK = 8
"""Side of a block in pixels of the smaller size."""
_FLAT = 32.0
"""Standard deviation in grey levels below which the contrast of a block counts as noise."""
_WORST_SHARE = 0.004
_WORST_LEAST = 2
"""So many blocks, or that share of all, may be worse than the value returned."""


def detail_lost(
    pixels: npt.NDArray[np.uint8], full: tuple[int, int], smaller: Sequence[tuple[int, int]]
) -> list[float]:
    """The share of local contrast that is lost at each smaller size, 0 (nothing) to 1, in the picture's worst blocks.

    Args:
        pixels: uint8 [H, W, 3].
        full: (width, height) at which the model would see the picture without saving.
        smaller: the sizes asked about.

    Returns:
        One value for each size.
    """
    picture = Image.fromarray(pixels).convert("L")
    # Detail beyond the full size is lost anyway; a picture smaller than that has none to lose there.
    reference = picture.resize((min(picture.width, full[0]), min(picture.height, full[1])), Image.Resampling.LANCZOS)
    return [_lost(reference, size) for size in smaller]


def _lost(reference: Image.Image, size: tuple[int, int]) -> float:
    reduced = (min(size[0], reference.width), min(size[1], reference.height))
    if reduced == reference.size:
        return 0.0
    back = reference.resize(reduced, Image.Resampling.LANCZOS).resize(reference.size, Image.Resampling.BICUBIC)
    factor = max(reference.width / reduced[0], reference.height / reduced[1])
    side = min(round(_BLOCK * factor), reference.width, reference.height)
    seen = np.asarray(reference, np.float32)
    error = np.square(_blocks(np.asarray(back, np.float32) - seen, side)).mean(axis=-1)
    shares = np.sort((error / (_blocks(seen, side).var(axis=-1) + _FLAT**2)).ravel())
    passed_over = min(max(_WORST_LEAST, int(len(shares) * _WORST_SHARE)), len(shares) - 1)
    return float(min(1.0, shares[-1 - passed_over]))


def _blocks(plane: npt.NDArray[np.float32], side: int) -> npt.NDArray[np.float32]:
    """[H, W] -> [rows, columns, pixels of a block]; what does not fill a block at the far edges is mirrored."""
    height, width = plane.shape
    padded = np.pad(plane, ((0, -height % side), (0, -width % side)), mode="symmetric")
    rows, columns = padded.shape[0] // side, padded.shape[1] // side
    return padded.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(rows, columns, side * side)

"""Signs and printed pages as ink on nothing, with a map of where each character lies.

Maps hold 0 for no character and 1 + the index into `CHARACTERS` otherwise.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from vlmfast.train.pages import FONTS, Page
from vlmfast.train.vocabulary import CHARACTERS

_CODES = {character: number for number, character in enumerate(CHARACTERS, start=1)}
_MARGIN = 0.04
"""Between a page's text and its edge, as a fraction of the width or height."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lettering:
    """Two pictures in mode "L" of one size: how much ink a pixel has, and which character it belongs to."""

    ink: Image.Image
    characters: Image.Image


@cache
def font(name: str, pixels: int, bold: bool) -> ImageFont.FreeTypeFont:
    """A typeface of `fonts/` at a size in pixels."""
    file = files("vlmfast.train") / "fonts" / f"{name}-{700 if bold else 400}.woff"
    return ImageFont.truetype(BytesIO(file.read_bytes()), pixels)


def sign_text(rng: random.Random, text: str, size: tuple[int, int], height: int) -> Lettering:
    """One word in the middle of a sprite of this size that holds a board of this height, in any of the typefaces."""
    width = size[0]
    name, bold = rng.choice(FONTS), rng.random() < 0.7
    pixels = max(6, round(height * rng.uniform(0.60, 0.72)))
    while pixels > 6 and font(name, pixels, bold).getlength(text) > width - 0.35 * height:
        pixels -= 1
    drawing = _Drawing(size)
    face = font(name, pixels, bold)
    drawing.write(text, (width - face.getlength(text)) / 2, size[1] / 2, face)
    return drawing.lettering


def page_text(rng: random.Random, page: Page, size: tuple[int, int]) -> Lettering:
    """The page's lines on a sheet of this size, turned as the page is."""
    width, height = size
    room = (1 - 2 * _MARGIN) * width
    pixels = max(8, round(page.size * width))
    while pixels > 8 and (
        max(font(page.font, pixels, page.bold).getlength(line) for line in page.lines) > room
        or pixels * page.leading * len(page.lines) > (1 - 2 * _MARGIN) * height
    ):
        pixels -= 1
    face = font(page.font, pixels, page.bold)
    lengths = [face.getlength(line) for line in page.lines]
    step = pixels * page.leading
    left = _MARGIN * width + rng.random() * (room - max(lengths))
    top = _MARGIN * height + rng.random() * ((1 - 2 * _MARGIN) * height - step * len(page.lines))
    drawing = _Drawing(size)
    for number, (line, length) in enumerate(zip(page.lines, lengths, strict=True)):
        start = left + (max(lengths) - length) / 2 if page.centred else left
        drawing.write(line, start, top + (number + 0.5) * step, face)
    lettering = drawing.lettering
    return Lettering(
        ink=lettering.ink.rotate(page.turn, Image.Resampling.BILINEAR),
        characters=lettering.characters.rotate(page.turn),
    )


class _Drawing:
    def __init__(self, size: tuple[int, int]) -> None:
        self.lettering = Lettering(ink=Image.new("L", size, 0), characters=Image.new("L", size, 0))
        self._pen = ImageDraw.Draw(self.lettering.ink)
        self._marker = ImageDraw.Draw(self.lettering.characters)

    def write(self, text: str, left: float, middle: float, face: ImageFont.FreeTypeFont) -> None:
        """`middle` is half-way between ascender and descender."""
        self._pen.text((left, middle), text, font=face, fill=255, anchor="lm")
        ends = [left + face.getlength(text[: position + 1]) for position in range(len(text))]
        for character, start, end in zip(text, [left, *ends], ends, strict=False):
            if character in _CODES:
                # NOTE: the next character starts at `end`; boxes are inclusive, so this one ends a pixel before.
                box = (start, middle - face.size * 0.42, max(start, end - 1), middle + face.size * 0.42)
                self._marker.rectangle(box, fill=_CODES[character])

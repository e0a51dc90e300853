"""Draws a scene: the picture, and for every pixel which thing (and which character of a sign) is seen there.

The picture is a pure function of the scene. The two maps are what dense pretraining learns from.
"""

from __future__ import annotations

import colorsys
import math
import random
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from vlmfast.train.scenes import Kind, Scene, Thing, stream
from vlmfast.train.vocabulary import SIGN_CHARACTERS, sticker_index

_SUPERSAMPLE = 3
_STICKER_SHARE = 0.92
"""Part of its box that a sticker fills, so that turning cuts nothing off."""
_VISIBLE = 96
"""Alpha from which a pixel counts as covered by the thing."""

# Hue in degrees, then the ranges of saturation and value that a speaker would still call by that name.
_HSV: dict[str, tuple[float, tuple[float, float], tuple[float, float]]] = {
    "red": (0, (0.78, 0.92), (0.78, 0.95)),
    "orange": (28, (0.80, 0.95), (0.92, 1.00)),
    "yellow": (53, (0.65, 0.90), (0.93, 1.00)),
    "green": (125, (0.50, 0.80), (0.50, 0.78)),
    "blue": (215, (0.65, 0.90), (0.65, 0.95)),
    "purple": (275, (0.50, 0.75), (0.48, 0.75)),
    "pink": (335, (0.25, 0.45), (0.95, 1.00)),
    "brown": (25, (0.55, 0.70), (0.34, 0.48)),
    "black": (0, (0.00, 0.10), (0.05, 0.14)),
    "white": (0, (0.00, 0.03), (0.95, 1.00)),
    "grey": (0, (0.00, 0.05), (0.45, 0.62)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A drawn scene. Maps are [height, width]: 0 is nothing, i + 1 is `things[i]` or `SIGN_CHARACTERS[i]`."""

    picture: Image.Image
    owners: npt.NDArray[np.uint8]
    characters: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sprite:
    """A thing before it is turned and pasted: colours with alpha, and its map of characters."""

    image: Image.Image
    characters: Image.Image


def render(scene: Scene) -> Rendering:
    """The scene drawn in reading order, later things in front."""
    # The twins share layout and texture but not the exact shades and noise.
    rng = stream("render", scene.split.value, scene.seed, scene.index)
    picture = _background(rng, scene)
    owners = Image.new("L", picture.size, 0)
    characters = Image.new("L", picture.size, 0)
    for number, thing in enumerate(scene.things, start=1):
        left, top, right, bottom = thing.box
        size = (round((right - left) * scene.width), round((bottom - top) * scene.height))
        corner = (round(left * scene.width), round(top * scene.height))
        sprite = _sprite(rng, thing, size)
        image = sprite.image.rotate(thing.turn, Image.Resampling.BICUBIC)
        alpha = image.getchannel("A")
        seen = alpha.point([0] * _VISIBLE + [255] * (256 - _VISIBLE))
        picture.paste(image, corner, alpha)
        owners.paste(number, (*corner, corner[0] + size[0], corner[1] + size[1]), seen)
        characters.paste(sprite.characters.rotate(thing.turn), corner, seen)
    return Rendering(
        picture=_add_noise(picture, scene.noise, rng),
        owners=np.asarray(owners),
        characters=np.asarray(characters),
    )


def shade(rng: random.Random, colour: str) -> tuple[int, int, int]:
    """An RGB value that goes by the colour's name."""
    hue, saturation, value = _HSV[colour]
    rgb = colorsys.hsv_to_rgb(((hue + rng.uniform(-5, 5)) % 360) / 360, rng.uniform(*saturation), rng.uniform(*value))
    red, green, blue = (round(255 * part) for part in rgb)
    return red, green, blue


@cache
def _sticker(name: str) -> Image.Image:
    with (files("vlmfast.train") / "stickers" / sticker_index()[name]["file"]).open("rb") as file:
        return Image.open(file).convert("RGBA")


def _sprite(rng: random.Random, thing: Thing, size: tuple[int, int]) -> _Sprite:
    if thing.kind is Kind.SIGN:
        return _sign(rng, thing.text or "", size)
    if thing.kind is Kind.SHAPE:
        image = _shape(thing.shape or "", shade(rng, thing.colour or ""), size)
    else:
        inner = (round(size[0] * _STICKER_SHARE), round(size[1] * _STICKER_SHARE))
        image = Image.new("RGBA", size, (0, 0, 0, 0))
        image.paste(
            _sticker(thing.name).resize(inner, Image.Resampling.LANCZOS),
            ((size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2),
        )
    return _Sprite(image=image, characters=Image.new("L", size, 0))


def _shape(shape: str, fill: tuple[int, int, int], size: tuple[int, int]) -> Image.Image:
    """The shape in one colour with a thin darker edge, filling most of its box."""
    large = (size[0] * _SUPERSAMPLE, size[1] * _SUPERSAMPLE)
    mask = Image.new("L", large, 0)
    points = [(x * large[0], y * large[1]) for x, y in _outline(shape)]
    ImageDraw.Draw(mask).polygon(points, fill=255)
    image = Image.new("RGBA", size, (*fill, 0))
    image.putalpha(mask.resize(size, Image.Resampling.LANCZOS))
    return image


@cache
def _outline(shape: str) -> tuple[tuple[float, float], ...]:
    """Corner points in the unit square."""
    if shape == "square":
        return ((0.1, 0.1), (0.9, 0.1), (0.9, 0.9), (0.1, 0.9))
    if shape == "triangle":
        return ((0.5, 0.05), (0.97, 0.92), (0.03, 0.92))
    if shape == "diamond":
        return ((0.5, 0.02), (0.86, 0.5), (0.5, 0.98), (0.14, 0.5))
    if shape == "star":
        radii = (0.5, 0.21)
        angles = [math.pi * (i / 5 - 0.5) for i in range(10)]
        return tuple(
            (0.5 + radii[i % 2] * math.cos(angle), 0.52 + radii[i % 2] * math.sin(angle))
            for i, angle in enumerate(angles)
        )
    steps = [2 * math.pi * i / 60 for i in range(60)]
    if shape == "heart":
        return tuple(
            (
                0.5 + 0.029 * 16 * math.sin(t) ** 3,
                0.46 - 0.029 * (13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)),
            )
            for t in steps
        )
    return tuple((0.5 + 0.46 * math.cos(t), 0.5 + 0.46 * math.sin(t)) for t in steps)


@cache
def _font(pixels: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(pixels)  # Aileron, inside Pillow: no font file to find on the machine
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("Pillow was built without FreeType, so signs can not be drawn; install a wheel of Pillow")
    return font


def _sign(rng: random.Random, text: str, size: tuple[int, int]) -> _Sprite:
    """A board with a border and the text on it, and where each character lies."""
    width, height = size
    light = rng.random() < 0.6
    board = shade(rng, rng.choice(("white", "yellow"))) if light else shade(rng, rng.choice(("blue", "green", "red")))
    ink = shade(rng, "black") if light else shade(rng, "white")
    image = Image.new("RGBA", size, (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle((3, 5, width - 4, height - 6), radius=6, fill=board, outline=ink, width=2)
    pixels = round(height * 0.74)
    while _font(pixels).getlength(text) > width - 18:
        pixels -= 1
    font = _font(pixels)
    left, middle = (width - font.getlength(text)) / 2, height / 2
    draw.text((left, middle), text, font=font, fill=ink, anchor="lm", stroke_width=1, stroke_fill=ink)
    characters = Image.new("L", size, 0)
    marker = ImageDraw.Draw(characters)
    for position, character in enumerate(text):
        start, end = (left + font.getlength(text[:stop]) for stop in (position, position + 1))
        # NOTE: the next character starts at `end`; boxes are inclusive, so this one ends a pixel before.
        marker.rectangle(
            (start, middle - pixels * 0.42, end - 1, middle + pixels * 0.42), fill=1 + SIGN_CHARACTERS.index(character)
        )
    return _Sprite(image=image, characters=characters)


def _background(rng: random.Random, scene: Scene) -> Image.Image:
    """The background in two close shades of its colour."""
    width, height = scene.width, scene.height
    first, second = shade(rng, scene.background), shade(rng, scene.background)
    picture = Image.new("RGB", (width, height), first)
    if scene.texture == "gradient":
        ramp = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize((width, height))
        picture.paste(second, (0, 0, width, height), ramp)
    elif scene.texture != "plain":
        picture.paste(second, (0, 0, width, height), _pattern(scene.texture, rng.randint(12, 30), width, height))
    return picture


def _pattern(texture: str, step: int, width: int, height: int) -> Image.Image:
    """A repeated pattern as a mask."""
    y, x = np.mgrid[0:height, 0:width]
    if texture == "stripes":
        inside = (x + y) // step % 2 == 0
    elif texture == "checks":
        inside = (x // step + y // step) % 2 == 0
    else:
        inside = (x % step - step / 2) ** 2 + (y % step - step / 2) ** 2 < (step * 0.3) ** 2
    return Image.fromarray((inside * 255).astype(np.uint8))


def _add_noise(picture: Image.Image, sigma: float, rng: random.Random) -> Image.Image:
    generator = np.random.default_rng(rng.getrandbits(64))
    pixels = np.asarray(picture, dtype=np.float32)
    noise = generator.standard_normal(pixels.shape, dtype=np.float32) * sigma
    return Image.fromarray(np.clip(pixels + noise + 0.5, 0, 255).astype(np.uint8))

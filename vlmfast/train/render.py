"""Draws a scene: the picture, and for every pixel which thing and which character is seen there.

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
from PIL import Image, ImageDraw, ImageFilter, ImageOps

from vlmfast.train.lettering import page_text, sign_text
from vlmfast.train.pages import Page
from vlmfast.train.scenes import Kind, Scene, Thing, stream
from vlmfast.train.vocabulary import PHOTOGRAPH, sticker_index

_SUPERSAMPLE = 2
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
    """A drawn scene. Maps are [height, width]: 0 is nothing, i + 1 is `things[i]` or `CHARACTERS[i]`."""

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
    owners = Image.new("L", (scene.width, scene.height), 0)
    characters = Image.new("L", owners.size, 0)
    if scene.page is not None:
        picture, characters = _page(rng, scene.page, owners.size)
    elif scene.background == PHOTOGRAPH:
        picture = _photograph(rng, scene.texture, owners.size)
    else:
        picture = _background(rng, scene)
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
    folder = "stickers" if name in sticker_index() else "unseen"
    with (files("vlmfast.train") / folder / f"{name}.png").open("rb") as file:
        return Image.open(file).convert("RGBA")


def _sprite(rng: random.Random, thing: Thing, size: tuple[int, int]) -> _Sprite:
    if thing.kind is Kind.SIGN:
        return _sign(rng, thing.text or "", thing.turn, size)
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
        return ((0.5, 0.11), (0.9, 0.86), (0.1, 0.86))
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


def _sign(rng: random.Random, text: str, turn: float, size: tuple[int, int]) -> _Sprite:
    """A board with its text, flat enough to fit its box when turned; and where each character lies."""
    width = size[0]
    height = max(8, size[1] - round(width * math.sin(math.radians(abs(turn)))))
    top = (size[1] - height) // 2
    light = rng.random() < 0.6
    board = shade(rng, rng.choice(("white", "yellow"))) if light else shade(rng, rng.choice(("blue", "green", "red")))
    ink = shade(rng, "black") if light else shade(rng, "white")
    image = Image.new("RGBA", size, (0, 0, 0, 0))
    edge = max(1, round(height * 0.03))
    inside = (2 * edge, top + edge, width - 1 - 2 * edge, top + height - 1 - edge)
    ImageDraw.Draw(image).rounded_rectangle(inside, radius=height * 0.1, fill=board, outline=ink, width=edge)
    lettering = sign_text(rng, text, size, height)
    image.paste(ink, (0, 0, *size), lettering.ink)
    return _Sprite(image=image, characters=lettering.characters)


def _page(rng: random.Random, page: Page, size: tuple[int, int]) -> tuple[Image.Image, Image.Image]:
    """Light paper, evenly lit or not, with the page's text in a dark ink; and its map of characters."""
    hue, tint, lightness = rng.random(), rng.uniform(0.0, 0.12), rng.uniform(0.82, 1.0)
    paper = tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue, tint, lightness))
    ink = colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.0, 0.8), rng.uniform(0.05, 0.4))
    picture = Image.new("RGB", size, paper)
    if rng.random() < 0.5:
        shadow = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize(size)
        depth = rng.uniform(0.05, 0.25)
        picture.paste((90, 90, 90), (0, 0, *size), shadow.point([round(depth * level) for level in range(256)]))
    lettering = page_text(rng, page, size)
    picture.paste(tuple(round(255 * part) for part in ink), (0, 0, *size), lettering.ink)
    return picture, lettering.characters


@cache
def _photo(name: str) -> Image.Image:
    with (files("vlmfast.train") / "photos" / f"{name}.jpg").open("rb") as file:
        photo = Image.open(file)
        photo.load()
        return photo


def _photograph(rng: random.Random, name: str, size: tuple[int, int]) -> Image.Image:
    """A random part of the photograph, mirrored or not, often blurred; a grey one takes on a tint."""
    photo = _photo(name)
    width, height = size
    scale = rng.uniform(0.55, 1.0) * min(photo.width / width, photo.height / height)
    across, down = width * scale, height * scale
    left, top = rng.uniform(0, photo.width - across), rng.uniform(0, photo.height - down)
    part = photo.resize(size, Image.Resampling.BILINEAR, box=(left, top, left + across, top + down))
    if rng.random() < 0.5:
        part = ImageOps.mirror(part)
    if rng.random() < 0.5:
        part = part.filter(ImageFilter.BoxBlur(rng.uniform(1, 8)))
    if part.mode == "L":
        light = tuple(
            round(255 * c) for c in colorsys.hsv_to_rgb(rng.random(), rng.uniform(0, 0.5), rng.uniform(0.8, 1))
        )
        part = ImageOps.colorize(part, (0, 0, 0), light)
    return part


def _background(rng: random.Random, scene: Scene) -> Image.Image:
    """The background in two close shades of its colour."""
    width, height = scene.width, scene.height
    first, second = shade(rng, scene.background), shade(rng, scene.background)
    picture = Image.new("RGB", (width, height), first)
    if scene.texture == "gradient":
        ramp = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize((width, height))
        picture.paste(second, (0, 0, width, height), ramp)
    elif scene.texture != "plain":
        picture.paste(second, (0, 0, width, height), _pattern(scene.texture, rng.randint(20, 60), width, height))
    return picture


def _pattern(texture: str, step: int, width: int, height: int) -> Image.Image:
    """A repeated pattern as a mask."""
    y, x = np.ogrid[0:height, 0:width]
    if texture == "stripes":
        inside = (x + y) // step % 2 == 0
    elif texture == "checks":
        inside = (x // step + y // step) % 2 == 0
    else:
        inside = (x % step - step / 2) ** 2 + (y % step - step / 2) ** 2 < (step * 0.3) ** 2
    return Image.fromarray(inside.astype(np.uint8) * np.uint8(255))


@cache
def _noise_pool() -> npt.NDArray[np.float32]:
    """Normal noise that every picture takes a stretch of: drawing it anew would cost as much as all the rest."""
    return np.random.default_rng(0).standard_normal(1 << 21, dtype=np.float32)


def _add_noise(picture: Image.Image, sigma: float, rng: random.Random) -> Image.Image:
    pixels = np.asarray(picture)
    start = rng.randrange(len(_noise_pool()) - pixels.size)
    noise = _noise_pool()[start : start + pixels.size].reshape(pixels.shape) * np.float32(sigma)
    noise += pixels
    noise += np.float32(0.5)
    return Image.fromarray(np.clip(noise, 0, 255, out=noise).astype(np.uint8))

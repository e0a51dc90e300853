"""Which things lie where in a generated picture: values only, decided from (split, seed, index).

Every random stream is keyed by the split's name, so training scenes and held-out scenes never share a stream, whatever
their seeds. Scenes 2k and 2k+1 are twins: the same layout, with one name of thing replaced by another; each knows the
name that only its twin has (`absent`), which makes yes/no questions that differ by exactly one thing. A printed page is
a scene of its own: no things, no twin. Drawing is `render`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from vlmfast.train.pages import Page, sample_page
from vlmfast.train.vocabulary import (
    CODE_LETTERS,
    COLOURS,
    PAGE,
    PHOTOGRAPH,
    PHOTOGRAPHS,
    SHAPES,
    SIGN,
    SIGN_WORDS,
    cell_of,
    place_name,
    sticker_names,
)

TEXTURES = ("plain", "gradient", "stripes", "dots", "checks")

_CELL_CENTRES = (0.2, 0.5, 0.8)
_JITTER = 0.10
_PLACEMENT_TRIES = 24


class Split(Enum):
    """What a scene may be used for; part of the key of every random stream."""

    TRAIN = "train"
    HELD_OUT = "held-out"


class Kind(Enum):
    """How a thing is drawn."""

    STICKER = "sticker"
    SHAPE = "shape"
    SIGN = "sign"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How hard the scenes are. The scored distribution is the trained one: both use the default."""

    thing_weights: tuple[float, ...] = (0.25, 0.40, 0.25, 0.10)
    """Relative frequency of scenes with 1, 2, 3, ... things."""
    thing_scale: tuple[float, float] = (0.28, 0.55)
    """Side of a thing as a fraction of the picture's shorter side; less at the upper end where things are many."""
    shape_share: float = 0.35
    sign_share: float = 0.22
    """Share of scenes in which one thing is a sign."""
    sign_letters: tuple[float, float] = (0.06, 0.20)
    """Size of the letters of a sign as a fraction of the picture's shorter side, evenly spread by ratio."""
    code_share: float = 0.25
    """Share of signs that bear a code ("KX19") instead of a word."""
    repeat_share: float = 0.22
    """Share of scenes of two or more things in which a thing occurs more than once."""
    page_share: float = 0.15
    """Share of printed pages among the scenes."""
    full_pages: bool = False
    """Pages filled with lines; single lines and words of them are asked for."""
    print_scale: float = 1.0
    """How much larger the letters of pages are."""
    photo_share: float = 0.15
    """Share of the scenes with things that have a photograph for a background."""
    max_overlap: float = 0.12
    """Largest overlap of two boxes, as a fraction of the smaller one."""
    max_turn: float = 16.0
    """Rotation in degrees, either way."""
    max_noise: float = 8.0
    """Standard deviation of the pixel noise in grey levels."""
    picture_sides: tuple[int, int] = (384, 640)
    """Shortest and longest side in pixels; longer than 1.7 to 1 would change the grid of tiles."""


POCKET = Style()

CROWDED = replace(
    POCKET,
    thing_weights=(0.0, 0.0, 0.2, 0.3, 0.3, 0.2),
    thing_scale=(0.20, 0.46),
    sign_share=0.7,
    repeat_share=0.0,
    max_overlap=0.2,
    page_share=0.5,
    full_pages=True,
)
"""More things and letters a picture, for training only: more to learn for the same arithmetic."""

PAGES = replace(POCKET, page_share=1.0)
"""Printed pages only."""

LARGE_PRINT = replace(PAGES, print_scale=2.0)
"""Pages that can be read in one frame, to learn to read on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """One object: `box` is (left, top, right, bottom) as fractions of the picture."""

    kind: Kind
    name: str
    """What it is called in an answer; a shape's name holds its colour ("red circle")."""
    box: tuple[float, float, float, float]
    turn: float
    colour: str | None = None
    shape: str | None = None
    text: str | None = None

    @property
    def cell(self) -> tuple[int, int]:
        """Row and column of the centre on the 3 x 3 grid."""
        left, top, right, bottom = self.box
        return cell_of((left + right) / 2, (top + bottom) / 2)

    @property
    def place(self) -> str:
        return place_name(*self.cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The whole truth about one picture; `things` are in reading order."""

    split: Split
    seed: int
    index: int
    width: int
    height: int
    background: str
    """A colour, `PHOTOGRAPH`, or `PAGE`."""
    texture: str
    """How the background is drawn; of a photograph its name, of a page "plain"."""
    noise: float
    things: tuple[Thing, ...]
    absent: str
    """Name of a thing that this scene lacks and its twin has."""
    swapped: str
    """Name of the thing that this scene has and its twin lacks."""
    page: Page | None = None
    """What is printed, where the scene is a page; a page has no things, and `absent` and `swapped` are empty."""

    @property
    def counts(self) -> Counter[str]:
        """Name -> how many, in reading order of first appearance."""
        return Counter(thing.name for thing in self.things)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `truth.jsonl`; boxes in pixels."""
        record = asdict(self)
        record["split"] = self.split.value
        record["things"] = [
            {
                "kind": thing.kind.value,
                "name": thing.name,
                "colour": thing.colour,
                "shape": thing.shape,
                "text": thing.text,
                "place": thing.place,
                "box": [
                    round(edge * side) for edge, side in zip(thing.box, (self.width, self.height) * 2, strict=True)
                ],
            }
            for thing in self.things
        ]
        return record


def stream(*key: object) -> random.Random:
    """A random stream that is a pure function of its key, on every machine."""
    return random.Random("/".join(str(part) for part in key))


def sample_scene(seed: int, index: int, *, split: Split = Split.HELD_OUT, style: Style = POCKET) -> Scene:
    """The scene of this key. Twins (2k, 2k+1) share all but one name of thing."""
    rng = stream(split.value, seed, index // 2)
    if rng.random() < style.page_share:
        return _page_scene(seed, index, split, style)
    width, height = (rng.randint(*style.picture_sides) for _ in range(2))
    photographed = rng.random() < style.photo_share
    background = PHOTOGRAPH if photographed else rng.choice(COLOURS)
    things = _place_things(rng, style, width, height, background)
    old = rng.choice([thing.name for thing in things if thing.kind is not Kind.SIGN])
    new = _new_look(rng, {thing.name for thing in things}, background, style)
    swapped, absent = old, str(new["name"])
    if index % 2:
        things = [replace(thing, **new) if thing.name == old else thing for thing in things]
        swapped, absent = absent, swapped
    return Scene(
        split=split,
        seed=seed,
        index=index,
        width=width,
        height=height,
        background=background,
        texture=rng.choice(PHOTOGRAPHS if photographed else TEXTURES),
        noise=round(rng.uniform(0.0, style.max_noise), 2),
        things=tuple(sorted(things, key=lambda thing: (thing.cell, thing.box[0]))),
        swapped=swapped,
        absent=absent,
    )


def _page_scene(seed: int, index: int, split: Split, style: Style) -> Scene:
    """A printed page; unlike twins, neighbours share nothing."""
    rng = stream("page", split.value, seed, index)
    width, height = (rng.randint(*style.picture_sides) for _ in range(2))
    return Scene(
        split=split,
        seed=seed,
        index=index,
        width=width,
        height=height,
        background=PAGE,
        texture="plain",
        noise=round(rng.uniform(0.0, style.max_noise), 2),
        things=(),
        absent="",
        swapped="",
        page=sample_page(rng, full_height=height / width if style.full_pages else None, scale=style.print_scale),
    )


def _look(rng: random.Random, style: Style, background: str) -> dict[str, Any]:
    """What a thing is, without where: the fields of `Thing` that say so."""
    if rng.random() < style.shape_share:
        colour = rng.choice([colour for colour in COLOURS if colour != background])
        shape = rng.choice(SHAPES)
        return {"kind": Kind.SHAPE, "name": f"{colour} {shape}", "colour": colour, "shape": shape}
    return {"kind": Kind.STICKER, "name": rng.choice(sticker_names())}


def _looks(rng: random.Random, style: Style, background: str) -> list[dict[str, Any]]:
    """What the scene's things are: distinct names, except for a wanted repetition."""
    number = 1 + rng.choices(range(len(style.thing_weights)), style.thing_weights)[0]
    looks: dict[str, dict[str, Any]] = {}
    while len(looks) < number:
        look = _look(rng, style, background)
        looks.setdefault(look["name"], look)
    chosen = list(looks.values())
    if number > 1 and rng.random() < style.repeat_share:
        repeats = rng.randint(2, min(number, 3))
        chosen[:repeats] = [chosen[0]] * repeats
    if rng.random() < style.sign_share:
        text = _code(rng) if rng.random() < style.code_share else rng.choice(SIGN_WORDS)
        sign = {"kind": Kind.SIGN, "name": SIGN, "text": text}
        # The largest thing goes first, while there is room; a scene never consists of a sign alone.
        chosen = [sign, *(chosen[:-1] if number > 1 else chosen)]
    return chosen


def _code(rng: random.Random) -> str:
    """Letters, then digits, or either alone: "B7", "KX19", "42"."""
    length = rng.randint(2, 5)
    letters = rng.choice((0, length, *range(length + 1)))
    return "".join(rng.choices(CODE_LETTERS, k=letters) + rng.choices("0123456789", k=length - letters))


def _place_things(rng: random.Random, style: Style, width: int, height: int, background: str) -> list[Thing]:
    """The things with their boxes. A thing that finds no room is left out; the first always finds some."""
    things: list[Thing] = []
    looks = _looks(rng, style, background)
    smallest, largest = style.thing_scale
    scale = smallest, max(smallest, min(largest, 1.1 / math.sqrt(len(looks))))
    for look in looks:
        for _ in range(_PLACEMENT_TRIES):
            limit = style.max_turn / (3 if look["kind"] is Kind.SIGN else 1)
            turn = round(rng.uniform(-limit, limit), 1)
            if look["kind"] is Kind.SIGN:
                sides = _sign_sides(rng, style, look["text"], turn, width, height)
            else:
                sides = _thing_sides(rng, scale, width, height)
            box = _box(rng, sides)
            if all(_overlap(box, thing.box) <= style.max_overlap for thing in things):
                things.append(Thing(box=box, turn=turn, **look))
                break
    if all(thing.kind is Kind.SIGN for thing in things):
        return _place_things(rng, style, width, height, background)
    return things


def _thing_sides(rng: random.Random, scale: tuple[float, float], width: int, height: int) -> tuple[float, float]:
    """Width and height of a square box, as fractions of the picture."""
    side = rng.uniform(*scale) * min(width, height)
    return side / width, side / height


def _sign_sides(
    rng: random.Random, style: Style, text: str, turn: float, width: int, height: int
) -> tuple[float, float]:
    """Width and height, as fractions of the picture, of the box around a turned board for this text."""
    small, large = style.sign_letters
    size = small * (large / small) ** rng.random() * min(width, height)
    across = min((0.78 * len(text) + 1.1) * size, 0.92 * width)
    down = 1.75 * across / (0.78 * len(text) + 1.1) + across * math.sin(math.radians(abs(turn)))
    return across / width, down / height


def _box(rng: random.Random, sides: tuple[float, float]) -> tuple[float, float, float, float]:
    """A box around a jittered centre of one of the nine cells, inside the picture."""
    box_width, box_height = sides
    centre_x, centre_y = (rng.choice(_CELL_CENTRES) + rng.uniform(-_JITTER, _JITTER) for _ in range(2))
    centre_x = min(max(centre_x, box_width / 2), 1 - box_width / 2)
    centre_y = min(max(centre_y, box_height / 2), 1 - box_height / 2)
    left, top = centre_x - box_width / 2, centre_y - box_height / 2
    return round(left, 4), round(top, 4), round(left + box_width, 4), round(top + box_height, 4)


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """Shared area as a fraction of the smaller box."""
    shared = math.prod(max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    return shared / min((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))


def _new_look(rng: random.Random, taken: Collection[str], background: str, style: Style) -> dict[str, Any]:
    """The look of a thing whose name is not taken."""
    while True:
        look = _look(rng, style, background)
        if look["name"] not in taken:
            return {"colour": None, "shape": None, **look}

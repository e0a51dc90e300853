"""Which things lie where in a generated picture: values only, decided from (split, seed, index).

Every random stream is keyed by the split's name, so training scenes and held-out scenes never share a stream, whatever
their seeds. Scenes 2k and 2k+1 are twins: the same layout, with one name of thing replaced by another; each knows the
name that only its twin has (`absent`), which makes yes/no questions that differ by exactly one thing. Drawing is
`render`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from vlmfast.train.vocabulary import COLOURS, SHAPES, SIGN, SIGN_WORDS, cell_of, place_name, sticker_names

TEXTURES = ("plain", "gradient", "stripes", "dots", "checks")

_CELL_CENTRES = (0.2, 0.5, 0.8)
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

    thing_weights: tuple[float, ...] = (0.25, 0.40, 0.27, 0.08)
    """Relative frequency of scenes with 1, 2, 3, ... things."""
    thing_scale: tuple[float, float] = (0.34, 0.55)
    """Side of a thing as a fraction of the picture's shorter side."""
    shape_share: float = 0.35
    sign_share: float = 0.18
    """Share of scenes in which one thing is a sign."""
    repeat_share: float = 0.22
    """Share of scenes of two or more things in which a thing occurs more than once."""
    max_overlap: float = 0.12
    """Largest overlap of two boxes, as a fraction of the smaller one."""
    max_turn: float = 14.0
    """Rotation in degrees, either way."""
    max_noise: float = 7.0
    """Standard deviation of the pixel noise in grey levels."""
    picture_sides: tuple[int, int] = (224, 320)


POCKET = Style()

CROWDED = replace(
    POCKET,
    thing_weights=(0.0, 0.0, 0.2, 0.4, 0.4),
    thing_scale=(0.30, 0.50),
    sign_share=0.35,
    repeat_share=0.0,
    max_overlap=0.25,
)
"""More things a picture, for dense pretraining only: more labels for the same arithmetic."""


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
    texture: str
    noise: float
    things: tuple[Thing, ...]
    absent: str
    """Name of a thing that this scene lacks and its twin has."""
    swapped: str
    """Name of the thing that this scene has and its twin lacks."""

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
    width, height = (rng.randint(*style.picture_sides) for _ in range(2))
    background = rng.choice(COLOURS)
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
        texture=rng.choice(TEXTURES),
        noise=round(rng.uniform(0.0, style.max_noise), 2),
        things=tuple(sorted(things, key=lambda thing: (thing.cell, thing.box[0]))),
        swapped=swapped,
        absent=absent,
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
        word = rng.choice(SIGN_WORDS)
        sign = {"kind": Kind.SIGN, "name": SIGN, "text": word}
        # The largest thing goes first, while there is room; a scene never consists of a sign alone.
        chosen = [sign, *(chosen[:-1] if number > 1 else chosen)]
    return chosen


def _place_things(rng: random.Random, style: Style, width: int, height: int, background: str) -> list[Thing]:
    """The things with their boxes. A thing that finds no room is left out; the first always finds some."""
    things: list[Thing] = []
    for look in _looks(rng, style, background):
        for _ in range(_PLACEMENT_TRIES):
            box = _box(rng, style, look["kind"], width, height)
            if all(_overlap(box, thing.box) <= style.max_overlap for thing in things):
                limit = style.max_turn / (3 if look["kind"] is Kind.SIGN else 1)
                things.append(Thing(box=box, turn=round(rng.uniform(-limit, limit), 1), **look))
                break
    if all(thing.kind is Kind.SIGN for thing in things):
        return _place_things(rng, style, width, height, background)
    return things


def _box(rng: random.Random, style: Style, kind: Kind, width: int, height: int) -> tuple[float, float, float, float]:
    """A box around a jittered centre of one of the nine cells, inside the picture."""
    shorter = min(width, height)
    if kind is Kind.SIGN:
        box_width, box_height = rng.uniform(0.62, 0.86), rng.uniform(0.24, 0.32)
        centre_x = 0.5
    else:
        side = rng.uniform(*style.thing_scale) * shorter
        box_width, box_height = side / width, side / height
        centre_x = rng.choice(_CELL_CENTRES) + rng.uniform(-0.07, 0.07)
    centre_y = rng.choice(_CELL_CENTRES) + rng.uniform(-0.07, 0.07)
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

"""The closed world of the scenes: names of things, colours, places, sign words, and how English spells them.

Pure data and spelling rules; the sticker names come from `stickers/index.json` in their file order, which also numbers
the classes of dense pretraining.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond")

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "grey")

SIGN = "sign"

SIGN_WORDS = (
    "STOP", "OPEN", "SALE", "EXIT", "TAXI", "HOTEL", "CAFE", "BANK", "PARK", "ZOO", "SLOW", "HELP",
    "FREE", "HELLO", "MENU", "SHOP", "BUS", "GO", "YES", "NO", "LOVE", "MUSIC", "BEACH", "FARM",
    "GYM", "POOL", "MILK", "BREAD", "FIRE", "WAIT", "PUSH", "PULL", "KEEP", "NEW", "OLD", "FISH",
    "BAKERY", "BOOKS", "BRIDGE", "CASTLE", "CINEMA", "CLOSED", "COFFEE", "DANGER", "DOCTOR", "EAST", "ENTRY", "FERRY",
    "FLOWERS", "GARAGE", "GARDEN", "HARBOUR", "ICE", "JUICE", "KIOSK", "LAKE", "LIBRARY", "MARKET", "MUSEUM", "NORTH",
    "OFFICE", "PIANO", "POLICE", "POST", "QUIET", "RIVER", "SCHOOL", "SOUP", "SOUTH", "STATION", "TEA", "TICKETS",
    "TOYS", "UP", "WATER", "WELCOME", "WEST", "WINDOW",
)  # fmt: skip
"""New words go to the end: the order numbers the classes of dense pretraining."""

SIGN_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

CHARACTERS = f"{SIGN_CHARACTERS}abcdefghijklmnopqrstuvwxyz.,!?"
"""Every character of signs and pages; `Rendering.characters` holds 1 + the index into it."""

CODE_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
"""Letters of codes on signs: O and I would be taken for digits."""

PHOTOGRAPH = "photograph"
"""The background of a scene in front of a photograph."""

PHOTOGRAPHS = ("brick", "grass", "gravel", "galaxies", "wood", "tissue", "retina", "portrait")

PAGE = "page"
"""The background of a printed page."""

ORDINALS = ("first", "second", "third", "fourth", "fifth")

ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "middle", "right")

_PLACE_EDGES = (0.36, 0.64)

NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six")


@cache
def sticker_index() -> dict[str, dict[str, str]]:
    """Sticker name -> `file`, `plural`, `character`, in class order."""
    text = (files("vlmfast.train") / "stickers" / "index.json").read_text(encoding="utf-8")
    index: dict[str, dict[str, str]] = json.loads(text)
    return index


@cache
def sticker_names() -> tuple[str, ...]:
    """Every sticker's name, in class order."""
    return tuple(sticker_index())


def plural(name: str) -> str:
    """The plural of a thing's name; a shape keeps its colour in front ("red circles")."""
    if name in sticker_index():
        return sticker_index()[name]["plural"]
    return f"{name}s"


def with_article(name: str) -> str:
    """The name behind "a" or "an"."""
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def counted(name: str, number: int) -> str:
    """One or several of a thing in words: "a dog", "two dogs"."""
    return with_article(name) if number == 1 else f"{NUMBER_WORDS[number]} {plural(name)}"


def joined(parts: list[str]) -> str:
    """The parts as an English list: "a", "a and b", "a, b and c"."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def cell_of(x: float, y: float) -> tuple[int, int]:
    """Row and column, 0 to 2 each, of a point given as fractions of the picture."""
    row, column = (sum(value > edge for edge in _PLACE_EDGES) for value in (y, x))
    return row, column


def place_name(row: int, column: int) -> str:
    """The words for one of nine places: "top left", "left", "middle", ..."""
    if row == 1:
        return COLUMNS[column]
    return ROWS[row] if column == 1 else f"{ROWS[row]} {COLUMNS[column]}"


PLACES = tuple(place_name(row, column) for row in range(3) for column in range(3))

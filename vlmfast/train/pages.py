"""Printed pages: what stands on them and how it is set, decided without drawing anything."""

from __future__ import annotations

import random
from dataclasses import dataclass

from vlmfast.train.words import PAGE_WORDS

FONTS = ("roboto", "pt-serif", "roboto-mono", "roboto-slab", "roboto-condensed", "comic-neue")
"""Names of the typefaces in `fonts/`; each has weights 400 and 700."""

_NUM_LINES = (0.34, 0.30, 0.20, 0.11, 0.05)
"""Relative frequency of pages of 1, 2, 3, ... lines."""
_LINE_LENGTHS = (4, 18)
_ADVANCE = 0.56
"""Width of an average character, as a fraction of the size; drawing shrinks what turns out wider than its page."""
_TEXT_WIDTH = 0.90
_LEADING = (1.15, 1.6)
_NUMBER_SHARE = 0.04
_CAPITAL_SHARE = 0.12
_SENTENCE_SHARE = 0.3
_REPEAT_SHARE = 0.2
_SMALL_SHARE = 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of short lines. Lengths are fractions of the picture's width."""

    lines: tuple[str, ...]
    font: str
    bold: bool
    size: float
    """Of the font, from ascender to descender about; a capital letter is 0.7 of it high."""
    leading: float
    """From line to line, in sizes."""
    centred: bool
    turn: float
    """Degrees, anticlockwise."""

    @property
    def words(self) -> tuple[str, ...]:
        """Everything that is printed, in reading order."""
        return tuple(word for line in self.lines for word in line.split())

    @property
    def text(self) -> str:
        return " ".join(self.lines)


def sample_page(rng: random.Random, *, full_height: float | None = None, scale: float = 1.0) -> Page:
    """A page of 1 to 5 lines of 4 to 18 characters, or one that is filled with lines.

    Args:
        full_height: of a page to be filled, in widths of the page.
        scale: how much larger the letters are; the lines get shorter.
    """
    number = 1 + rng.choices(range(len(_NUM_LINES)), _NUM_LINES)[0]
    small = rng.random() < _SMALL_SHARE
    # At 512 pixels wide: capitals of 22 to 45 pixels, small ones of 16 to 22.
    size = rng.uniform(0.044, 0.062) if small else 0.062 * (0.125 / 0.062) ** rng.random()
    size *= scale
    shortest, longest = _LINE_LENGTHS
    room = min(longest, int(_TEXT_WIDTH / (size * _ADVANCE)))
    if full_height is not None:
        number = max(1, int(_TEXT_WIDTH * full_height / (size * sum(_LEADING) / 2)))
        shortest = longest = room = int(_TEXT_WIDTH / (size * _ADVANCE))
    lines = [_line(rng, rng.randint(shortest, max(shortest, room))) for _ in range(number)]
    if number > 1 and rng.random() < _REPEAT_SHARE:
        source, copy = rng.sample(range(number), 2)
        lines[copy] = lines[source]
    if rng.random() < _SENTENCE_SHARE:
        lines[0] = lines[0][0].upper() + lines[0][1:]
        lines[-1] += rng.choice((".", ".", "!", "?"))
    return Page(
        lines=tuple(lines),
        font=rng.choice(FONTS),
        bold=rng.random() < 0.4,
        size=round(size, 4),
        leading=round(rng.uniform(*_LEADING), 2),
        centred=rng.random() < 0.35,
        turn=round(rng.uniform(-3.0, 3.0), 1),
    )


def _line(rng: random.Random, wanted: int) -> str:
    """Words that fill a line of about `wanted` characters and never much more."""
    words = [_word(rng, wanted)]
    while (room := wanted - len(" ".join(words)) - 1) >= 2:
        words.append(_word(rng, room))
    if len(words) > 2 and rng.random() < 0.1:
        words[rng.randrange(len(words) - 1)] += ","
    return " ".join(words)


def _word(rng: random.Random, longest: int) -> str:
    while True:
        word = str(rng.randint(1, 999)) if rng.random() < _NUMBER_SHARE else rng.choice(PAGE_WORDS)
        if len(word) <= longest:
            return word.capitalize() if rng.random() < _CAPITAL_SHARE else word

"""Whether an answer is right: tolerant to phrasing, strict on content.

An answer is read back into content (which things and how many, colours, numbers, places, sign text) and compared with
what the question expects. An answer that names one thing too many, or hedges between two colours, is wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from vlmfast.train.vocabulary import COLOURS, NUMBER_WORDS, PLACES, SHAPES, SIGN, plural, sticker_names

_SYNONYMS = (
    (r"\bgray\b", "grey"),
    (r"\bupper\b", "top"),
    (r"\blower\b", "bottom"),
    (r"\b(?:centre|center)\b", "middle"),
    (r"\b(top|bottom)[- ](left|right)\b", r"\1 \2"),
    (r"\b(top|bottom)[- ]middle\b", r"\1"),
    (r"\bmiddle[- ](left|right)\b", r"\1"),
)
_SIGN_TEXT = re.compile(r"\b(?:says?|reads?)\s+[\"'“]?([A-Za-z0-9]+)[\"'”]?")


def is_right(kind: str, expect: Mapping[str, Any], text: str) -> bool:
    """Whether `text` answers a question of this kind, whose `Question.expect` is given."""
    return _CHECKS[kind](expect, text)


def things_in(text: str) -> Counter[str]:
    """Names of the things an answer speaks of, and how many of each; what a sign says is left out."""
    found: Counter[str] = Counter()
    for name, number, _ in _mentions(text):
        found[name] += number
    return found


def _mentions(text: str) -> list[tuple[str, int, str | None]]:
    """(name, how many, place that follows it in its sentence or None) of each mention, in order."""
    plain = _normalised(_SIGN_TEXT.sub("says", text))
    # NOTE: "the sign says ..." speaks of a sign that was named before; it is no second one.
    plain = re.sub(r"\bthe sign says\b", "", plain)
    matches = list(_name_pattern().finditer(plain))
    mentions = []
    ends = [*(match.start() for match in matches[1:]), len(plain)]
    for match, end in zip(matches, ends, strict=False):
        tail = plain[match.end() : end].partition(".")[0]
        places = _places(tail)
        number = NUMBER_WORDS.index(match["number"]) if match["number"] else 1
        mentions.append((_name_table()[match["name"]], number, places[0] if places else None))
    return mentions


def _what(expect: Mapping[str, Any], text: str) -> bool:
    return things_in(text) == Counter(expect["things"])


def _colour(expect: Mapping[str, Any], text: str) -> bool:
    return set(re.findall(rf"\b(?:{'|'.join(COLOURS)})\b", _normalised(text))) == {expect["colour"]}


def _exists(expect: Mapping[str, Any], text: str) -> bool:
    words = re.findall(r"[a-z]+", text.lower())
    return words[:1] == ["yes" if expect["exists"] else "no"]


def _count(expect: Mapping[str, Any], text: str) -> bool:
    found = re.findall(rf"\b(?:\d+|{'|'.join(NUMBER_WORDS)})\b", text.lower())
    return {int(word) if word.isdigit() else NUMBER_WORDS.index(word) for word in found} == {expect["number"]}


def _where(expect: Mapping[str, Any], text: str) -> bool:
    return set(_places(_normalised(text))) == {expect["place"]}


def _sign(expect: Mapping[str, Any], text: str) -> bool:
    said = _SIGN_TEXT.findall(text)
    return (said or re.findall(r"\b[A-Z0-9]{2,}\b", text)) == [expect["text"]]


def _caption(expect: Mapping[str, Any], text: str) -> bool:
    """Every thing and no other, and nothing wrong said about places, background or sign text."""
    plain = _normalised(text)
    colour = "|".join(COLOURS)
    backgrounds = re.findall(rf"\b({colour}) background\b|\bbackground is ({colour})\b", plain)
    said_colours = {word for pair in backgrounds for word in pair if word}
    places = {name: place for name, _, place in _mentions(text) if place is not None}
    said = _SIGN_TEXT.findall(text)
    return (
        _what(expect, text)
        and said_colours <= {expect["background"]}
        and all(expect["places"].get(name, place) == place for name, place in places.items())
        and all(word == expect["text"] for word in said)
    )


_CHECKS: dict[str, Callable[[Mapping[str, Any], str], bool]] = {
    "what": _what,
    "colour": _colour,
    "exists": _exists,
    "count": _count,
    "where": _where,
    "at": _what,
    "sign": _sign,
    "caption": _caption,
}


def _normalised(text: str) -> str:
    text = text.lower()
    for pattern, word in _SYNONYMS:
        text = re.sub(pattern, word, text)
    return text


def _places(text: str) -> list[str]:
    longest_first = sorted(PLACES, key=len, reverse=True)
    return re.findall(rf"\b(?:{'|'.join(longest_first)})\b", text)


@cache
def _name_table() -> dict[str, str]:
    """Every spelling, singular and plural -> name."""
    names = [*sticker_names(), *(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES), SIGN]
    return {spelling: name for name in names for spelling in (plural(name), name)}


@cache
def _name_pattern() -> re.Pattern[str]:
    spellings = sorted(_name_table(), key=len, reverse=True)
    return re.compile(rf"\b(?:(?P<number>{'|'.join(NUMBER_WORDS)}) )?(?P<name>{'|'.join(spellings)})\b")

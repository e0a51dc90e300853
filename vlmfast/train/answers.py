"""Whether an answer is right, or how much of it is: tolerant to phrasing, strict on content.

An answer is read back into content (which things and how many, colours, numbers, places, sign text) and compared with
what the question expects. An answer that names one thing too many, or hedges between two colours, is wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from vlmfast.train.vocabulary import COLOURS, NUMBER_WORDS, PHOTOGRAPH, PLACES, SHAPES, SIGN, plural, sticker_names

_SYNONYMS = (
    (r"\bgray\b", "grey"),
    (r"\bupper\b", "top"),
    (r"\blower\b", "bottom"),
    (r"\b(?:centre|center)\b", "middle"),
    (r"\b(top|bottom)[- ](left|right)\b", r"\1 \2"),
    (r"\b(top|bottom)[- ]middle\b", r"\1"),
    (r"\bmiddle[- ](left|right)\b", r"\1"),
)
_SIGN_TEXT = re.compile(r"\b(?:says?|reads?|saying|reading)\s+[\"'“]?([A-Za-z0-9]+)[\"'”]?")

_EASY_SHAPES = frozenset({"circle", "rectangle", "triangle"})
_EASY_COLOURS = frozenset({"black", "blue", "brown", "green", "grey", "red", "teal", "yellow"})


def is_right(kind: str, expect: Mapping[str, Any], text: str) -> bool:
    """Whether `text` answers a question of this kind, whose `Question.expect` is given."""
    return _CHECKS[kind](expect, text)


def credit(kind: str, expect: Mapping[str, Any], text: str) -> float:
    """How much of the answer is right, 0 to 1: words of a page, F1 of the things in a caption, else all or nothing."""
    if "words" in expect:
        return word_share(expect["words"], _printed(text) if kind == "caption" else text)
    if kind == "caption":
        wanted, found = Counter[str](expect["things"]), things_in(text)
        total = wanted.total() + found.total()
        return 2 * (wanted & found).total() / total if total else 1.0
    return float(is_right(kind, expect, text))


def things_in(text: str) -> Counter[str]:
    """Names of the things an answer speaks of, and how many of each; what a sign says is left out.

    "The dog" after "a dog" is the same dog.
    """
    found: Counter[str] = Counter()
    again: Counter[str] = Counter()
    for mention in _mentions(text):
        (again if mention.definite else found)[mention.name] += mention.number
    return found + Counter({name: 1 for name in again if name not in found})


def word_share(expected: Sequence[str], text: str) -> float:
    """Words in the right order, as a share of those wanted or of those given, whichever are more.

    Case and punctuation do not count. The longest common subsequence says which words are right.
    """
    wanted, given = _words(" ".join(expected)), _words(text)
    row = [0] * (len(given) + 1)
    for word in wanted:
        above = row[:]
        for position, other in enumerate(given, start=1):
            row[position] = above[position - 1] + 1 if word == other else max(above[position], row[position - 1])
    longer = max(len(wanted), len(given))
    return row[-1] / longer if longer else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mention:
    name: str
    number: int
    definite: bool
    place: str | None


def _mentions(text: str) -> list[_Mention]:
    """Every mention of a thing in order, with the place that its sentence gives it."""
    plain = _normalised(_SIGN_TEXT.sub("says", text))
    # NOTE: "the sign says ..." speaks of a sign that was named before; it is no second one.
    plain = re.sub(r"\bthe sign says\b", "", plain)
    return [mention for sentence in re.split(r"[.:!?]", plain) for mention in _mentions_of_sentence(sentence)]


def _mentions_of_sentence(sentence: str) -> list[_Mention]:
    """A sentence either puts places behind things or, beginning with a place, in front of them."""
    names = list(_name_pattern().finditer(sentence))
    ahead = bool(names) and bool(_places(sentence[: names[0].start()]))
    starts = [0, *(match.end() for match in names)]
    gaps = [
        sentence[start:end] for start, end in zip(starts, [*(m.start() for m in names), len(sentence)], strict=True)
    ]
    mentions = []
    for match, gap in zip(names, gaps[:-1] if ahead else gaps[1:], strict=True):
        places = _places(gap)
        number = match["number"]
        mentions.append(
            _Mention(
                name=_name_table()[match["name"]],
                number=NUMBER_WORDS.index(number) if number in NUMBER_WORDS else 1,
                definite=number == "the",
                place=(places[-1] if ahead else places[0]) if places else None,
            )
        )
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
    if "words" in expect:
        return word_share(expect["words"], _printed(text)) == 1.0
    plain = _normalised(text)
    colour = "|".join(COLOURS)
    backgrounds = re.findall(rf"\b({colour}) background\b|\bbackground is ({colour})\b|\b({PHOTOGRAPH})\b", plain)
    said_backgrounds = {word for words in backgrounds for word in words if word}
    places = {mention.name: mention.place for mention in _mentions(text) if mention.place is not None}
    said = _SIGN_TEXT.findall(text)
    return (
        _what(expect, text)
        and said_backgrounds <= {expect["background"]}
        and all(expect["places"].get(name, place) == place for name, place in places.items())
        and all(word == expect["text"] for word in said)
    )


def _relation(expect: Mapping[str, Any], text: str) -> bool:
    """The thing that lies there; the one that was asked about may be named again."""
    if "exists" in expect:
        return _exists(expect, text)
    found = things_in(text)
    if expect["about"] not in expect["things"]:
        del found[expect["about"]]
    return found == Counter(expect["things"])


def _page(expect: Mapping[str, Any], text: str) -> bool:
    return word_share(expect["words"], text) == 1.0


def _follow(expect: Mapping[str, Any], text: str) -> bool:
    return is_right(expect["asks"], expect, text)


def _easy(expect: Mapping[str, Any], text: str) -> bool:
    """One of easy-VQA's words and no other that answers the same sort of question; yes and no come first."""
    wanted = expect["word"]
    if wanted in ("yes", "no"):
        return _exists({"exists": wanted == "yes"}, text)
    words = set(re.findall(r"[a-z]+", _normalised(text)))
    rivals = _EASY_SHAPES if wanted in _EASY_SHAPES else _EASY_COLOURS
    return words & rivals == {_normalised(wanted)}


_CHECKS: dict[str, Callable[[Mapping[str, Any], str], bool]] = {
    "what": _what,
    "colour": _colour,
    "exists": _exists,
    "count": _count,
    "where": _where,
    "at": _what,
    "sign": _sign,
    "caption": _caption,
    "relation": _relation,
    "page": _page,
    "follow": _follow,
    "easy yes/no": _easy,
    "easy shape": _easy,
    "easy colour": _easy,
}


def _normalised(text: str) -> str:
    text = text.lower()
    for pattern, word in _SYNONYMS:
        text = re.sub(pattern, word, text)
    return text


def _places(text: str) -> list[str]:
    longest_first = sorted(PLACES, key=len, reverse=True)
    return re.findall(rf"\b(?:{'|'.join(longest_first)})\b(?! of\b)", text)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _printed(text: str) -> str:
    """What a caption says is printed."""
    return text.partition(":")[2] or text


@cache
def _name_table() -> dict[str, str]:
    """Every spelling, singular and plural -> name."""
    names = [*sticker_names(), *(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES), SIGN]
    return {spelling: name for name in names for spelling in (plural(name), name)}


@cache
def _name_pattern() -> re.Pattern[str]:
    spellings = sorted(_name_table(), key=len, reverse=True)
    counts = "|".join((*NUMBER_WORDS, "the"))
    return re.compile(rf"\b(?:(?P<number>{counts}) (?:(?:large|big|small|little) )?)?(?P<name>{'|'.join(spellings)})\b")

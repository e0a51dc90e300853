"""Captions: everything in a scene, in one of many ways to say it."""

from __future__ import annotations

import random
from collections.abc import Callable

from vlmfast.train.scenes import Scene, Thing
from vlmfast.train.vocabulary import COLOURS, NUMBER_WORDS, counted, joined, with_article
from vlmfast.train.wording import Question, at, is_or_are, one_of_a_kind, sign_text

_LARGE, _SMALL = 0.40, 0.24
"""Sides of a thing, as fractions of the picture's shorter side, from which it is called large and below which small."""
_MAX_PAGE_WORDS = 12

_PROMPTS = (
    "Describe the picture.",
    "Describe the image.",
    "Write a caption for the picture.",
    "Tell me about the picture.",
    "What does the picture show?",
    "Describe what you see.",
    "Give a description of the image.",
    "Caption this image.",
)


def caption(scene: Scene, rng: random.Random) -> Question | None:
    """Things, places, background, sign text, in varied order and words; of a page its text, unless that is long."""
    if scene.page is not None:
        if len(scene.page.words) > _MAX_PAGE_WORDS:
            return None
        text = scene.page.text
        answer = rng.choice((f"A printed page that says: {text}", f"The picture shows a printed page: {text}"))
        return Question(
            kind="caption",
            prompt=rng.choice(_PROMPTS),
            answer=answer,
            expect={"things": {}, "words": list(scene.page.words)},
        )
    return Question(
        kind="caption",
        prompt=rng.choice(_PROMPTS),
        answer=rng.choice(_STYLES if len(scene.things) <= _FEW else _TERSE_STYLES)(scene, rng),
        expect={
            "things": dict(scene.counts),
            "places": {thing.name: thing.place for thing in one_of_a_kind(scene)},
            "background": scene.background,
            "text": sign_text(scene),
        },
    )


def _background_first(scene: Scene, rng: random.Random) -> str:
    backdrop, placed = _backdrop(scene), _all_placed(scene, rng)
    opening = rng.choice(
        (
            f"On {backdrop} there {is_or_are(scene)} {placed}.",
            f"In front of {backdrop} we see {placed}.",
            f"{_backdrop_is(scene)} The picture shows {placed}.",
            f"Against {backdrop} the picture shows {placed}.",
        )
    )
    return opening + _sign_sentence(scene, rng)


def _background_last(scene: Scene, rng: random.Random) -> str:
    placed = _all_placed(scene, rng)
    opening = rng.choice(
        (f"The picture shows {placed}.", f"There {is_or_are(scene)} {placed}.", f"We see {placed}.", f"I see {placed}.")
    )
    return opening + _sign_sentence(scene, rng) + " " + _backdrop_sentence(scene, rng)


def _counted_first(scene: Scene, rng: random.Random) -> str:
    number = len(scene.things)
    things = "one thing" if number == 1 else f"{NUMBER_WORDS[number]} things"
    opening = rng.choice(
        (f"A picture of {things}", f"This picture shows {things}", f"There {_be(number)} {things} here")
    )
    return f"{opening}: {_all_placed(scene, rng)}.{_sign_sentence(scene, rng)} {_backdrop_sentence(scene, rng)}"


def _sentence_each(scene: Scene, rng: random.Random) -> str:
    sentences = []
    for name, number in scene.counts.items():
        if number > 1:
            sentences.append(f"There are {counted(name, number)}.")
            continue
        thing = next(thing for thing in scene.things if thing.name == name)
        words = _sized(scene, thing, rng)
        sentences.append(rng.choice((f"There is {words} {at(thing)}.", f"{_upper(words)} is {at(thing)}.")))
    return " ".join(sentences) + _sign_sentence(scene, rng) + " " + _backdrop_sentence(scene, rng)


def _places_first(scene: Scene, rng: random.Random) -> str:
    parts: list[str] = []
    for name, number in scene.counts.items():
        where = joined([at(thing) for thing in scene.things if thing.name == name])
        verb = "" if parts else f"there {_be(number)} "
        parts.append(f"{where} {verb}{counted(name, number)}")
    return f"{_upper(joined(parts))}.{_sign_sentence(scene, rng)} {_backdrop_sentence(scene, rng)}"


def _named_then_placed(scene: Scene, rng: random.Random) -> str:
    names = joined([counted(name, number) for name, number in scene.counts.items()])
    opening = f"{_upper(names)} {rng.choice(('on', 'in front of'))} {_backdrop(scene)}."
    alone = one_of_a_kind(scene)
    placed = [f"the {thing.name} is {at(thing)}" for thing in alone[:3]]
    return opening + (f" {_upper(joined(placed))}." if placed else "") + _sign_sentence(scene, rng)


def _plain(scene: Scene, rng: random.Random) -> str:
    """Short: what and where, and no more."""
    on = "on" if len(scene.things) == 1 else rng.choice(("on", "all on"))
    return f"{_upper(_all_placed(scene, rng))}, {on} {_backdrop(scene)}.{_sign_sentence(scene, rng)}"


_STYLES: tuple[Callable[[Scene, random.Random], str], ...] = (
    _background_first,
    _background_last,
    _counted_first,
    _sentence_each,
    _places_first,
    _named_then_placed,
    _plain,
)

_TERSE_STYLES = (_background_first, _background_last, _places_first, _plain)
_FEW = 4


def _all_placed(scene: Scene, rng: random.Random) -> str:
    sized = rng.random() < 0.3
    parts = []
    for name, number in scene.counts.items():
        if number > 1:
            parts.append(counted(name, number))
            continue
        thing = next(thing for thing in scene.things if thing.name == name)
        parts.append(f"{_sized(scene, thing, rng) if sized else with_article(name)} {at(thing)}")
    return joined(parts)


def _sized(scene: Scene, thing: Thing, rng: random.Random) -> str:
    """The thing with its article, called large or small where it is."""
    left, _, right, _ = thing.box
    side = (right - left) * scene.width / min(scene.width, scene.height)
    if thing.text is None and side >= _LARGE:
        return f"a {rng.choice(('large', 'big'))} {thing.name}"
    if thing.text is None and side < _SMALL:
        return f"a {rng.choice(('small', 'little'))} {thing.name}"
    return with_article(thing.name)


def _sign_sentence(scene: Scene, rng: random.Random) -> str:
    text = sign_text(scene)
    return "" if text is None else rng.choice((f" The sign says {text}.", f" The sign reads {text}."))


def _backdrop(scene: Scene) -> str:
    if scene.background in COLOURS:
        return with_article(f"{scene.background} background")
    return "a photograph"


def _backdrop_is(scene: Scene) -> str:
    return f"The background is {scene.background if scene.background in COLOURS else 'a photograph'}."


def _backdrop_sentence(scene: Scene, rng: random.Random) -> str:
    them = "it" if len(scene.things) == 1 else "them"
    return rng.choice((_backdrop_is(scene), f"Behind {them} is {_backdrop(scene)}."))


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]

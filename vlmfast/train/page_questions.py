"""Questions about a printed page: its whole text, or a line or word of it."""

from __future__ import annotations

import random

from vlmfast.train.pages import Page
from vlmfast.train.vocabulary import ORDINALS
from vlmfast.train.wording import Question


def page(page: Page, rng: random.Random) -> Question:
    """Mostly the whole text, of a long page a line; the answer is the bare text, lines joined by spaces."""
    long = len(page.lines) > len(ORDINALS)
    if len(page.lines) > 1 and rng.random() < (0.85 if long else 0.35):
        prompt, words = _line(page, rng)
    elif long or rng.random() < 0.25:
        prompt, words = _word(page, rng)
    else:
        words = page.words
        prompt = rng.choice(
            (
                "Read the page.",
                "What does the page say?",
                "What is printed on the page?",
                "Read the text.",
                "What does the text say?",
                "What is written here?",
            )
        )
    return Question(kind="page", prompt=prompt, answer=" ".join(words), expect={"words": list(words)})


def _line(page: Page, rng: random.Random) -> tuple[str, tuple[str, ...]]:
    last = len(page.lines) - 1
    asked = [*range(min(last + 1, len(ORDINALS))), *([last] if last >= len(ORDINALS) else [])]
    number = rng.choice(asked)
    by_end = number == last and (number >= len(ORDINALS) or rng.random() < 0.5)
    name = "last" if by_end else ORDINALS[number]
    prompt = rng.choice((f"What is the {name} line?", f"Read the {name} line.", f"What does the {name} line say?"))
    return prompt, tuple(page.lines[number].split())


def _word(page: Page, rng: random.Random) -> tuple[str, tuple[str, ...]]:
    name, word = rng.choice((("first", page.words[0]), ("last", page.words[-1])))
    prompt = rng.choice(
        (f"What is the {name} word on the page?", f"Which word is the {name}?", f"Read the {name} word.")
    )
    return prompt, (word,)

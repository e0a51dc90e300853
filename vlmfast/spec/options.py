"""How to draft. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import TypeAlias

from vlmfast.checks import require, require_kind, settle
from vlmfast.errors import OptionError

DRAFTERS = ("auto", "off", "lookup", "suffix", "model")
"""What can propose tokens ahead, by name."""
DEFAULT_DRAFTER = "auto"
"""What a model drafts with that was loaded without a word about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Drafting: tokens proposed ahead are verified together. It never changes an answer, only how soon it comes.

    Raises:
        OptionError: a value is out of its range.
    """

    drafter: str = "auto"
    """"lookup" continues what stood in the prompt or the answer before, "suffix" also what earlier answers held, "auto"
    takes whichever promises more; "model" asks the model `draft_model`; "off" drafts nothing."""
    draft_model: str | os.PathLike[str] | None = None
    """A smaller checkpoint with the same tokenizer, a folder or a hub name, loaded beside the model. If it takes
    pictures it is given them; a text model goes by the text. Answers that are drawn keep their distribution, and with
    a seed they stay the very same. Loaded with another drafter, it waits for requests that ask for "model"."""
    max_draft_tokens: int = 15
    """Most tokens drafted at once for one answer."""
    min_ngram: int = 2
    """Fewest tokens that must agree for a lookup."""
    max_ngram: int = 4
    """Most tokens that are compared in a lookup."""
    memory_tokens: int = 32_768
    """Tokens of earlier answers that "suffix" keeps, about 0.7 kB each; 0 keeps none. Caching's salt separates them.
    The memory is the loaded model's; a request can ask for 0: its answer is not kept."""
    adaptive: bool = True
    """Draft as much as has paid so far, down to nothing; False always drafts all it can. It holds for a loaded
    model, not for one request."""

    def __post_init__(self) -> None:
        require(self.drafter in DRAFTERS, "speculation", self.drafter, f"one of {', '.join(DRAFTERS)}")
        for name in ("max_draft_tokens", "min_ngram", "max_ngram", "memory_tokens"):
            require_kind(Integral, name, getattr(self, name), "a whole number")
        bounds = {"max_draft_tokens": 1, "min_ngram": 1, "max_ngram": self.min_ngram, "memory_tokens": 0}
        for name, least in bounds.items():
            require(getattr(self, name) >= least, name, getattr(self, name), f"at least {least}")
            settle(self, int, name)
        path = self.draft_model
        require(path is None or isinstance(path, (str, os.PathLike)), "draft_model", path, "a folder or a hub name")
        require(isinstance(self.adaptive, bool), "adaptive", self.adaptive, "True or False")

    @classmethod
    def of(cls, value: Drafting) -> Speculation:
        """The options, or those of a drafter by name.

        Raises:
            OptionError: there is no such drafter.
        """
        if isinstance(value, Speculation):
            return value
        return cls(drafter=value)

    def loadable(self) -> Speculation:
        """The same, to load a model with.

        Raises:
            OptionError: it drafts with a model and names none.
        """
        require(
            self.drafter != "model" or self.draft_model is not None,
            "draft_model",
            self.draft_model,
            'the folder of a smaller checkpoint for drafter="model"',
        )
        return self

    def request(self, value: Drafting) -> Speculation:
        """What a request asks for of a model that was loaded with these options; a name alone changes the drafter only.

        Raises:
            OptionError: it wants a draft model that was not loaded, or otherwise what is the same for all requests.
        """
        options = value if isinstance(value, Speculation) else replace(self, drafter=value)
        for name in ("adaptive", "memory_tokens"):
            asked, mine = getattr(options, name), getattr(self, name)
            if asked != mine and (name, asked) != ("memory_tokens", 0):
                raise OptionError(
                    f"speculation: {name} is {asked}, but the model was loaded with {mine}, which holds for all "
                    f"requests; load it with Speculation({name}={asked}), or ask with {mine}"
                )
        loaded = self.draft_model
        other = options.draft_model is not None and (loaded is None or Path(options.draft_model) != Path(loaded))
        if other or (options.drafter == "model" and loaded is None):
            raise OptionError(
                f"speculation: drafts by {options.draft_model or 'a model'}, but loaded is {loaded or 'none'}; "
                'load the model with Speculation(drafter="model", draft_model=...)'
            )
        return options

    @property
    def is_on(self) -> bool:
        return self.drafter != "off"

    def uses(self, drafter: str) -> bool:
        """Whether a drafter ("lookup", "suffix", "model") is among those asked for."""
        return self.drafter == drafter or (self.drafter == "auto" and drafter != "model")


Drafting: TypeAlias = Speculation | str
"""How to draft: options, or the name of a drafter with the default ones."""

NO_SPECULATION = Speculation(drafter="off")

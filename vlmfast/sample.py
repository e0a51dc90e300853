"""From scores to the next token. The sampler and any verifier of drafts share `probabilities`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vlmfast.errors import ModelError
from vlmfast.options import Sampling

_MIN_TEMPERATURE = 1e-5
"""Below it a draw is the likeliest token, and the division would leave the range of float32."""
NO_NUMBER = -1
"""What `likeliest` says of scores that are no numbers."""


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Returns logits [V] with those of seen tokens (bool [V]) made less likely (CTRL, arXiv 1909.05858, section 4.1).

    A positive score is divided by the penalty, a negative one multiplied.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Returns the distribution, float32 [V], that the next token is drawn from: temperature, then top-k, then top-p.

    logits [V] are the model's, repetition penalty applied. Temperature 0 puts everything on the likeliest token (the
    first of equals).
    """
    if sampling.temperature < _MIN_TEMPERATURE:
        return torch.nn.functional.one_hot(logits.float().max(-1).indices, logits.shape[-1]).float()
    scores = logits.float()
    scores = (scores - scores.max()) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kept = scores.topk(sampling.top_k).indices
        scores = torch.full_like(scores, float("-inf")).index_copy(0, kept, scores[kept])
    if sampling.top_p < 1.0:
        ordered, order = scores.softmax(-1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p  # mass before the token already reaches top_p
        beyond[0] = False
        scores = scores.index_fill(0, order[beyond], float("-inf"))
    return scores.softmax(-1)


def likeliest(logits: Tensor) -> list[int]:
    """For each row of logits [R, V] the first index of its largest score; `NO_NUMBER` where that is not finite.

    One call for all rows costs a fraction of one each. Torch's max is scalar code in bf16, vectorised in float32.
    """
    largest: Any = logits.float().max(-1)
    pairs = zip(largest.values.tolist(), largest.indices.tolist(), strict=True)
    return [index if math.isfinite(score) else NO_NUMBER for score, index in pairs]


class Sampler:
    """Chooses the tokens of one sequence; its draws depend on its seed alone, not on what else is in the batch."""

    def __init__(self, sampling: Sampling, prompt_ids: Tensor, vocab_size: int) -> None:
        self._sampling = sampling
        self._position = -1
        self._state = torch.empty(0)  # the generator's at `begin`
        self._new: list[int] = []
        """Tokens seen since `begin` for the first time."""
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=prompt_ids.device)
            self._seen[prompt_ids] = True
        self._generator: torch.Generator | None = None
        if sampling.temperature > 0.0:
            self._generator = torch.Generator()
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed)

    def begin(self, position: int) -> None:
        """Called before what follows `position` tokens is chosen: a second time for the same takes back the first."""
        if position == self._position:
            if self._generator is not None:
                self._generator.set_state(self._state)
            if self._seen is not None:
                self._seen[self._new] = False
        elif self._generator is not None:
            self._state = self._generator.get_state()
        self._position = position
        self._new = []

    def choose(self, logits: Tensor, best: int | None = None) -> int:
        """The next token for logits [V]; remembers it for the repetition penalty.

        Args:
            best: what `likeliest` says of these logits, where it was asked about many rows at once.

        Raises:
            ModelError: the largest score is no number.
        """
        scores, best = self._scores(logits, best)
        if self._generator is None:
            return self.remember(best)
        return self.remember(self.draw(probabilities(scores, self._sampling).cpu()))

    @property
    def is_greedy(self) -> bool:
        return self._generator is None

    @property
    def takes_best(self) -> bool:
        """Whether the largest score decides, whatever was chosen before."""
        return self._generator is None and self._seen is None

    def distribution(self, logits: Tensor, best: int | None = None) -> Tensor:
        """What `choose` would draw from: float32 [V] on the CPU.

        Raises:
            ModelError: the largest score is no number.
        """
        return probabilities(self._scores(logits, best)[0], self._sampling).cpu()

    def draw(self, distribution: Tensor) -> int:
        """A token drawn from a distribution [V], which need not sum to 1."""
        return int(torch.multinomial(distribution, 1, generator=self._generator))

    def chance(self) -> float:
        """A number drawn evenly from 0 (included) to 1."""
        return float(torch.rand((), generator=self._generator))

    def remember(self, token_id: int) -> int:
        """Notes a chosen token for the repetition penalty, and returns it."""
        if self._seen is not None and not self._seen[token_id]:
            self._new.append(token_id)
            self._seen[token_id] = True
        return token_id

    def _scores(self, logits: Tensor, best: int | None) -> tuple[Tensor, int]:
        """The logits with the repetition penalty, and the index of the largest."""
        if self._seen is not None:
            logits, best = penalise(logits, self._seen, self._sampling.repetition_penalty), None
        if best is None:
            (best,) = likeliest(logits[None])
        if best == NO_NUMBER:
            raise ModelError("the model's scores are not numbers; its weights are damaged or its dtype overflows")
        return logits, best

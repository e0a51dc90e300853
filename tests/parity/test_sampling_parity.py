"""The distribution that tokens are drawn from, against transformers' processors in the order generate applies them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from oracle import noise
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vlmfast.errors import ModelError
from vlmfast.options import Sampling
from vlmfast.sample import NO_NUMBER, Sampler, likeliest, penalise, probabilities

_VOCAB = 97
_CASES = list(itertools.product((0.3, 1.0, 2.5), (0, 1, 5, 200), (1.0, 0.9, 0.35, 0.01), (1.0, 1.7, 0.6)))


def _theirs(logits: torch.Tensor, seen: list[int], options: Sampling) -> torch.Tensor:
    processors = LogitsProcessorList()
    if options.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    processors.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        processors.append(TopPLogitsWarper(options.top_p))
    return processors(torch.tensor([seen]), logits[None].clone())[0].softmax(-1)


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "penalty"), _CASES)
def test_distribution_matches(temperature: float, top_k: int, top_p: float, penalty: float) -> None:
    """Guards temperature, top-k, top-p and repetition penalty together, on random logits."""
    options = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(_VOCAB, generator=generator) * 4
        seen = torch.randint(0, _VOCAB, (20,), generator=generator).tolist()
        mask = torch.zeros(_VOCAB, dtype=torch.bool)
        mask[seen] = True
        ours = probabilities(penalise(logits, mask, penalty), options)
        theirs = _theirs(logits, seen, options)
        assert torch.equal(ours > 0, theirs > 0)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.4},
        {"temperature": 1.8, "top_k": 300, "top_p": 0.5, "repetition_penalty": 1.0},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.99, "repetition_penalty": 0.8},
    ],
    ids=str,
)
def test_generate_applies_them_in_the_same_order(plain_twin: Any, options: dict[str, Any]) -> None:
    """Guards the order itself: the scores that transformers' own `generate` draws from, and our engine's sampler."""
    inputs = plain_twin.theirs.inputs([noise(40, 30)], "What is in the picture?")
    out = plain_twin.theirs.model.generate(
        **inputs,
        **options,
        do_sample=True,
        max_new_tokens=1,
        pad_token_id=0,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = inputs["input_ids"][0]
    seen = torch.zeros(out.logits[0].shape[-1], dtype=torch.bool)
    seen[ids] = True
    ours = probabilities(penalise(out.logits[0][0], seen, options["repetition_penalty"]), Sampling(**options))
    theirs = out.scores[0][0].softmax(-1)
    assert 1 < int((theirs > 0).sum()) < len(theirs)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_order_matters() -> None:
    """Negative control: top-p before temperature would keep other tokens, so the order above is really checked."""
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    right = probabilities(logits, Sampling(temperature=4.0, top_p=0.7))
    cut_first = probabilities(logits, Sampling(temperature=1.0, top_p=0.7))
    assert int((right > 0).sum()) > int((cut_first > 0).sum())


def test_greedy_takes_the_first_of_equals() -> None:
    """Guards ties at temperature 0: the distribution and the sampler agree on the first of the likeliest."""
    logits = torch.tensor([0.0, 5.0, 5.0, 1.0])
    assert probabilities(logits, Sampling()).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert Sampler(Sampling(), torch.tensor([0]), 4).choose(logits) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_are_read_as_one_is(dtype: torch.dtype) -> None:
    """Guards the rows that are looked at together: ties, wide rows, and scores that are no numbers."""
    rows = torch.randn(40, 3001, generator=torch.Generator().manual_seed(5)).to(dtype)
    rows[:, 3000] = rows[:, 7] = rows[:, 1500] = 9.0
    rows[3, 11], rows[5, 2999], rows[8] = float("nan"), float("inf"), float("-inf")
    expected = [NO_NUMBER if row in (3, 5, 8) else 7 for row in range(40)]
    assert likeliest(rows) == expected and likeliest(rows[:0]) == []
    sampler = Sampler(Sampling(), torch.tensor([0]), 3001)
    assert sampler.choose(rows[0], expected[0]) == sampler.choose(rows[0]) == 7
    for best in (NO_NUMBER, None):
        with pytest.raises(ModelError, match="not numbers"):
            sampler.choose(rows[3], best)


def test_draws_follow_the_distribution() -> None:
    """Guards the draw itself by chi-square over 4000 draws on five tokens; p < 1e-6 for a false alarm, seed fixed."""
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -9.0])
    options = Sampling(temperature=0.8, top_p=0.98, seed=3)
    sampler = Sampler(options, torch.tensor([0]), 5)
    counts = torch.zeros(5)
    for _ in range(4000):
        counts[sampler.choose(logits)] += 1
    expected = probabilities(logits, options) * 4000
    assert float(counts[expected == 0].sum()) == 0
    kept = expected > 0
    assert float(((counts - expected)[kept] ** 2 / expected[kept]).sum()) < 35.0


def test_chosen_tokens_are_penalised_too() -> None:
    """Guards the penalty over the answer, not only the prompt: the likeliest token is not chosen for ever."""
    logits = torch.tensor([1.0, 3.0, 2.5, 2.0])
    sampler = Sampler(Sampling(repetition_penalty=1.5), torch.tensor([0]), 4)
    assert [sampler.choose(logits) for _ in range(4)] == [1, 2, 1, 1]
    plain = Sampler(Sampling(), torch.tensor([0]), 4)
    assert [plain.choose(logits) for _ in range(3)] == [1, 1, 1]

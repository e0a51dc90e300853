"""FastV's pass over a decoder: against full attention that hides the same keys, and what its ranking follows from."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracle import FullAttention
from torch import Tensor

from vlmfast.options import FastV
from vlmfast.prune.fastv import PrunedPass, Span, run_pruned, top_places
from vlmfast.prune.plan import Pruning, Turn
from vlmfast_models.config import TextConfig
from vlmfast_models.decoder import Decoder

_LAYERS = 5
_ONE_TURN = (Turn(rank_at=29, visual=tuple(range(4, 24))),)
_TWO_TURNS = (
    Turn(rank_at=19, visual=(*range(2, 8), *range(10, 16))),
    Turn(rank_at=39, visual=tuple(range(24, 36))),
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    config = TextConfig.from_hf(
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 10,
            "max_position_embeddings": 128,
        },
        tie_embeddings=False,
    )
    torch.manual_seed(0)
    network = Decoder(config).eval().requires_grad_(False)
    for name, weight in network.named_parameters():
        weight.normal_(std=0.3) if weight.ndim > 1 else weight.fill_(1.0)
        assert name
    return network


class _Pass:
    """Full causal attention of every span by itself, which notes the keys of each layer."""

    def __init__(self) -> None:
        self.spans: Sequence[Span] = ()
        self._keys: dict[tuple[int, int], Tensor] = {}

    def over(self, spans: Sequence[Span]) -> _Pass:
        self.spans = spans
        return self

    def keys(self, index: int, layer: int) -> Tensor:
        return self._keys[index, layer]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        whole = FullAttention()
        for index, (a, b) in enumerate(self.spans):
            self._keys[index, layer] = key[a:b].transpose(0, 1)
        return torch.cat([whole.attend(layer, query[a:b], key[a:b], value[a:b]) for a, b in self.spans])


class _Eager(FullAttention):
    """Keeps the mean attention of all heads, [T, T], layer by layer."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__(mask)
        self.weights: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_tokens, num_heads, dim = query.shape
        keys = key.repeat_interleave(num_heads // key.shape[1], 1)
        causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
        scores = torch.einsum("thd,shd->hts", query, keys) / dim**0.5
        mask = causal if self._mask is None else self._mask
        self.weights[layer] = scores.masked_fill(~mask, float("-inf")).softmax(-1).mean(0)
        return super().attend(layer, query, key, value)


def _embeddings(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(seed))


def _run(decoder: Decoder, hidden: Tensor, turns: tuple[Turn, ...], fastv: FastV) -> PrunedPass:
    pruning = Pruning(turns=turns, steps=fastv.steps, rank=fastv.rank)
    return _run_all(decoder, hidden, torch.arange(len(hidden)), [(0, len(hidden))], {0: pruning})


def _run_all(
    decoder: Decoder, hidden: Tensor, positions: Tensor, spans: list[Span], prunings: dict[int, Pruning]
) -> PrunedPass:
    attention = _Pass()
    return run_pruned(decoder, hidden, positions, spans, prunings, attention.over, attention.keys, _LAYERS)


def _hidden_by_mask(decoder: Decoder, hidden: Tensor, dropped_from: dict[int, int]) -> Tensor:
    """All rows through all layers, where from layer `dropped_from[place]` on nobody else sees that place."""
    positions = torch.arange(len(hidden))
    for layer in range(_LAYERS):
        mask = torch.ones(len(hidden), len(hidden), dtype=torch.bool).tril()
        for place, first in dropped_from.items():
            if layer >= first:
                mask[:, place] = False
                mask[place, place] = True  # its own row, which no one reads
        hidden = decoder.run(hidden, positions, FullAttention(mask), layer, layer + 1)
    return hidden


def _kept(result: PrunedPass, layer: int) -> set[int]:
    return {place for plan in result.plans[0] if plan.layer == layer for place in plan.kept}


def _dropped(result: PrunedPass, turns: tuple[Turn, ...]) -> dict[int, int]:
    dropped: dict[int, int] = {}
    for layer in sorted({plan.layer for plan in result.plans[0]}):
        for turn in turns:
            for place in set(turn.visual) - _kept(result, layer):
                dropped.setdefault(place, layer)
    return dropped


@pytest.mark.parametrize("turns", [_ONE_TURN, _TWO_TURNS], ids=["one turn", "two turns"])
@pytest.mark.parametrize(
    "fastv",
    [
        FastV(layer=1, keep=0.25),
        FastV(layer=2, keep=0.5),
        FastV(layer=4, keep=2),
        FastV(layer=2, keep=0.5, then=((3, 0.25), (4, 2))),
        FastV(layer=2, keep=0.3, rank="random"),
    ],
    ids=str,
)
def test_dropped_tokens_are_as_if_hidden(decoder: Decoder, turns: tuple[Turn, ...], fastv: FastV) -> None:
    """Guards positions and rows: the rest of the pass equals full attention in which the dropped keys are masked."""
    hidden = _embeddings(45)
    result = _run(decoder, hidden, turns, fastv)
    dropped = _dropped(result, turns)
    rows = [place for place in range(45) if place not in dropped]
    assert dropped and result.rows.tolist() == rows
    torch.testing.assert_close(result.hidden, _hidden_by_mask(decoder, hidden, dropped)[rows], rtol=1e-4, atol=1e-5)
    other = dict(dropped)
    other[min(set(turns[0].visual) - set(dropped))] = other.pop(min(dropped))  # control: one place exchanged
    rest = [place for place in rows if place not in other]
    expected = _hidden_by_mask(decoder, hidden, other)[rest]
    assert not torch.allclose(result.hidden[torch.isin(result.rows, torch.tensor(rest))], expected, atol=1e-4)


@pytest.mark.parametrize("turns", [_ONE_TURN, _TWO_TURNS], ids=["one turn", "two turns"])
def test_tokens_are_ranked_by_the_turns_own_row_of_the_layer_before(decoder: Decoder, turns: tuple[Turn, ...]) -> None:
    """Guards the definition: layer K - 1, row `rank_at`, mean over heads, eager attention of all rows."""
    hidden = _embeddings(45)
    for layer in range(1, _LAYERS):
        result = _run(decoder, hidden, turns, FastV(layer=layer, keep=0.5))
        eager = _Eager()
        decoder.run(hidden, torch.arange(45), eager)
        for turn, plan in zip(turns, result.plans[0], strict=True):
            expected = eager.weights[layer - 1][turn.rank_at, list(turn.visual)]
            torch.testing.assert_close(plan.scores, expected, rtol=1e-4, atol=1e-6)
            best = sorted(turn.visual[place] for place in expected.topk(len(turn.visual) // 2).indices)
            assert list(plan.kept) == best
            for wrong in (eager.weights[layer], eager.weights[layer - 1].roll(1, 0)):
                assert not torch.allclose(plan.scores, wrong[turn.rank_at, list(turn.visual)], rtol=1e-2)


@pytest.mark.parametrize(
    "fastv", [FastV(layer=2, keep=1.0), FastV(layer=_LAYERS, keep=0.1), FastV(layer=99, keep=0.1), FastV(keep=500)]
)
def test_nothing_to_drop_is_off(decoder: Decoder, fastv: FastV) -> None:
    """Guards case 46: keep = 1 and layer = L are the plain pass, bit for bit."""
    hidden = _embeddings(45)
    result = _run(decoder, hidden, _TWO_TURNS, fastv)
    assert torch.equal(result.hidden, decoder.run(hidden, torch.arange(45), FullAttention()))
    assert torch.equal(result.rows, torch.arange(45)) and result.plans[0] == ()
    lossy = _run(decoder, hidden, _TWO_TURNS, FastV(keep=0.5))
    assert not torch.allclose(lossy.hidden[-1], result.hidden[-1], atol=1e-4)


def test_what_a_turn_keeps_does_not_depend_on_later_turns(decoder: Decoder) -> None:
    """Guards chats: turn 1 keeps the same in its own prompt and as the beginning of any longer one."""
    fastv = FastV(layer=2, keep=0.5, then=((3, 0.25),))
    whole = _run(decoder, _embeddings(45), _TWO_TURNS, fastv)
    alone = _run(decoder, _embeddings(45)[:20], _TWO_TURNS[:1], fastv)
    assert [plan.kept for plan in alone.plans[0]] == [plan.kept for plan in whole.plans[0][::2]]
    torch.testing.assert_close(alone.hidden, whole.hidden[: len(alone.hidden)], rtol=1e-4, atol=1e-5)


def test_sequences_of_a_pass_do_not_mix(decoder: Decoder) -> None:
    """Guards batches: prompts pruned at different layers, or not, beside each other equal each one alone."""
    cases: list[tuple[Tensor, Pruning | None]] = [
        (_embeddings(30), Pruning(turns=_ONE_TURN, steps=FastV(layer=2, keep=0.5).steps)),
        (_embeddings(7, seed=1), None),
        (_embeddings(45, seed=2), Pruning(turns=_TWO_TURNS, steps=FastV(layer=1, keep=0.5, then=((3, 2),)).steps)),
    ]
    spans, start = [], 0
    for hidden, _ in cases:
        spans.append((start, start + len(hidden)))
        start += len(hidden)
    prunings = {index: pruning for index, (_, pruning) in enumerate(cases) if pruning is not None}
    positions = torch.cat([torch.arange(len(hidden)) for hidden, _ in cases])
    together = _run_all(decoder, torch.cat([hidden for hidden, _ in cases]), positions, spans, prunings)
    for index, (hidden, pruning) in enumerate(cases):
        chosen = {} if pruning is None else {0: pruning}
        alone = _run_all(decoder, hidden, torch.arange(len(hidden)), [(0, len(hidden))], chosen)
        mine = (together.rows >= spans[index][0]) & (together.rows < spans[index][1])
        assert torch.equal(together.rows[mine] - spans[index][0], alone.rows)
        torch.testing.assert_close(together.hidden[mine], alone.hidden, rtol=1e-4, atol=1e-5)
        if pruning is not None:
            assert [plan.kept for plan in together.plans[index]] == [plan.kept for plan in alone.plans[0]]


def test_random_ranks_by_the_seed_alone(decoder: Decoder) -> None:
    """Guards the control: other turns other tokens, the same turn the same ones, not those of attention."""
    fastv = FastV(layer=2, keep=0.5, rank="random")

    def kept(seed: int, embeddings: int) -> tuple[int, ...]:
        turn = Turn(rank_at=29, visual=tuple(range(4, 24)), seed=zlib.crc32(bytes([seed])))
        return _run(decoder, _embeddings(45, seed=embeddings), (turn,), fastv).plans[0][0].kept

    assert kept(1, 0) == kept(1, 5) != kept(2, 0)
    assert kept(1, 0) != _run(decoder, _embeddings(45), _ONE_TURN, FastV(layer=2, keep=0.5)).plans[0][0].kept


@pytest.mark.parametrize(
    ("choose", "right"),
    [
        (top_places, True),
        (lambda scores, count: scores.topk(count).indices, False),
        (lambda scores, count: scores.sort(descending=True).indices[-count:].sort().values, False),
        (lambda scores, count: scores.topk(count).indices.sort().values + 1, False),
    ],
)
def test_top_places(choose: Callable[[Tensor, int], Tensor], right: bool) -> None:
    """Guards order and ties; known-wrong choices differ."""
    scores = torch.tensor([0.1, 0.5, 0.3, 0.5, 0.3, 0.9])
    cases: list[Any] = [(4, [1, 2, 3, 5]), (1, [5]), (6, [0, 1, 2, 3, 4, 5])]
    assert all(choose(scores, count).tolist() == expected for count, expected in cases) == right

"""The compiled decoder step against the layers in float32, and against itself however a batch is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from vlmfast.kv import SequenceKV
from vlmfast.runner import BatchAttention
from vlmfast_kernels.cpu.library import OFF_SWITCH
from vlmfast_kernels.cpu.step import DecoderStep, why_not_step
from vlmfast_kernels.ops.quant import Quantization
from vlmfast_models.config import TextConfig
from vlmfast_models.decoder import Decoder
from vlmfast_models.layers import prepare_for_inference
from vlmfast_models.rope import RopeConfig

_CPU = torch.device("cpu")
_REASON = why_not_step(_CPU, torch.bfloat16, 64)
_KINDS: tuple[Quantization | None, ...] = (None, "int8", "int4")
needs_step = pytest.mark.skipif(bool(_REASON), reason=_REASON or "compiled here")

_PLAIN = TextConfig(
    hidden_size=192,
    intermediate_size=256,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=300,
    max_positions=1024,
    rope=RopeConfig(theta=10_000.0),
    norm_eps=1e-5,
    activation="silu",
    attention_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_embeddings=False,
)
_BIASED = replace(_PLAIN, attention_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)
_CONFIGS = {
    "plain": _PLAIN,
    "odd sizes, biases, head norms": replace(
        _BIASED, hidden_size=50, intermediate_size=70, num_heads=4, num_kv_heads=2, head_dim=14, vocab_size=77
    ),
    "one kv head, 80 dimensions": replace(_PLAIN, num_heads=3, num_kv_heads=1, head_dim=80, tie_embeddings=True),
    "full heads, 128 dimensions": replace(_PLAIN, num_heads=2, num_kv_heads=2, head_dim=128),
    "200 dimensions": replace(_PLAIN, num_heads=2, num_kv_heads=1, head_dim=200, num_layers=1),
    "scaled positions": replace(
        _PLAIN,
        rope=RopeConfig(theta=500.0, kind="yarn", factor=4.0, original_positions=64, low=1, high=32, magnitude=1.2),
    ),
}
_TOKENS = 600
"""More than two chunks of 256 keys, and more than one tile of 512 rows."""


def _decoder(
    config: TextConfig, dtype: torch.dtype, kind: Quantization | None = None, *, prepared: bool = True
) -> Decoder:
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.08
            parameter.copy_((noise + (1.0 if "norm" in name else 0.0)).bfloat16())
    decoder = decoder.to(dtype)
    decoder.quantization = kind
    if prepared:
        prepare_for_inference(decoder)
    return decoder.requires_grad_(False)


def _page(config: TextConfig, dtype: torch.dtype = torch.bfloat16, capacity: int = 1024) -> SequenceKV:
    page = SequenceKV(config, capacity, _CPU, dtype)
    page.storage.fill_(float("nan"))  # what was never written must not be read
    return page


def _rows(config: TextConfig, count: int = _TOKENS, seed: int = 3) -> torch.Tensor:
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(seed)).bfloat16()


class _Layered:
    """The same attention without pages to be seen: the decoder then runs layer by layer."""

    def __init__(self, attention: BatchAttention) -> None:
        self.attend = attention.attend


def _attention(parts: list[tuple[int, int, SequenceKV]], dtype: torch.dtype = torch.bfloat16) -> BatchAttention:
    return BatchAttention(parts, _CPU, dtype)


@torch.inference_mode()
def _run(decoder: Decoder, rows: torch.Tensor, page: SequenceKV, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of rows that stand at positions `first` and on."""
    positions = torch.arange(first, first + len(rows))
    hidden = decoder.run(rows, positions, _attention([(0, len(rows), page)], rows.dtype))
    return hidden, decoder.logits(hidden)


def _loss(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.float() - exact).norm() / exact.norm())


@needs_step
@pytest.mark.parametrize("name", _CONFIGS)
def test_step_is_nearer_to_float32_than_torch_in_bf16(name: str) -> None:
    """Guards every stage: hidden states, logits, keys and values lose no more than torch's bf16 layers do."""
    config = _CONFIGS[name]
    rows = _rows(config)
    exact_page, step_page, torch_page = _page(config, torch.float32), _page(config), _page(config)
    exact = _run(_decoder(config, torch.float32), rows.float(), exact_page)
    plain = _run(_decoder(config, torch.bfloat16, prepared=False), rows, torch_page)
    out = _run(_decoder(config, torch.bfloat16), rows, step_page)
    for ours, theirs, wanted in zip(out, plain, exact, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == wanted.shape
        assert _loss(ours, wanted) <= _loss(theirs, wanted) < 0.05
    kept = [page.storage[:, :, :, :_TOKENS] for page in (step_page, torch_page, exact_page)]
    assert _loss(kept[0], kept[2].float()) <= _loss(kept[1], kept[2].float())
    assert step_page.lengths == [_TOKENS] * config.num_layers
    # Negative control: a token at another position is seen.
    with torch.inference_mode():
        parts = [(0, 2, _page(config))]
        moved = _decoder(config, torch.bfloat16).run(rows[:2], torch.tensor([0, 9]), _attention(parts))
    assert torch.equal(moved[0], out[0][0]) and not torch.equal(moved[1], out[0][1])


@needs_step
@pytest.mark.parametrize(("kind", "most"), [("int8", 0.06), ("int4", 0.25)])
@pytest.mark.parametrize("name", ["plain", "odd sizes, biases, head norms"])
def test_quantised_step_follows_the_layers(name: str, kind: Quantization, most: float) -> None:
    """Guards int8 and int4 end to end: near the float32 layers, further off than bf16, and not off by a layout."""
    config = _CONFIGS[name]
    rows = _rows(config, 40)
    exact = _run(_decoder(config, torch.float32), rows.float(), _page(config, torch.float32))
    out = _run(_decoder(config, torch.bfloat16, kind), rows, _page(config))
    wide = _run(_decoder(config, torch.bfloat16), rows, _page(config))
    for ours, bf16, wanted in zip(out, wide, exact, strict=True):
        assert _loss(bf16, wanted) < _loss(ours, wanted) < most


@needs_step
def test_int4_step_is_the_model_of_the_rounded_weights() -> None:
    """Guards int4's layout and scales: as near to float32 layers on the same rounded weights as int8 is to its own."""
    config, rows = _PLAIN, _rows(_PLAIN, 40)
    losses = []
    for kind in _KINDS[1:]:
        rounded = _decoder(config, torch.float32, kind)  # float32 has no step: the weights are rounded
        exact = _run(rounded, rows.float(), _page(config, torch.float32))[1]
        losses.append(_loss(_run(_decoder(config, torch.bfloat16, kind), rows, _page(config))[1], exact))
    assert losses[1] < 1.5 * losses[0] < 0.06


@needs_step
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["plain", "odd sizes, biases, head norms"])
def test_numbers_do_not_depend_on_how_a_sequence_is_cut(name: str, threads: int, kind: Quantization | None) -> None:
    """Guards exactness of chunked prefill, prefix hits and drafts: bit-equal for any cut and number of threads."""
    config = _CONFIGS[name]
    decoder, rows = _decoder(config, torch.bfloat16, kind), _rows(config)
    whole_page, page = _page(config), _page(config)
    whole, logits = _run(decoder, rows, whole_page)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cuts = [0, 1, 2, 5, 13, 14, 30, 255, 256, 257, 259, 520, 521, 529, 599, 600]
        for start, end in pairwise(cuts):
            hidden, scores = _run(decoder, rows[start:end], page, start)
            assert torch.equal(hidden, whole[start:end]), (start, end)
            assert torch.equal(scores, logits[start:end])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(page.storage[:, :, :, :_TOKENS], whole_page.storage[:, :, :, :_TOKENS])


@needs_step
def test_more_threads_than_cores_agree() -> None:
    """Guards the order of the stages: nothing is read half done. Repeated, as a race is rare."""
    decoder, rows = _decoder(_PLAIN, torch.bfloat16), _rows(_PLAIN, 24)
    whole, logits = _run(decoder, rows, _page(_PLAIN))
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        for _ in range(60):
            hidden, scores = _run(decoder, rows, _page(_PLAIN))
            assert torch.equal(hidden, whole) and torch.equal(scores, logits)
    finally:
        torch.set_num_threads(before)


@needs_step
@pytest.mark.parametrize("kind", _KINDS)
def test_numbers_do_not_depend_on_the_batch(kind: Quantization | None) -> None:
    """Guards batching: sequences of different lengths, decoding and prefilling side by side, in any order."""
    decoder = _decoder(_PLAIN, torch.bfloat16, kind)
    pasts, news = (300, 0, 40, 1, 513), (1, 70, 3, 1, 2)

    def begun(number: int) -> tuple[torch.Tensor, SequenceKV]:
        rows, page = _rows(_PLAIN, pasts[number] + news[number], seed=number), _page(_PLAIN, capacity=600 + number)
        if pasts[number]:
            _run(decoder, rows[: pasts[number]], page)
        return rows[pasts[number] :], page

    alone = [_run(decoder, rows, page, pasts[number])[0] for number in range(5) for rows, page in [begun(number)]]
    for order in ((0, 1, 2, 3, 4), (4, 2, 0), (1, 3), (3, 4, 2, 1, 0)):
        parts, rows, positions = [], [], []
        for number in order:
            start = sum(map(len, rows))
            new, page = begun(number)
            rows.append(new)
            parts.append((start, start + len(new), page))
            positions.append(torch.arange(pasts[number], pasts[number] + len(new)))
        with torch.inference_mode():
            together = decoder.run(torch.cat(rows), torch.cat(positions), _attention(parts))
        for number, (start, end, page) in zip(order, parts, strict=True):
            assert torch.equal(together[start:end], alone[number])
            assert page.lengths == [pasts[number] + news[number]] * _PLAIN.num_layers


@needs_step
def test_segments_of_layers_and_unequal_lengths() -> None:
    """Guards pruning: segments give the numbers of one call, and layers may hold fewer tokens than those below."""
    decoder, rows = _decoder(_PLAIN, torch.bfloat16), _rows(_PLAIN, 30)
    positions = torch.arange(30)
    whole, page = _run(decoder, rows, _page(_PLAIN))[0], _page(_PLAIN)
    with torch.inference_mode():
        lower = decoder.run(rows, positions, _attention([(0, 30, page)]), 0, 1)
        upper = decoder.run(lower, positions, _attention([(0, 30, page)]), 1)
        assert torch.equal(upper, whole) and page.lengths == [30, 30, 30]

        kept, pruned, layered = torch.tensor([0, 3, 4, 20, 29]), _page(_PLAIN), _page(_PLAIN)
        for target in (pruned, layered):
            lower = decoder.run(rows, positions, _attention([(0, 30, target)]), 0, 1)
            decoder.run(lower[kept], positions[kept], _attention([(0, 5, target)]), 1)
            assert target.lengths == [30, 5, 5]
        new, at = _rows(_PLAIN, 2, seed=9), torch.tensor([30, 31])
        out = decoder.run(new, at, _attention([(0, 2, pruned)]))
        expected = decoder.run(new, at, _Layered(_attention([(0, 2, layered)])))
        assert pruned.lengths == layered.lengths == [32, 7, 7]
        assert _loss(out, expected.float()) < 0.02
        assert _loss(decoder.run(new, at, _attention([(0, 2, _page(_PLAIN))])), expected.float()) > 0.05  # control


@needs_step
def test_layers_share_the_packed_weights() -> None:
    """Guards memory and attention of other kinds: no second copy of a weight, and layer by layer the same model."""
    decoder, rows = _decoder(_PLAIN, torch.bfloat16), _rows(_PLAIN, 20)
    left = sum(parameter.numel() for name, parameter in decoder.named_parameters() if name != "embed_tokens.weight")
    assert left == 7 * _PLAIN.hidden_size  # the norms
    prepare_for_inference(decoder)  # a second time: nothing happens
    step, logits = _run(decoder, rows, _page(_PLAIN))
    with torch.inference_mode():
        layered = decoder.run(rows, torch.arange(20), _Layered(_attention([(0, 20, _page(_PLAIN))])))
    assert layered.dtype == torch.bfloat16 and _loss(layered, step) < 0.02
    assert _loss(decoder.logits(layered), logits) < 0.02


@needs_step
def test_inputs_are_left_alone_and_nothing_is_nothing() -> None:
    """Guards callers: hidden states handed in are not written to; no row, no layer and no logits are fine."""
    decoder, rows = _decoder(_PLAIN, torch.bfloat16), _rows(_PLAIN, 4).float()
    kept = rows.clone()
    page = _page(_PLAIN)
    _run(decoder, rows, page)
    assert torch.equal(rows, kept)
    with torch.inference_mode():
        assert torch.equal(decoder.run(rows, torch.arange(4), _attention([(0, 4, page)]), 1, 1), rows)
        empty = decoder.run(rows[:0], torch.arange(0), _attention([(0, 0, page)]))
        assert empty.shape == (0, 192) and decoder.logits(empty).shape == (0, 300)
    assert page.lengths == [4, 4, 4]


@needs_step
def test_a_full_page_is_noticed_before_anything_is_written() -> None:
    """Guards memory beyond the page."""
    page = _page(_PLAIN, capacity=5)
    with pytest.raises(AssertionError, match="6 tokens in a page of 5"):
        _run(_decoder(_PLAIN, torch.bfloat16), _rows(_PLAIN, 6), page)
    assert page.lengths == [0, 0, 0] and page.storage.isnan().all()


@needs_step
@pytest.mark.parametrize("kind", _KINDS)
def test_a_broken_row_breaks_no_other(kind: Quantization | None) -> None:
    """Guards neighbours and the sampler's check: NaN stays in its sequence, and is seen in its logits."""
    decoder, rows = _decoder(_PLAIN, torch.bfloat16, kind), _rows(_PLAIN, 6)
    clean = _run(decoder, rows[:3], _page(_PLAIN))[1]
    rows[4, 7] = float("nan")
    with torch.inference_mode():
        parts = [(0, 3, _page(_PLAIN)), (3, 6, _page(_PLAIN))]
        logits = decoder.logits(decoder.run(rows, torch.tensor([0, 1, 2] * 2), _attention(parts)))
    assert torch.equal(logits[:3], clean)
    assert logits[3].isfinite().all() and not logits[4:].isfinite().any()


@needs_step
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", ["plain", "odd sizes, biases, head norms", "one kv head, 80 dimensions"])
def test_going_on_in_one_call_is_going_on_step_by_step(name: str, kind: Quantization | None) -> None:
    """Guards drafting: tokens, keys and values are those of single steps; sequences of different lengths together."""
    config = _CONFIGS[name]
    decoder, num_choices = _decoder(config, torch.bfloat16, kind), config.vocab_size - 9
    pasts, steps = (3, 300, 0), 6
    tokens = torch.tensor([5, 9, 11])
    pages: dict[str, list[SequenceKV]] = {"one call": [], "steps": []}
    for found in pages.values():
        for number, past in enumerate(pasts):
            found.append(_page(config))
            if past:
                _run(decoder, _rows(config, past, seed=number), found[-1])
    with torch.inference_mode():
        chosen = decoder.go_on(tokens, torch.tensor(pasts), pages["one call"], steps, num_choices)
        assert chosen is not None and chosen.shape == (steps, 3)
        for step, expected in enumerate(chosen):
            parts = [(index, index + 1, page) for index, page in enumerate(pages["steps"])]
            positions = torch.tensor(pasts) + step
            hidden = decoder.run(decoder.embed(tokens), positions, _attention(parts))
            tokens = decoder.logits(hidden)[:, :num_choices].argmax(-1)
            assert torch.equal(tokens, expected)
    for one, other, past in zip(*pages.values(), pasts, strict=True):
        assert one.lengths == other.lengths == [past + steps] * config.num_layers
        assert torch.equal(one.storage[:, :, :, : past + steps], other.storage[:, :, :, : past + steps])
    assert len(set(chosen.flatten().tolist())) > 3, "nothing to tell apart"


@needs_step
@pytest.mark.parametrize("rows", [600, 812])
def test_the_workspace_holds_short_last_tiles(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory: rows behind the first 512 are few, and many threads share out their keys in more pieces."""
    config = replace(_PLAIN, max_positions=4096)
    decoder, page = _decoder(config, torch.bfloat16), SequenceKV(config, 4096, _CPU, torch.bfloat16)
    page.storage.zero_()
    page.lengths[:] = [3000] * config.num_layers
    guard, used, sized = 1 << 21, list[torch.Tensor](), DecoderStep._memory

    def guarded(self: DecoderStep, *sizes: int) -> int:
        self._workspace = torch.empty(0, dtype=torch.uint8)
        sized(self, *sizes)
        used.append(torch.cat((self._workspace.zero_(), torch.full((guard,), 77, dtype=torch.uint8))))
        return used[-1].data_ptr()

    monkeypatch.setattr(DecoderStep, "_memory", guarded)
    before = torch.get_num_threads()
    torch.set_num_threads(16)
    try:
        _run(decoder, _rows(config, rows), page, 3000)
    finally:
        torch.set_num_threads(before)
    assert len(used) == 2 and all(bool((memory[-guard:] == 77).all()) for memory in used)


def test_going_on_needs_the_step() -> None:
    """Guards callers: they are told, and nothing has happened."""
    decoder, page = _decoder(_PLAIN, torch.float32), _page(_PLAIN, torch.float32)
    assert decoder.go_on(torch.tensor([1]), torch.tensor([0]), [page], 3, 100) is None and page.lengths == [0, 0, 0]


@pytest.fixture
def without_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine without the compiled library."""
    monkeypatch.setenv(OFF_SWITCH, "0")
    yield


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.05), ("int4", 0.25)])
def test_without_the_step_weights_are_rounded(without_step: None, kind: Quantization, most: float) -> None:
    """Guards machines without it: the same weights as int8 or int4 has, at bf16's speed, and `explain` says so."""
    decoder, rows = _decoder(_PLAIN, torch.bfloat16, kind), _rows(_PLAIN, 20)
    assert f"to {kind} without gain" in decoder.explain() and OFF_SWITCH in decoder.explain()
    exact = _run(_decoder(_PLAIN, torch.float32), rows.float(), _page(_PLAIN, torch.float32))[1]
    rounded = _run(_decoder(_PLAIN, torch.float32, kind), rows.float(), _page(_PLAIN, torch.float32))[1]
    assert 1e-3 < _loss(rounded, exact) < most
    assert _loss(_run(decoder, rows, _page(_PLAIN))[1], rounded) < 0.03


def test_a_tied_head_is_rounded_but_not_the_embeddings(without_step: None) -> None:
    """Guards the embeddings, which the head shares memory with until it is rounded; int4 leaves the head int8."""
    config = replace(_PLAIN, tie_embeddings=True)
    plain, int8, int4 = (_decoder(config, torch.float32, kind) for kind in _KINDS)
    assert torch.equal(plain.embed_tokens.weight, int8.embed_tokens.weight)
    assert torch.equal(plain.embed_tokens.weight, int4.embed_tokens.weight)
    assert not torch.equal(plain.head.weight, int8.head.weight)
    assert torch.equal(int4.head.weight, int8.head.weight)


def test_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `explain`: what runs, and why not the step."""
    assert "this is torch.float32" in _decoder(_PLAIN, torch.float32).explain()
    assert "heads of 300 dimensions" in why_not_step(_CPU, torch.bfloat16, 300)
    assert "heads of 15 dimensions" in why_not_step(_CPU, torch.bfloat16, 15)
    text = _decoder(_PLAIN, torch.bfloat16, "int8").explain()
    assert text.endswith("chosen") and "int8" in text

"""Keys and values of a sequence against a plain list of tokens, under any order of operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmfast.kv import KVPages, SequenceKV, bytes_per_token
from vlmfast_models.config import TextConfig

_LAYERS, _GROUPS, _DIM, _CAPACITY = 3, 2, 4, 16


def _config() -> TextConfig:
    return TextConfig.from_hf(
        {
            "hidden_size": 16,
            "intermediate_size": 8,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": _GROUPS,
            "head_dim": _DIM,
            "vocab_size": 10,
            "max_position_embeddings": _CAPACITY,
        },
        tie_embeddings=False,
    )


def _kv() -> SequenceKV:
    kv = SequenceKV(_config(), _CAPACITY, torch.device("cpu"), torch.float32)
    kv._pages.fill_(float("nan"))  # what was never written must never be read
    return kv


def _rows(token: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value [G, D] of a token at a layer: numbers that occur nowhere else."""
    base = torch.arange(_GROUPS * _DIM, dtype=torch.float32).view(_GROUPS, _DIM) / 100
    return base + token * 10 + layer, -(base + token * 10 + layer) - 1000


class _Model:
    """A sequence as a list of token numbers, and the cache beside it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.kv = _kv()

    def append(self, tokens: list[int]) -> None:
        self.tokens += tokens
        for layer in range(_LAYERS):
            pairs = [_rows(token, layer) for token in tokens]
            keys, values = self.kv.append(
                layer,
                torch.stack([key for key, _ in pairs]) if pairs else torch.empty(0, _GROUPS, _DIM),
                torch.stack([value for _, value in pairs]) if pairs else torch.empty(0, _GROUPS, _DIM),
            )
            self._compare(layer, keys, values)

    def check(self) -> None:
        """Reads everything back by appending nothing."""
        assert self.kv.lengths == [len(self.tokens)] * _LAYERS
        self.append([])

    def _compare(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert keys.shape == values.shape == (_GROUPS, len(self.tokens), _DIM)
        for at, token in enumerate(self.tokens):
            key, value = _rows(token, layer)
            assert torch.equal(keys[:, at], key) and torch.equal(values[:, at], value)


@given(data=st.data())
def test_random_operations_equal_a_list(data: st.DataObject) -> None:
    """Guards append, truncate, compact and fork together: what drafts and prefixes do to a page."""
    model, next_token = _Model(), 1
    for _ in range(data.draw(st.integers(1, 8))):
        kind = data.draw(st.sampled_from(["append", "truncate", "compact", "fork"]))
        room = _CAPACITY - len(model.tokens)
        if kind == "append":
            count = data.draw(st.integers(0, min(room, 5)))
            model.append(list(range(next_token, next_token + count)))
            next_token += count
        elif kind == "truncate":
            length = data.draw(st.integers(0, _CAPACITY))
            model.kv.truncate(length)
            model.tokens = model.tokens[:length]
        elif kind == "compact":
            start = data.draw(st.integers(0, len(model.tokens)))
            offsets = st.integers(0, max(len(model.tokens) - start - 1, 0))
            path = sorted(data.draw(st.sets(offsets))) if start < len(model.tokens) else []
            model.kv.compact(len(model.tokens) - start, path)
            model.tokens = model.tokens[:start] + [model.tokens[start + offset] for offset in path]
        else:
            length = data.draw(st.integers(0, len(model.tokens)))
            copy = _Model()
            copy.append([99, 98])
            copy.kv.fork(model.kv, length)
            copy.tokens = model.tokens[:length]
            model.check()
            model = copy
        model.check()


def test_a_fork_does_not_share_memory() -> None:
    """Guards branches of one prefix: writing to one must not show in the other."""
    one, two = _Model(), _Model()
    one.append([1, 2, 3])
    two.kv.fork(one.kv, 2)
    two.tokens = [1, 2]
    two.append([7])
    one.check()
    two.check()


@given(num_tokens=st.integers(2, 8), data=st.data())
def test_segments_go_in_as_they_came_out(num_tokens: int, data: st.DataObject) -> None:
    """Guards known prefixes: segments copied out, split and loaded elsewhere are the tokens they were, and keep being
    so whatever their page is used for."""
    one, two = _Model(), _Model()
    one.append(list(range(1, num_tokens + 1)))
    cut, at = data.draw(st.integers(1, num_tokens)), data.draw(st.integers(1, num_tokens - 1))
    whole = one.kv.copy_out(0, num_tokens)
    assert whole.num_bytes == num_tokens * bytes_per_token(_config(), torch.float32)
    first, rest = whole.split(at)
    assert first.num_bytes + rest.num_bytes == whole.num_bytes
    one.kv.truncate(0)
    one.tokens = []
    one.append([99] * num_tokens)
    two.kv.load(first, at)
    two.kv.load(rest, num_tokens - at)
    two.tokens = list(range(1, num_tokens + 1))
    two.check()
    two.kv.truncate(0)
    two.kv.load(whole, cut)
    two.tokens = two.tokens[:cut]
    two.append([50])
    two.check()


def test_layers_keep_lengths_of_their_own() -> None:
    """Guards layers above a pruning boundary, which hold fewer tokens: truncation leaves shorter layers alone."""
    kv = _kv()
    rows = torch.zeros(5, _GROUPS, _DIM)
    kv.append(0, rows, rows)
    kv.append(1, rows[:2], rows[:2])
    kv.truncate(3)
    assert kv.lengths == [3, 2, 0]


def test_a_full_page_refuses_more() -> None:
    """Guards the page's end: an overflow is an assertion, never a silent cut."""
    kv = _kv()
    rows = torch.zeros(_CAPACITY + 1, _GROUPS, _DIM)
    with pytest.raises(AssertionError, match="in a page of"):
        kv.append(0, rows, rows)


def test_pages_are_made_once_and_kept() -> None:
    """Guards memory: an id asks for its tensors when first used, and the next holder gets the same."""
    pages = KVPages(_config(), _CAPACITY, torch.device("cpu"), torch.float32)
    assert pages.page(3) is pages.page(3)
    assert pages.page(3) is not pages.page(0)


def test_a_settled_page_forgets_by_tokens() -> None:
    """Guards steps after a pruned prompt: short layers forget the same tokens, and a page used anew starts even."""
    kv = _kv()
    rows = torch.zeros(7, _GROUPS, _DIM)
    for layer, count in enumerate((5, 2, 2)):
        kv.append(layer, rows[:count], rows[:count])
    kv.settle(5)
    for layer in range(3):
        kv.append(layer, rows[:2], rows[:2])
    kv.truncate(6)
    assert kv.lengths == [6, 3, 3] and kv.keys(1).shape == (_GROUPS, 3, _DIM)
    kv.truncate(0)
    for layer in range(3):
        kv.append(layer, rows[:4], rows[:4])
    kv.truncate(3)
    assert kv.lengths == [3, 3, 3]

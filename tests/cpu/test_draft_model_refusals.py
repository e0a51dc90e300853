"""Draft models whose configuration does not go with their tokenizer or with the machine's memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from drafts import GREEDY

from vlmfast import kv
from vlmfast.errors import ConfigError
from vlmfast.spec.options import Speculation


@pytest.fixture
def text_model(checkpoint_of: Callable[..., Path], tmp_path: Path) -> Callable[..., Speculation]:
    """text_model(size of the vocabulary, positions) -> options that draft with such a Llama."""

    def made(vocab_size: int, positions: int = 512) -> Speculation:
        config = transformers.LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(checkpoint_of() / name, tmp_path)
        return Speculation(drafter="model", draft_model=tmp_path, adaptive=False)

    return made


def test_fewer_embeddings_than_tokens_are_refused(
    load_vlm: Callable[..., Any], text_model: Callable[..., Speculation]
) -> None:
    """Guards drafts that fail in the middle of an answer, at the first token that has no embedding."""
    with pytest.raises(ConfigError, match="has 500 embeddings, but its tokenizer 512 tokens"):
        load_vlm(speculation=text_model(500))
    load_vlm(speculation=text_model(512))


def test_any_number_of_positions_may_be_claimed(
    load_vlm: Callable[..., Any], text_model: Callable[..., Speculation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards memory: tables of rotary positions are no longer than what fits."""
    monkeypatch.setattr(kv, "total_memory", lambda device: 2**26)
    loaded = load_vlm(speculation=text_model(512, 2**31 - 1))
    assert loaded._speculator._model._config.max_positions == 2**26 // 64 // (2 * 16 * 4)
    assert loaded.describe(None, "What?", sampling=GREEDY).usage.draft_tokens

"""Writes a trained pocket as an ordinary Hugging Face folder that transformers and the runtime load alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from vlmfast.train import shape
from vlmfast.train.tokens import special_ids, write_tokenizer
from vlmfast_models.families.idefics3 import Idefics3
from vlmfast_models.weights import save_checkpoint


def write_pocket(
    model: Idefics3, tokenizer: Tokenizer, size: shape.Size, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Configuration, tokenizer and weights; files of the same names are replaced, others are left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = special_ids(tokenizer)
    files: dict[str, dict[str, Any]] = {
        "config.json": shape.model_config(size, tokenizer.get_vocab_size(), ids),
        "generation_config.json": shape.generation_config(ids),
        "preprocessor_config.json": shape.preprocessor_config(size),
        "processor_config.json": shape.processor_config(),
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(tokenizer, folder, model.config.text.max_positions)
    save_checkpoint(model, folder, dtype=dtype)

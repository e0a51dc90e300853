"""Prefixes on disk: a new process answers about a known picture without a prefill of it, and exactly as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracle import check_idle, noise

from vlmfast import VLM, Caching, Sampling
from vlmfast.cache.prefix_disk import open_prefix_store
from vlmfast.metrics import Counters

_GREEDY = Sampling(max_new_tokens=10)
_A, _B = noise(61, 37), noise(61, 37, 5)
_QUESTION = "What is in the picture?"


def _caching(folder: Path, **options: Any) -> Caching:
    return Caching(features_ram_bytes=0, features_disk_bytes=0, prefix_disk=True, folder=folder, **options)


@pytest.fixture
def open_vlm(load_vlm: Callable[..., Any], tmp_path: Path) -> Callable[..., VLM]:
    """open_vlm(...) -> a VLM that knows what the folder knows, as a new process would."""

    def load(folder: Path | None = None, dtype: str = "float32", **options: Any) -> VLM:
        loaded: VLM = load_vlm(folder, dtype=dtype, caching=_caching(tmp_path, **options))
        return loaded

    return load


def test_a_new_process_knows_the_picture(open_vlm: Callable[..., VLM], load_vlm: Callable[..., Any]) -> None:
    """Guards the second tier: another question after a restart costs no encoding and no prefill of the picture."""
    plain = load_vlm(caching=False)
    open_vlm().describe(_A, _QUESTION, sampling=_GREEDY)
    for question in ("How many?", _QUESTION):
        loaded = open_vlm()
        answer = loaded.describe(_A, question, sampling=_GREEDY)
        assert answer.token_ids == plain.describe(_A, question, sampling=_GREEDY).token_ids
        assert answer.usage.images_from_prefix == 1 and answer.usage.images_encoded == 0
        assert answer.usage.visual_tokens < answer.usage.cached_tokens < answer.usage.prompt_tokens
        check_idle(loaded)


def test_each_picture_of_a_prompt_has_a_record(open_vlm: Callable[..., VLM], load_vlm: Callable[..., Any]) -> None:
    """Guards prompts that share only their first pictures, and the order of pictures."""
    plain = load_vlm(caching=False)
    open_vlm().describe([_A, _B], _QUESTION, sampling=_GREEDY)
    for images, known in (([_A, _B], 2), ([_A], 1), ([_B, _A], 0), ([_A, _A], 1)):
        answer = open_vlm().describe(images, _QUESTION, sampling=_GREEDY)
        assert answer.usage.images_from_prefix == known
        assert answer.token_ids == plain.describe(images, _QUESTION, sampling=_GREEDY).token_ids


@pytest.mark.parametrize("what", ["weights", "dtype", "salt", "picture", "text before"])
def test_what_makes_another_prefix(open_vlm: Callable[..., VLM], checkpoint_of: Callable[..., Path], what: str) -> None:
    """Guards the name of a record: whatever changes keys and values must miss."""
    open_vlm().describe(_A, _QUESTION, sampling=_GREEDY)
    folder = checkpoint_of(seed=1) if what == "weights" else None
    dtype = "bfloat16" if what == "dtype" else "float32"
    loaded = open_vlm(folder, dtype, salt="tenant" if what == "salt" else "")
    chat = loaded.chat(_B if what == "picture" else _A, system="Be short." if what == "text before" else None)
    assert chat.ask(_QUESTION, sampling=_GREEDY).usage.images_from_prefix == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "other header"])
def test_a_bad_record_is_dropped(
    open_vlm: Callable[..., VLM], load_vlm: Callable[..., Any], tmp_path: Path, damage: str
) -> None:
    """Guards case 18: a record that is not what was written is computed anew, and written anew."""
    expected = load_vlm(caching=False).describe(_A, _QUESTION, sampling=_GREEDY).token_ids
    open_vlm().describe(_A, _QUESTION, sampling=_GREEDY)
    store = open_prefix_store(_caching(tmp_path), Counters())
    assert store is not None
    ((key, value),) = store.entries(lambda entry, value: (entry.key, bytes(value)))
    if damage == "cut":
        store.put(key, [value[:-4]])
    elif damage == "other header":
        store.put(key, [b"\xff" + value[1:]])
    else:
        flipped = bytearray(value)
        flipped[len(value) // 2] ^= 1
        environment = store._environment
        frame = environment.read(lambda tables: bytes(tables.txn.get(key, db=tables.entries)), b"")
        changed = frame.replace(value, bytes(flipped))
        environment.write(lambda tables: tables.txn.put(key, changed, db=tables.entries), None)
    answer = open_vlm().describe(_A, _QUESTION, sampling=_GREEDY)
    assert answer.usage.images_from_prefix == 0 and answer.token_ids == expected
    assert open_vlm().describe(_A, _QUESTION, sampling=_GREEDY).usage.images_from_prefix == 1


def test_without_the_option_nothing_is_written(load_vlm: Callable[..., Any], tmp_path: Path) -> None:
    caching = Caching(features_ram_bytes=0, features_disk_bytes=0, folder=tmp_path)
    load_vlm(caching=caching).describe(_A, _QUESTION, sampling=_GREEDY)
    assert not list(tmp_path.iterdir())

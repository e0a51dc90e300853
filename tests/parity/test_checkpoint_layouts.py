"""The same checkpoint in every layout that occurs: shards, hub files, transformers 5 files, SmolVLM's model type."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from oracle import noise
from reference import Reference

from vlmfast import Sampling
from vlmfast.testing import Shape

_GREEDY = Sampling(max_new_tokens=24)
_PICTURE = noise(70, 40)


@pytest.fixture(scope="module")
def expected(vlm: Any) -> tuple[int, ...]:
    return vlm.describe(_PICTURE, "What is it?", sampling=_GREEDY).token_ids


@pytest.fixture
def folder(checkpoint_of: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy that a test may rearrange."""
    return Path(shutil.copytree(checkpoint_of(), tmp_path / "copy"))


def _hub_layout(folder: Path) -> None:
    """What transformers 4 wrote and the hub holds: preprocessor_config.json and chat_template.json."""
    processor = json.loads((folder / "processor_config.json").read_text())
    preprocessor = {**processor.pop("image_processor"), "processor_class": "Idefics3Processor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    template = folder / "chat_template.jinja"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()


def test_both_layouts_behave_the_same(folder: Path, load_vlm: Callable[..., Any], expected: tuple[int, ...]) -> None:
    """Guards loading what is on the hub and what transformers 5 saves."""
    new = load_vlm(folder)
    _hub_layout(folder)
    old = load_vlm(folder)
    assert old.checkpoint.preprocess == new.checkpoint.preprocess
    assert old.checkpoint.chat_template == new.checkpoint.chat_template
    assert old.checkpoint.eos_token_ids == new.checkpoint.eos_token_ids
    for loaded in (new, old):
        assert loaded.describe(_PICTURE, "What is it?", sampling=_GREEDY).token_ids == expected


def test_template_inside_the_tokenizer_config(
    folder: Path, load_vlm: Callable[..., Any], expected: tuple[int, ...]
) -> None:
    """Guards older folders, which keep the chat template in tokenizer_config.json."""
    template = folder / "chat_template.jinja"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template.read_text()}))
    template.unlink()
    assert load_vlm(folder).describe(_PICTURE, "What is it?", sampling=_GREEDY).token_ids == expected


def test_the_preprocessor_file_decides(folder: Path, load_vlm: Callable[..., Any]) -> None:
    """Negative control: another longest edge in the file must change the tiles."""
    _hub_layout(folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "size": {"longest_edge": 32}}))
    small = load_vlm(folder)
    assert small.describe(_PICTURE, "What is it?", sampling=_GREEDY).usage.num_tiles == 1


def test_shards_equal_one_file(
    checkpoint_of: Callable[..., Path], load_vlm: Callable[..., Any], expected: tuple[int, ...]
) -> None:
    """Guards sharded checkpoints: tensors of one fused weight may lie in different files."""
    folder = checkpoint_of(max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    seen: list[tuple[int, int]] = []
    loaded = load_vlm(folder, progress=lambda done, total: seen.append((done, total)))
    assert loaded.describe(_PICTURE, "What is it?", sampling=_GREEDY).token_ids == expected
    assert [done for done, _ in seen] == list(range(1, seen[-1][1] + 1))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_smolvlm_model_type(
    checkpoint_of: Callable[..., Path], load_vlm: Callable[..., Any], tmp_path: Path, tied: bool
) -> None:
    """Guards SmolVLM folders, whose model_type is their own and whose tensors are named as Idefics3's."""
    source = checkpoint_of(Shape(tied=tied))
    theirs = transformers.Idefics3ForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    raw = json.loads((source / "config.json").read_text())
    keep = ("scale_factor", "image_token_id", "tie_word_embeddings")
    vision = {key: value for key, value in raw["vision_config"].items() if key != "model_type"}
    config = transformers.SmolVLMConfig(
        vision_config=vision, text_config=raw["text_config"], **{key: raw[key] for key in keep}
    )
    smol = transformers.SmolVLMForConditionalGeneration(config)
    smol.load_state_dict(theirs.state_dict())
    smol.generation_config.eos_token_id = theirs.generation_config.eos_token_id
    folder = Path(shutil.copytree(source, tmp_path / "smol"))
    (folder / "model.safetensors").unlink()
    smol.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "smolvlm"
    reference = Reference(folder)
    inputs = reference.inputs([_PICTURE], "What is it?")
    answer = load_vlm(folder).describe(_PICTURE, "What is it?", sampling=_GREEDY)
    assert answer.token_ids == reference.answer(inputs, 24)


@pytest.mark.parametrize("where", ["generation_config.json", "config.json", "tokenizer"])
def test_end_tokens_come_from_the_checkpoint(
    folder: Path, load_vlm: Callable[..., Any], expected: tuple[int, ...], where: str
) -> None:
    """Guards the end of answers: generation_config.json decides, then config.json, then the tokenizer."""
    marker = load_vlm(folder).checkpoint.tokenizer.convert_tokens_to_ids("<end_of_utterance>")
    generation, config = folder / "generation_config.json", folder / "config.json"
    raw = json.loads(config.read_text())
    generation.unlink()
    raw.pop("eos_token_id", None)
    raw["text_config"].pop("eos_token_id", None)
    stop = expected[5]
    if where == "generation_config.json":
        generation.write_text(json.dumps({"eos_token_id": [marker, stop]}))
    elif where == "config.json":
        raw["eos_token_id"] = stop
    config.write_text(json.dumps(raw))
    loaded = load_vlm(folder)
    answer = loaded.describe(_PICTURE, "What is it?", sampling=_GREEDY)
    if where == "tokenizer":
        assert loaded.checkpoint.eos_token_ids == {marker}
        assert answer.token_ids == expected
    else:
        assert answer.token_ids == expected[: expected.index(stop)]
        assert answer.finish_reason == "stop"

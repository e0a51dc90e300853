"""LLaVA folders in every layout that occurs, loaded strictly; rotary scaling and sliding windows of their decoders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from oracle import build, features_of, naive_logits, noise
from reference import Reference
from safetensors.torch import load_file, save_file
from shapes import SHAPES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vlmfast import Sampling
from vlmfast.errors import ConfigError, ContextLengthError, WeightsError
from vlmfast_models.config import TextConfig
from vlmfast_models.decoder import rotary_frequencies
from vlmfast_models.weights import save_checkpoint

_GREEDY = Sampling(max_new_tokens=16)
_PICTURE = noise(70, 40)


@pytest.fixture
def folder(checkpoint_of: Callable[..., Path], tmp_path: Path) -> Path:
    """A LLaVA-NeXT folder that a test may rearrange."""
    return Path(shutil.copytree(checkpoint_of(SHAPES["llava_next"]), tmp_path / "copy"))


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors")


def _hub(name: str) -> str:
    """What transformers 4 wrote, and the hub holds."""
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


def _in_memory(name: str) -> str:
    """What the networks of transformers 5 call their tensors."""
    if name == "language_model.lm_head.weight":
        return "lm_head.weight"
    return "model." + name.replace("language_model.model.", "language_model.", 1)


@pytest.mark.parametrize("rename", [_hub, _in_memory, lambda name: _in_memory(_hub(name))], ids=["hub", "5", "both"])
def test_all_layouts_load_alike(
    folder: Path, checkpoint_of: Callable[..., Path], load_vlm: Callable[..., Any], rename: Callable[[str], str]
) -> None:
    """Guards the key layouts: same tensors, same answer, and nothing left over."""
    expected = load_vlm(checkpoint_of(SHAPES["llava_next"])).describe(_PICTURE, "What?", sampling=_GREEDY).token_ids
    before = set(load_file(folder / "model.safetensors"))
    _edit(folder, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    assert not before & set(load_file(folder / "model.safetensors")) - {"image_newline"} or rename is _hub
    assert load_vlm(folder).describe(_PICTURE, "What?", sampling=_GREEDY).token_ids == expected


@pytest.mark.parametrize(
    "name",
    [
        "image_newline",
        "multi_modal_projector.linear_2.bias",
        "vision_tower.pre_layrnorm.weight",
        "vision_tower.embeddings.class_embedding",
        "vision_tower.encoder.layers.1.mlp.fc1.weight",
        "language_model.lm_head.weight",
    ],
)
def test_missing_tensors_are_named(folder: Path, load_vlm: Callable[..., Any], name: str) -> None:
    """Guards strict loading of everything that the answer depends on."""
    _edit(folder, lambda tensors: (tensors.pop(name), tensors)[1])
    with pytest.raises(WeightsError, match=rf"missing tensors: .*{name.split('.', 1)[-1]}"):
        load_vlm(folder)


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.encoder.layers.3.mlp.fc1.weight",  # the tower has layers 0 to 2
        "vision_tower.vision_model.extra",
        "language_model.model.layers.0.self_attn.q_norm.weight",
        "model.multi_modal_projector.linear_3.weight",
    ],
)
def test_left_over_tensors_are_named_as_in_the_file(folder: Path, load_vlm: Callable[..., Any], name: str) -> None:
    """Guards case 42 for this family, and messages that call a tensor what its file calls it."""
    _edit(folder, lambda tensors: {**tensors, name: torch.zeros(2)})
    with pytest.raises(WeightsError, match=rf"no place for: {name}$"):
        load_vlm(folder)


def test_one_tensor_under_two_names_is_refused(folder: Path, load_vlm: Callable[..., Any]) -> None:
    """Guards a folder with the files of two layouts, of which one would win unseen."""
    _edit(folder, lambda tensors: {**tensors, "model.image_newline": torch.zeros(64)})
    with pytest.raises(WeightsError, match="are the same tensor of the model"):
        load_vlm(folder)


def test_tower_parts_that_are_not_run_may_be_absent(folder: Path, load_vlm: Callable[..., Any]) -> None:
    """Guards the features of the last layer but one: what comes behind it is neither needed nor wrong."""
    expected = load_vlm(folder).describe(_PICTURE, "What?", sampling=_GREEDY).token_ids
    unused = ("vision_tower.encoder.layers.2.", "vision_tower.post_layernorm.")
    _edit(folder, lambda tensors: {k: v for k, v in tensors.items() if not k.startswith(unused)})
    assert load_vlm(folder).describe(_PICTURE, "What?", sampling=_GREEDY).token_ids == expected


def test_saving_writes_the_hub_layout(folder: Path, load_vlm: Callable[..., Any], tmp_path: Path) -> None:
    """Guards the writer: transformers reads what it wrote."""
    loaded = load_vlm(folder)
    saved = Path(shutil.copytree(folder, tmp_path / "saved"))
    (saved / "model.safetensors").unlink()
    save_checkpoint(loaded.model, saved, dtype=torch.float32)
    assert "vision_tower.vision_model.embeddings.class_embedding" in load_file(saved / "model.safetensors")
    reference = Reference(saved)
    theirs = reference.answer(reference.inputs([_PICTURE], "What?"), 16)
    assert loaded.describe(_PICTURE, "What?", sampling=_GREEDY).token_ids == theirs


def test_pinpoints_that_differ_are_refused(folder: Path, load_vlm: Callable[..., Any]) -> None:
    """Guards a processor of another checkpoint: its tiles would not be those that the tower's grid is laid out for."""
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_grid_pinpoints": [[28, 56]]}))
    with pytest.raises(ConfigError, match="image_grid_pinpoints of the preprocessor and of"):
        load_vlm(folder)


@pytest.mark.parametrize(
    "part",
    ["image_newline", "vision.class_embed", "vision.embed_norm.bias", "connector.fc2.bias"],
)
def test_every_new_kind_of_weight_is_used(folder: Path, load_vlm: Callable[..., Any], part: str) -> None:
    """Negative control: one number of a weight changed must move the logits far beyond the tolerance of parity."""
    loaded = load_vlm(folder)
    prompt, images = build(loaded, [_PICTURE], "What?")
    before = naive_logits(loaded, list(prompt.ids), features_of(loaded, images, prompt))
    with torch.no_grad():
        dict(loaded.model.named_parameters())[part][5] += 0.5
    after = naive_logits(loaded, list(prompt.ids), features_of(loaded, images, prompt))
    assert float((after - before).abs().max()) > 1e-3


_ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 512},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
]  # fmt: skip


@pytest.mark.parametrize("rope", _ROPES, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_rotary_frequencies_match(rope: dict[str, Any], dim: int) -> None:
    """Guards every kind of rotary scaling against transformers' own, and its factor on cosines and sines."""
    theirs = transformers.LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 50_000.0, **rope},
    )
    ours = TextConfig.from_hf(theirs.to_dict(), tie_embeddings=False)
    if rope["rope_type"] == "default":
        expected, magnitude = 1.0 / 50_000.0 ** (torch.arange(0, dim, 2).float() / dim), 1.0
    else:
        expected, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    got = rotary_frequencies(ours.rope, dim, torch.device("cpu"))
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=0)
    assert ours.rope.magnitude == pytest.approx(magnitude, rel=1e-9)


def test_answers_within_a_sliding_window_match(
    checkpoint_of: Callable[..., Path], load_vlm: Callable[..., Any]
) -> None:
    """Guards sliding windows: equal up to the window, and a prompt beyond it is refused, not answered otherwise."""
    shape = SHAPES["llava"]
    windowed = replace(shape, text={**shape.text, "model_type": "mistral", "sliding_window": 80})
    folder = checkpoint_of(windowed)
    loaded, reference = load_vlm(folder), Reference(folder)
    answer = loaded.describe(_PICTURE, "What?", sampling=Sampling(max_new_tokens=64))
    room = 80 - answer.usage.prompt_tokens
    assert 5 < room < 64 and answer.finish_reason == "length"
    assert answer.token_ids == reference.answer(reference.inputs([_PICTURE], "What?"), room)
    with pytest.raises(ContextLengthError, match="context is 80"):
        loaded.describe(_PICTURE, "What is in the picture? " * 9, sampling=_GREEDY)

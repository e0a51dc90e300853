"""Loading is strict: whatever is missing, left over, misshapen or damaged is an error that lists names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlmfast.errors import WeightsError
from vlmfast.testing import Shape
from vlmfast_models.weights import save_checkpoint

_Q = "model.text_model.layers.1.self_attn.q_proj.weight"
_CONV = "model.vision_model.embeddings.patch_embedding.weight"


@pytest.fixture
def folder(checkpoint_of: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_of(), tmp_path / "copy"))


@pytest.fixture
def shards(checkpoint_of: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_of(max_shard_size="60KB"), tmp_path / "shards"))


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_tensors_are_listed(folder: Path, load_vlm: Callable[..., Any]) -> None:
    """Guards against a network that silently keeps unfilled memory."""
    _edit(folder, lambda tensors: (tensors.pop(_Q), tensors.pop("lm_head.weight")))
    with pytest.raises(WeightsError, match=r"missing tensors: lm_head\.weight, model\.text_model.*q_proj"):
        load_vlm(folder)


def test_left_over_tensors_are_listed(folder: Path, load_vlm: Callable[..., Any]) -> None:
    """Guards case 42: unexpected keys were skipped, and the answers were quietly wrong."""
    _edit(folder, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    with pytest.raises(WeightsError, match=r"no place for: model\.extra\.weight"):
        load_vlm(folder)


def test_long_lists_are_cut(folder: Path, load_vlm: Callable[..., Any]) -> None:
    """Guards readable errors: a folder of another model would list hundreds of names."""
    _edit(folder, lambda tensors: tensors.update({f"extra.{index}": torch.zeros(1) for index in range(40)}))
    with pytest.raises(WeightsError, match="and 28 more") as raised:
        load_vlm(folder)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (_Q, (64, 63)),
        (_Q, (63, 64)),
        (_Q, (128, 32)),
        (_Q, (64, 8, 8)),
        (_Q, (4096,)),
        (_Q, ()),
        (_CONV, (48, 4, 4, 3)),
        (_CONV, (48, 48)),
        ("model.text_model.norm.weight", (1, 64)),
    ],
    ids=str,
)
def test_wrong_shapes_are_named(folder: Path, load_vlm: Callable[..., Any], name: str, shape: tuple[int, ...]) -> None:
    """Guards tensors of the right size in another layout (a channels-last convolution), and scalars."""
    _edit(folder, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(WeightsError) as raised:
        load_vlm(folder)
    assert name in str(raised.value) and str(list(shape)) in str(raised.value)


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, -1])
def test_cut_files_are_named(folder: Path, load_vlm: Callable[..., Any], keep: float) -> None:
    """Guards broken downloads: cut in the length, in the header, in the middle, and by one byte."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors can not be read"):
        load_vlm(folder)


def test_garbage_file(folder: Path, load_vlm: Callable[..., Any]) -> None:
    """Guards files that are something else, for example a Git LFS pointer."""
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(WeightsError, match="can not be read as safetensors"):
        load_vlm(folder)


def test_missing_shard(shards: Path, load_vlm: Callable[..., Any]) -> None:
    """Guards half a download: the shard is named."""
    shard = sorted(shards.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightsError, match=shard.name):
        load_vlm(shards)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 5}}', "null"])
def test_broken_index(shards: Path, load_vlm: Callable[..., Any], index: str) -> None:
    """Guards a damaged index: an error of ours that names the file, whatever JSON it holds."""
    (shards / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json|no place for|missing"):
        load_vlm(shards)


def test_a_tensor_missing_from_its_shard(shards: Path, load_vlm: Callable[..., Any]) -> None:
    """Guards an index that promises more than the shards hold."""
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    shard = shards / index["weight_map"][_Q]
    tensors = load_file(shard)
    del tensors[_Q]
    save_file(tensors, shard)
    with pytest.raises(WeightsError, match=r"missing tensors: .*q_proj"):
        load_vlm(shards)


def test_pickles_are_not_loaded(folder: Path, load_vlm: Callable[..., Any]) -> None:
    """Guards against running code from a checkpoint: a pickle is refused even where it is all there is."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="pickle checkpoints are not loaded"):
        load_vlm(folder)


@pytest.mark.parametrize("extra", ["lm_head.weight", "model.vision_model.embeddings.position_ids"])
def test_tensors_that_carry_nothing_are_ignored(
    checkpoint_of: Callable[..., Path], load_vlm: Callable[..., Any], tmp_path: Path, extra: str
) -> None:
    """Guards folders of other writers, which store tied heads and position tables."""
    folder = Path(shutil.copytree(checkpoint_of(Shape(tied=True)), tmp_path / "tied"))
    before = load_vlm(folder).describe(None, "What?").token_ids
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors[extra] = tensors["model.text_model.embed_tokens.weight"].clone() if "lm_head" in extra else torch.arange(64)
    save_file(tensors, folder / "model.safetensors")
    assert load_vlm(folder).describe(None, "What?").token_ids == before


def test_an_untied_head_is_needed(folder: Path, load_vlm: Callable[..., Any]) -> None:
    """Guards against falling back to the embedding table where the configuration says untied."""
    _edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightsError, match=r"missing tensors: lm_head\.weight"):
        load_vlm(folder)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_saving_and_loading_agree(
    checkpoint_of: Callable[..., Path], load_vlm: Callable[..., Any], tmp_path: Path, tied: bool
) -> None:
    """Guards the training recipe's writer: saved under the checkpoint's names and shapes, nothing is lost."""
    source = checkpoint_of(Shape(tied=tied))
    folder = Path(shutil.copytree(source, tmp_path / "saved"))
    (folder / "model.safetensors").unlink()
    model = load_vlm(source)._engine._runner._model
    save_checkpoint(model, folder, dtype=torch.float32)
    ours, theirs = load_file(folder / "model.safetensors"), load_file(source / "model.safetensors")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

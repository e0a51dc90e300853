"""A draft model on the target's own vision tower: a picture goes through it once, whatever is cached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import GREEDY
from oracle import noise
from safetensors.torch import load_file, save_file

from vlmfast import Reduce, ToMe, Vision
from vlmfast.image.load import load_image
from vlmfast.spec.options import Speculation
from vlmfast.testing import Shape
from vlmfast.tower import TowerMemory
from vlmfast_models.vit import VisionTransformer

_SMALL = Shape(text={**Shape().text, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48})
_TOWER = "model.vision_model."


@pytest.fixture(scope="module")
def on_our_tower(checkpoint_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller decoder with a connector of its own, behind the target's tower."""
    folder = tmp_path_factory.mktemp("draft")
    shutil.copytree(checkpoint_of(_SMALL, seed=4), folder, dirs_exist_ok=True)
    target = load_file(checkpoint_of() / "model.safetensors")
    own = load_file(folder / "model.safetensors")
    tensors = {name: target[name] if name.startswith(_TOWER) else tensor for name, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[VisionTransformer]:
    """The towers that were run, in order."""
    seen: list[VisionTransformer] = []
    run = VisionTransformer.run

    def counted(self: VisionTransformer, *args: Any, **options: Any) -> Any:
        seen.append(self)
        return run(self, *args, **options)

    monkeypatch.setattr(VisionTransformer, "run", counted)
    return seen


def _drafting(folder: Path) -> Speculation:
    return Speculation(drafter="model", draft_model=folder, adaptive=False, max_draft_tokens=3)


@pytest.mark.parametrize("caching", [False, None], ids=["no caches", "caches"])
def test_a_picture_goes_through_the_tower_once(
    load_vlm: Callable[..., Any],
    on_our_tower: Path,
    runs: list[VisionTransformer],
    caching: bool | None,
) -> None:
    """Guards the time of a first draft: what the tower made for the target is the draft model's, too."""
    plain = load_vlm(speculation="off", caching=False)
    vlm = load_vlm(speculation=_drafting(on_our_tower), caching=caching)
    for images in (noise(50, 40), [noise(60, 30), noise(20, 20)]):
        runs.clear()
        expected = plain.describe(images, "What is it?", sampling=GREEDY)
        num_runs = len(runs)
        runs.clear()
        answer = vlm.describe(images, "What is it?", sampling=GREEDY)
        assert answer.token_ids == expected.token_ids and answer.usage.draft_tokens
        assert runs == [vlm.model.vision] * num_runs
    runs.clear()
    assert vlm.describe(noise(50, 40), "What else?", sampling=GREEDY).usage.draft_tokens
    # What is known of a picture serves both; without caches, nothing is kept for the target.
    assert bool(runs) == (caching is False)


def test_another_tower_sees_for_itself(
    load_vlm: Callable[..., Any], checkpoint_of: Callable[..., Path], runs: list[VisionTransformer]
) -> None:
    """Negative control: equal sizes are not enough, the weights must be the same."""
    vlm = load_vlm(speculation=_drafting(checkpoint_of(_SMALL, seed=4)), caching=False)
    vlm.describe(noise(50, 40), "What is it?", sampling=GREEDY)
    assert len(set(runs)) == 2 and runs[0] is vlm.model.vision is not runs[-1]


def test_a_draft_model_of_one_frame_is_shown_the_global_frame(
    load_vlm: Callable[..., Any], on_our_tower: Path, runs: list[VisionTransformer], tmp_path: Path
) -> None:
    """Guards a smaller draft model: the frame that the target's tower has seen will do, whatever was cut beside it."""
    folder = tmp_path / "one-frame"
    shutil.copytree(on_our_tower, folder)
    file = folder / "processor_config.json"
    config = json.loads(file.read_text())
    config["image_processor"]["size"] = config["image_processor"]["max_image_size"]
    file.write_text(json.dumps(config))
    plain = load_vlm(speculation="off", caching=False)
    vlm = load_vlm(speculation=_drafting(folder))
    picture = noise(54, 44)
    expected = plain.describe(picture, "What is it?", sampling=GREEDY)
    num_runs = len(runs)
    runs.clear()
    answer = vlm.describe(picture, "What is it?", sampling=GREEDY)
    assert answer.token_ids == expected.token_ids and answer.usage.draft_tokens
    assert answer.usage.visual_tokens > vlm.model.config.tokens_per_tile and len(runs) == num_runs
    assert vlm._vision._lent is not None and not vlm._vision._lent._outputs, "held no longer than needed"
    # The target's features are known now, and the tower's outputs gone: the draft model looks for itself.
    runs.clear()
    assert vlm.describe(picture, "And what else?", sampling=GREEDY).usage.draft_tokens and len(runs) == 1


def test_a_target_that_merges_patches_does_not_share_them(
    load_vlm: Callable[..., Any], on_our_tower: Path, runs: list[VisionTransformer]
) -> None:
    """Guards lossy options: what they did to the target's features never reaches the draft model's."""
    plain = load_vlm(speculation="off", caching=False)
    vlm = load_vlm(speculation=_drafting(on_our_tower), caching=False)
    for vision in (Vision(tome=ToMe(r=1)), Vision(reduce=Reduce("random", keep=0.5))):
        runs.clear()
        expected = plain.describe(noise(50, 40), "What is it?", vision=vision, sampling=GREEDY)
        num_runs = len(runs)
        runs.clear()
        answer = vlm.describe(noise(50, 40), "What is it?", vision=vision, sampling=GREEDY)
        assert answer.token_ids == expected.token_ids
        assert len(runs) == (2 * num_runs if vision.tome else num_runs)


def test_memory_is_bounded(load_vlm: Callable[..., Any]) -> None:
    """Guards memory: the oldest goes, nothing too large is kept, and what was taken is gone."""
    plan = load_vlm(caching=False)._vision.plan(load_image(noise(20, 20)))
    outputs = torch.zeros(1, 4, 25)  # 400 bytes
    memory = TowerMemory(max_bytes=1000)
    keys = [(name, plan, ()) for name in "abc"]
    for key in keys:
        memory.put(key, [(outputs, torch.zeros(1, 4) if key is keys[2] else None)])
    assert memory.take(keys[0], scored=False) is None, "the oldest made room"
    assert memory.take(keys[1], scored=True) is None and memory.take(keys[1], scored=False) is not None
    assert memory.take(keys[1], scored=False) is None, "taken once"
    assert memory.take(keys[2], scored=True) is not None and memory._num_bytes == 0
    memory.put(keys[1], [(torch.zeros(1001, dtype=torch.uint8), None)])
    assert memory.take(keys[1], scored=False) is None and memory._num_bytes == 0

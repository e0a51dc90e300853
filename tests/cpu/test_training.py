"""The recipe from end to end at its smallest: stages, going on, ending early, and the checkpoint that comes out."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vlmfast.errors import InputError
from vlmfast.train.optimise import Schedule
from vlmfast.train.recipe import DRAFT_RECIPE, POCKET_RECIPE, Recipe, Workplace, train_pocket
from vlmfast.vlm import VLM
from vlmfast_models.errors import WeightsError

STEP = Schedule(num_steps=1, batch_size=2, learning_rate=1e-3)


def tiny(recipe: Recipe, num_joint_steps: int = 1) -> Recipe:
    return replace(
        recipe,
        dense=STEP,
        joint=replace(STEP, num_steps=num_joint_steps, final_share=1.0),
        cool=STEP,
        num_dense_frames=2,
        num_joint_frames=4,
        easy_share=0.0,  # its package is an extra
        num_held_out_frames=2,
        num_scored_scenes=1,
    )


def place(folder: Path, **how: bool) -> Workplace:
    return Workplace(folder=folder, device=torch.device("cpu"), num_workers=1, **how)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    train_pocket(tiny(DRAFT_RECIPE), place(folder), folder / "out")
    return folder


def test_the_result_answers(trained: Path) -> None:
    vlm = VLM.from_pretrained(trained / "out", device="cpu")
    answer = vlm.describe(Path(__file__).parents[2] / "assets" / "scenes" / "dog.png", "What is it?")
    assert answer.usage.visual_tokens == 64  # the draft sees one frame


def test_a_stage_goes_on_where_it_was_left(trained: Path) -> None:
    before = torch.load(trained / "joint.pt", weights_only=True)
    train_pocket(tiny(DRAFT_RECIPE, num_joint_steps=2), place(trained, resume=True), trained / "longer")
    after = torch.load(trained / "joint.pt", weights_only=True)
    assert (before["step"], after["step"]) == (1, 2)
    moved = [
        not torch.equal(before["modules"]["decoder"][name], value)
        for name, value in after["modules"]["decoder"].items()
    ]
    assert any(moved)


def test_the_long_stage_may_be_ended(trained: Path) -> None:
    (trained / "cool.pt").unlink(missing_ok=True)
    state = (trained / "joint.pt").read_bytes()
    train_pocket(tiny(DRAFT_RECIPE, num_joint_steps=99), place(trained, resume=True, anneal=True), trained / "ended")
    assert (trained / "joint.pt").read_bytes() == state
    assert (trained / "ended" / "model.safetensors").is_file()


def test_going_on_from_another_shape_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="missing tensors"):
        train_pocket(tiny(POCKET_RECIPE), place(tmp_path), tmp_path / "out", start=trained / "out")


def test_ending_what_never_began_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"joint\.pt is missing"):
        train_pocket(tiny(DRAFT_RECIPE), place(tmp_path, anneal=True), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_said_before_hours_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "easy_vqa", None)
    with pytest.raises(InputError, match="pip install easy-vqa"):
        train_pocket(replace(tiny(DRAFT_RECIPE), easy_share=0.1), place(tmp_path / "work"), tmp_path / "out")
    assert not (tmp_path / "work").exists()

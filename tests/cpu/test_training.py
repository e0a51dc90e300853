"""The recipe from end to end at its smallest: stages, going on, ending early, and the checkpoint that comes out."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vlmfast.checkpoint import bundled_model
from vlmfast.errors import InputError
from vlmfast.train import dense
from vlmfast.train.dense import normalised, shown_patches
from vlmfast.train.features import stored, tower_features
from vlmfast.train.frames import IGNORED, open_frames
from vlmfast.train.optimise import Schedule
from vlmfast.train.parallel import average_gradients, my_part, rank, run_group
from vlmfast.train.pictures import Pictures
from vlmfast.train.recipe import DRAFT_RECIPE, POCKET_RECIPE, Portion, Recipe, Workplace
from vlmfast.train.scenes import LARGE_PRINT, PAGES, Split
from vlmfast.train.shape import DRAFT_SIZE, POCKET_SIZE, preprocessor_config
from vlmfast.train.sources import SceneSource
from vlmfast.train.stages import new_pocket, train_pocket
from vlmfast.train.tokens import train_tokenizer
from vlmfast.train.vocabulary import ORDINALS
from vlmfast.vlm import VLM
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.errors import WeightsError

STEP = Schedule(num_steps=1, batch_size=2, learning_rate=1e-3)
FEW = Portion(count=2, share=1.0, global_share=0.5, dense_share=1.0)


def tiny(recipe: Recipe, num_joint_steps: int = 1) -> Recipe:
    return replace(
        recipe,
        dense=STEP,
        decoder=STEP,
        joint=replace(STEP, num_steps=num_joint_steps, final_share=1.0),
        cool=STEP,
        crowded=FEW,
        scenes=FEW,
        pages=FEW,
        large_print=FEW,
        easy=replace(FEW, share=0.0, dense_share=0.0),  # its package is an extra
        num_held_out_frames=2,
        num_scored_scenes=1,
    )


def tiny_draft() -> Recipe:
    """The draft's recipe at its smallest: one stage, on the bundled model's tower."""
    recipe = replace(tiny(DRAFT_RECIPE), dense=None, joint=None, cool=None, crowded=DRAFT_RECIPE.crowded)
    return replace(recipe, tokenizer=bundled_model() / "tokenizer.json", tower=bundled_model())


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


def test_the_decoder_learns_alone_first(trained: Path) -> None:
    states = [torch.load(trained / f"{stage}.pt", weights_only=True)["modules"] for stage in ("dense", "decoder")]
    before, after = (state["vision"] for state in states)
    assert all(torch.equal(before[name], value) for name, value in after.items())
    joint = torch.load(trained / "joint.pt", weights_only=True)["modules"]["vision"]
    assert not all(torch.equal(after[name], value) for name, value in joint.items())


def test_features_are_the_towers_and_made_anew_with_it(tmp_path: Path) -> None:
    source = SceneSource(split=Split.TRAIN, seed=5, count=2, style=LARGE_PRINT)
    frames = open_frames(tmp_path, source, PreprocessConfig.from_hf(preprocessor_config(POCKET_SIZE)), 16, workers=1)
    tower = new_pocket(train_tokenizer(320), 0, DRAFT_SIZE).vision
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = tower(normalised(torch.from_numpy(np.array(frames.pixels[1])))).float()
    kept = stored(tower_features(tower, frames, torch.device("cpu"))[1])
    torch.testing.assert_close(kept.float(), wanted, atol=0.05, rtol=0.05)
    again = stored(tower_features(tower, frames, torch.device("cpu"))[1])
    assert torch.equal(kept, again)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.mul_(1.1)
    assert not torch.equal(kept, stored(tower_features(tower, frames, torch.device("cpu"))[1]))


def test_print_too_small_for_the_frame_is_not_asked_for() -> None:
    source = SceneSource(split=Split.TRAIN, seed=5, count=40, style=PAGES)
    sizes = [page.size for position in range(40) if (page := source.scene(position).page) is not None]
    for side in (256, 512):
        asked = [
            any(question.kind == "page" for question in source.questions(position, random.Random(0), side))
            for position in range(40)
        ]
        assert asked == [size * side >= 22 for size in sizes]
        assert side == 256 or all(asked)


def test_of_a_full_page_lines_and_words_are_asked() -> None:
    source = SceneSource(split=Split.TRAIN, seed=5, count=20, style=replace(PAGES, full_pages=True))
    rng = random.Random(0)
    for position in range(20):
        page = source.scene(position).page
        assert page is not None
        parts = {*page.lines, page.words[0], page.words[-1]}
        asked = [q for q in source.questions(position, rng, 512) if q.kind == "page"]
        assert asked
        assert len(page.lines) <= len(ORDINALS) or all(question.answer in parts for question in asked)


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    recipe = tiny(DRAFT_RECIPE, num_joint_steps=2)
    train_pocket(recipe, replace(place(tmp_path), num_processes=2), tmp_path / "out")
    assert torch.load(tmp_path / "joint.pt", weights_only=True)["step"] == 2
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_group_averages_its_gradients(tmp_path: Path) -> None:
    run_group(partial(_one_step, tmp_path), 2)
    for number in range(2):
        # The first has gradients 0 and 1, the second none and 3.
        averaged, numbers = torch.load(tmp_path / f"{number}.pt")
        assert averaged == [0.0, 2.0]
        assert numbers == [0, 1, 2, 3, 4][number::2]


def _one_step(folder: Path) -> None:
    weights = [torch.zeros(1), torch.zeros(1)]
    weights[1].grad = torch.tensor([1.0, 3.0])[rank() : rank() + 1]
    if rank() == 0:
        weights[0].grad = torch.zeros(1)
    average_gradients(weights)
    averaged = [float(weight.grad) for weight in weights if weight.grad is not None]
    torch.save((averaged, my_part(np.arange(5)).tolist()), folder / f"{rank()}.pt")


def test_alone_a_process_takes_the_whole_batch() -> None:
    assert my_part(np.arange(3)).tolist() == [0, 1, 2]


def test_more_processes_than_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 processes can not share batches of 2"):
        train_pocket(tiny(DRAFT_RECIPE), replace(place(tmp_path / "work"), num_processes=3), tmp_path / "out")
    assert not (tmp_path / "work").exists()


def test_dense_pretraining_takes_its_share_of_each_kind(tmp_path: Path) -> None:
    """Guards the mixture: the shares of a batch, and of other than crowded pictures only frames that bear letters."""
    recipe = replace(tiny(POCKET_RECIPE), scenes=replace(FEW, count=12, dense_share=2.0), pages=replace(FEW, share=0.0))
    parts = Pictures(recipe, place(tmp_path)).dense_parts()
    crowded, scenes, pages, print_ = parts
    assert len(crowded.numbers) == len(crowded.frames.pixels) == 10
    assert 0 < len(scenes.numbers) < len(scenes.frames.pixels) == 60
    for part in (scenes, pages, print_):
        shown = part.frames.labels["character"][part.numbers]
        assert ((shown > 0) & (shown < IGNORED)).any(axis=(1, 2, 3)).all()
    pixels, labels = dense._mixed_batch(parts, 0, 3, 10, torch.device("cpu"))
    own = [{part.frames.pixels[number].tobytes() for number in part.numbers} for part in parts]
    found = [next(at for at, known in enumerate(own) if row.numpy().tobytes() in known) for row in pixels]
    assert found == [0, 0, 1, 1, 1, 1, 2, 2, 3, 3] and labels["word"].shape == (10, 256)


def test_dense_pretraining_looks_at_what_bears_something_first() -> None:
    labels = {"thing": torch.zeros(1, 10, dtype=torch.int64), "character": torch.full((1, 10), IGNORED)}
    labels["thing"][0, 7] = 5
    labels["thing"][0, 8] = IGNORED
    labels["character"][0, 2] = 1
    chosen = [set(shown_patches(labels, 4, torch.Generator().manual_seed(seed))[0].tolist()) for seed in range(200)]
    assert all(len(numbers) == 4 for numbers in chosen)
    assert sum({2, 7} <= numbers for numbers in chosen) > 150
    assert 40 < sum(8 in numbers for numbers in chosen) < 100  # two of the other eight


def test_the_long_stage_may_be_ended(trained: Path) -> None:
    (trained / "cool.pt").unlink(missing_ok=True)
    state = (trained / "joint.pt").read_bytes()
    train_pocket(tiny(DRAFT_RECIPE, num_joint_steps=99), place(trained, resume=True, anneal=True), trained / "ended")
    assert (trained / "joint.pt").read_bytes() == state
    assert (trained / "ended" / "model.safetensors").is_file()


def test_going_on_from_another_shape_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="missing tensors"):
        train_pocket(tiny(POCKET_RECIPE), place(tmp_path), tmp_path / "out", start=trained / "out")


def test_going_on_from_a_folder_without_tokenizer_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json is missing"):
        train_pocket(tiny(DRAFT_RECIPE), place(tmp_path / "work"), tmp_path / "out", start=tmp_path)


def test_a_work_folder_may_be_gone_on_from(trained: Path) -> None:
    """Guards the tokenizer, which is read from the file that it is written to."""
    for file in (trained / "out").iterdir():
        (trained / file.name).write_bytes(file.read_bytes())
    train_pocket(tiny(DRAFT_RECIPE), place(trained), trained / "from-itself", start=trained)
    assert (trained / "from-itself" / "model.safetensors").is_file()


def test_a_draft_keeps_the_tower_that_it_takes(tmp_path: Path) -> None:
    train_pocket(tiny_draft(), place(tmp_path), tmp_path / "out")
    drafting, pocket = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", bundled_model()))
    tower = [name for name in pocket if "vision_model" in name]
    assert tower
    assert all(torch.equal(drafting[name], pocket[name]) for name in tower)
    assert not (tmp_path / "dense.pt").exists()


def test_a_tower_of_another_shape_is_refused(tmp_path: Path) -> None:
    recipe = replace(tiny_draft(), size=replace(DRAFT_SIZE, vision_layers=2))
    with pytest.raises(InputError, match="tower is of another shape"):
        train_pocket(recipe, place(tmp_path), tmp_path / "out")


def test_ending_what_never_began_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"joint\.pt is missing"):
        train_pocket(tiny(DRAFT_RECIPE), place(tmp_path, anneal=True), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_said_before_hours_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "easy_vqa", None)
    with pytest.raises(InputError, match="pip install easy-vqa"):
        train_pocket(replace(tiny(DRAFT_RECIPE), easy=FEW), place(tmp_path / "work"), tmp_path / "out")
    assert not (tmp_path / "work").exists()

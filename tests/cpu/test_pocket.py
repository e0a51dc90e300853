"""The bundled model answers right about the scenes in `assets/scenes`, and answers as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import vlmfast
from vlmfast import Reduce, Sampling, Vision
from vlmfast.checkpoint import bundled_model
from vlmfast.train.answers import is_right
from vlmfast.train.asking import Asker

_SCENES = Path(__file__).parents[2] / "assets" / "scenes"


@pytest.fixture(scope="module")
def pocket() -> Any:
    return vlmfast.VLM.from_pretrained()


def test_the_readme_command_is_answered_right(pocket: Any) -> None:
    """Guards the first answer a newcomer reads."""
    assert str(pocket.describe(_SCENES / "dog.png", "What is in the picture?")) == "There is a dog."
    assert "pink" in str(vlmfast.describe(_SCENES / "dog.png", "What colour is the background?", model=pocket))


def test_the_pocket_answers_the_asset_scenes(pocket: Any) -> None:
    """Guards weights, tokenizer, pixels and runtime together: 92 of 102 answers were right when this was written.

    Another CPU may round a close call the other way; more than four of them is a defect.
    """
    asker = Asker(pocket)
    right: list[bool] = []
    for scene in json.loads((_SCENES / "truth.json").read_text(encoding="utf-8")):
        for row in scene["questions"]:
            text = asker.continue_chat(Image.open(_SCENES / scene["file"]), row["before"], row["question"])
            right.append(is_right(row["kind"], row["expect"], text))
    assert len(right) == 102
    assert sum(right) >= 88


def test_the_picture_decides_the_answer(pocket: Any) -> None:
    """Guards against a model that answers from the question alone."""
    answers = {str(pocket.describe(path, "What is in the picture?")) for path in sorted(_SCENES.glob("*.png"))}
    assert len(answers) >= 10


def test_the_pocket_says_what_transformers_says() -> None:
    """Guards the claim that the folder is an ordinary checkpoint: float32, the same tokens."""
    import torch
    from transformers import AutoProcessor, Idefics3ForConditionalGeneration

    folder = bundled_model()
    ours = vlmfast.VLM.from_pretrained(folder, dtype="float32")
    theirs = Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    eos = ours.checkpoint.eos_token_ids
    processor = AutoProcessor.from_pretrained(folder)
    for file in ("dog.png", "scene-03.png", "scene-07.png"):
        question = "Describe the picture."
        turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        text = processor.apply_chat_template(turn, add_generation_prompt=True)
        inputs = processor(text=text, images=[Image.open(_SCENES / file)], return_tensors="pt")
        tokens = theirs.generate(**inputs, max_new_tokens=48, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        answer = ours.describe(_SCENES / file, question, sampling=Sampling(max_new_tokens=48))
        assert list(answer.token_ids) == [token for token in tokens.tolist() if token not in eos]


def test_auto_goes_to_the_floor_on_a_blank_picture(pocket: Any) -> None:
    """Guards keep="auto" on the features it is made for: its limit once was that of other weights."""
    auto = Vision(reduce=Reduce("diversity", keep="auto"))
    blank, scene = (
        pocket.describe(image, "What is in the picture?", vision=auto).usage
        for image in (Image.new("RGB", (512, 512), "grey"), _SCENES / "dog.png")
    )
    assert blank.visual_tokens == 80 and 100 < scene.visual_tokens < 320

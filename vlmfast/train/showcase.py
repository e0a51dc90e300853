"""Makes `assets/scenes`: a dozen held-out scenes with their truths, and what the pocket answers about them.

The scenes are the first of their seed (one of each pair of twins), chosen before any model saw them; right and wrong
answers of the pocket are both written down. One more scene, the seed's first with a dog and nothing else, is the
README's picture.
Run: `python -m vlmfast.train.showcase assets/scenes [CHECKPOINT]`.
"""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

from vlmfast.train.answers import is_right
from vlmfast.train.asking import Asker
from vlmfast.train.render import render
from vlmfast.train.scenes import Scene, sample_scene
from vlmfast.train.truth import record

SEED = 2024
NUM_SCENES = 12
README_THING = "dog"


def showcase_scenes() -> dict[str, Scene]:
    """File name -> scene."""
    scenes = {f"scene-{index:02d}.png": sample_scene(SEED, 2 * index) for index in range(NUM_SCENES)}
    everything = (sample_scene(SEED, index) for index in count(2 * NUM_SCENES))
    alone = next(scene for scene in everything if [thing.name for thing in scene.things] == [README_THING])
    return {f"{README_THING}.png": alone, **scenes}


def write_showcase(folder: Path, pocket: Asker) -> None:
    """Writes the pictures and `truth.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for file, scene in showcase_scenes().items():
        picture = render(scene).picture
        picture.save(folder / file, optimize=True)
        row = record(scene, file)
        for question in row["questions"]:
            question["question"] = question.pop("prompt")
            question["pocket"] = pocket.continue_chat(picture, question["before"], question["question"])
            question["pocket_right"] = is_right(question["kind"], question["expect"], question["pocket"])
        rows.append(row)
    (folder / "truth.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main(folder: str, model: str | None = None) -> None:
    from vlmfast.vlm import VLM

    write_showcase(Path(folder), Asker(VLM.from_pretrained(model)))


if __name__ == "__main__":
    main(*sys.argv[1:])

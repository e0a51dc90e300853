"""Pictures with their truths on disk: what `vlmfast scenes make` writes.

One line of `truth.jsonl` a picture: the scene, and for every kind of question one question with a right answer and what
any right answer must contain (`expect`, read by `answers.is_right`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vlmfast.train.questions import Question, ask_all
from vlmfast.train.render import render
from vlmfast.train.scenes import Scene, Split, sample_scene, stream


def scene_questions(scene: Scene) -> list[Question]:
    """The questions that are scored about a scene: one of each kind it allows, always the same."""
    return ask_all(scene, stream("asked", scene.split.value, scene.seed, scene.index))


def record(scene: Scene, file: str) -> dict[str, Any]:
    """The scene's line of a truth file."""
    return {"file": file, **scene.to_json(), "questions": [asdict(question) for question in scene_questions(scene)]}


def write_scenes(folder: Path, seed: int, count: int, split: Split = Split.HELD_OUT) -> Iterator[Path]:
    """Writes scenes 0 .. count - 1 of a seed as PNG and `truth.jsonl`; yields each picture's path once written."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "truth.jsonl").open("w", encoding="utf-8") as truth:
        for index in range(count):
            scene = sample_scene(seed, index, split=split)
            path = folder / f"{split.value}-{seed}-{index:05d}.png"
            render(scene).picture.save(path)
            truth.write(json.dumps(record(scene, path.name)) + "\n")
            yield path

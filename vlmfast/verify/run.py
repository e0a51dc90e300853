"""`verify`: runs the cases on both sides, one side after the other."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from vlmfast.checkpoint import read_checkpoint, resolve_folder
from vlmfast.device import resolve_device, resolve_dtype
from vlmfast.errors import InputError
from vlmfast.image.load import ImageSource, load_image
from vlmfast.options import Verification
from vlmfast.verify.compare import CaseReport, Report
from vlmfast.verify.memory import memory_for_weights
from vlmfast.verify.reference import Networks, Processor, ProcessorMissing
from vlmfast.verify.stages import compare_inputs, compare_networks
from vlmfast.verify.trace import Case, Trace, trace
from vlmfast.vlm import VLM
from vlmfast_models.config import PreprocessConfig

Progress = Callable[[str, int, int], None]
"""Called as progress(what is being done, steps done, steps in all)."""

_QUESTIONS = ("Name three colours.", "What is in the picture?", "What is the same in all pictures?")


def verify(
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    reference: str | os.PathLike[str] | None = None,
    images: Sequence[ImageSource] = (),
    prompt: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    options: Verification | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compares our run of a checkpoint with transformers', layer by layer.

    Args:
        name_or_path: a checkpoint folder or hub name; None is the model that comes with vlmfast.
        reference: the checkpoint that transformers runs, if another one: the original of a folder that was converted.
        images: pictures to ask about; without any, two generated ones.
        prompt: what to ask in place of the built-in questions.
        device: "cpu", "cuda", "cuda:N" or "auto", for both sides.
        dtype: "float32" shows faults best; "bfloat16" and "float16" (CUDA only) check what those runs compute.
        options: tolerances and length of the answers.
        progress: told what is going on, as (text, steps done, steps in all).

    Raises:
        ModelError: a checkpoint is missing, broken or not ours, or this transformers can not load it.
        InputError: a picture can not be used, or the checkpoint has room for none of the questions.
        DeviceError: no such device or dtype, or too little memory.
    """
    options, tell = options or Verification(), progress or (lambda text, done, total: None)
    cases = _cases(images, prompt)
    folder = resolve_folder(name_or_path)
    their_folder = folder if reference is None else resolve_folder(reference)
    checkpoint = read_checkpoint(folder)
    setting = _Setting(
        device=resolve_device(device),
        dtype=resolve_dtype(dtype, checkpoint.stored_dtype, resolve_device(device)),
        options=options,
        tell=tell,
    )
    with memory_for_weights(folder, checkpoint.stored_dtype, setting.device, setting.dtype):
        traces, skipped = _run_ours(folder, cases, setting)
        if not traces:
            raise InputError(skipped[0].notes[0])
        gc.collect()  # our networks are gone before theirs are loaded
        compared = _run_theirs(their_folder, traces, checkpoint.preprocess, setting)
    return Report(
        model=str(folder),
        reference=str(their_folder),
        dtype=setting.dtype_name,
        device=str(setting.device),
        versions=_versions(),
        cases=(*compared, *skipped),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What both sides run on, and how they are compared."""

    device: torch.device
    dtype: torch.dtype
    options: Verification
    tell: Progress

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def tolerance(self) -> float:
        return self.options.tolerance_in(self.dtype_name)


def _cases(images: Sequence[ImageSource], prompt: str | None) -> list[Case]:
    """A question without a picture, one about the first picture, and one about all where there are several."""
    loaded = tuple(load_image(image) for image in (images or _generated_pictures()))
    named = {"text only": (), "one picture": loaded[:1]}
    if len(loaded) > 1:
        named[f"{len(loaded)} pictures"] = loaded
    return [
        Case(name=name, images=pictures, question=prompt or question)
        for (name, pictures), question in zip(named.items(), _QUESTIONS, strict=False)
    ]


def _generated_pictures() -> list[Image.Image]:
    """Two scenes of sizes that no tile divides, one wide and one high."""
    from vlmfast.train.render import render
    from vlmfast.train.scenes import sample_scene

    pictures = (render(sample_scene(0, 2 * index)).picture for index in range(2))
    return [picture.resize(size) for picture, size in zip(pictures, ((531, 350), (257, 410)), strict=True)]


def _run_ours(folder: Path, cases: list[Case], setting: _Setting) -> tuple[list[Trace], list[CaseReport]]:
    """Our runs, and a report for each case that the checkpoint has no room for."""
    vlm = VLM.from_pretrained(
        folder,
        device=str(setting.device),
        dtype=setting.dtype_name,
        caching=False,
        progress=lambda done, total: setting.tell("loading our networks", done, total),
    )
    traces, skipped = [], []
    for case in cases:

        def tell(done: int, total: int, name: str = case.name) -> None:
            setting.tell(f"ours: {name}", done, total)

        try:
            traces.append(trace(vlm, case, max_new_tokens=setting.options.max_new_tokens, progress=tell))
        except InputError as error:
            skipped.append(CaseReport(name=case.name, notes=(f"not run: {error}",)))
    return traces, skipped


def _run_theirs(folder: Path, traces: list[Trace], preprocess: PreprocessConfig, setting: _Setting) -> list[CaseReport]:
    setting.tell("loading transformers' networks", 0, 1)
    networks = Networks(folder, device=setting.device, dtype=setting.dtype)
    reports = []
    processor, why_not = None, ""
    try:
        processor = Processor(folder, networks.model_type)
    except ProcessorMissing as error:
        why_not = f"ids and pixels are not compared: transformers' processor can not be built here ({error})"
    for run in traces:
        notes = [why_not] if processor is None else []
        stages = []
        if processor is not None:
            stages += compare_inputs(run, processor, networks.layout, preprocess, setting.options.grey_levels)

        def tell(done: int, total: int, name: str = run.case.name) -> None:
            setting.tell(f"transformers: {name}", done, total)

        stages += compare_networks(run, networks, setting.tolerance, tell)
        reports.append(
            CaseReport(
                name=run.case.name,
                num_prompt_tokens=len(run.prompt.ids),
                num_visual_tokens=run.prompt.num_visual_tokens,
                num_answer_tokens=len(run.answer),
                stages=tuple(stages),
                notes=tuple(notes),
            )
        )
        run.activations.clear()
    return reports


def _versions() -> dict[str, str]:
    import transformers

    import vlmfast

    return {"vlmfast": vlmfast.__version__, "torch": torch.__version__, "transformers": transformers.__version__}

"""A run of ours against transformers': inputs against its processor, activations against its networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor

from vlmfast.verify.compare import Stage, compare_choices, compare_ids, compare_pixels, compare_rows
from vlmfast.verify.memory import ran_out_of_memory
from vlmfast.verify.reference import Layout, Networks, Processor, pixel_tiles
from vlmfast.verify.taps import DECODER, FEATURES, LOGITS, MERGED, TEXT
from vlmfast.verify.trace import Trace
from vlmfast_models.config import PreprocessConfig


def compare_inputs(
    run: Trace, processor: Processor, layout: Layout, preprocess: PreprocessConfig, grey_levels: float
) -> list[Stage]:
    """Our token ids and pixels against those of transformers' processor."""
    pictures = [Image.fromarray(image.pixels) for image in run.case.images]
    try:
        theirs = processor.inputs(pictures, run.case.question)
    except Exception as error:  # a processor is the checkpoint's program (its template), and may raise anything
        return [_refused("prompt ids", f"transformers' processor refuses the question: {error}")]
    stages = [compare_ids(run.prompt.ids, theirs["input_ids"][0].tolist())]
    if pictures:
        grey_level = preprocess.rescale_factor / min(preprocess.std)
        tiles = layout.our_order(pixel_tiles(theirs["pixel_values"]), [len(tiles) for tiles in run.pixels])
        stages.append(compare_pixels(torch.cat(run.pixels), tiles, grey_level, grey_levels))
    return stages


def compare_networks(
    run: Trace, networks: Networks, tolerance: float, progress: Callable[[int, int], None]
) -> list[Stage]:
    """Every stage of our run against theirs, as theirs pass; in the order of ours."""
    found: dict[str, Stage] = {}
    visual_rows = torch.tensor(run.prompt.ids) == run.image_token_id  # [T]

    def see(name: str, seen: Tensor) -> None:
        for part, theirs in _parts(name, seen, visual_rows.to(seen.device)).items():
            if part in run.activations:
                ours = run.activations[part].to(theirs.device)
                found[part] = compare_rows(part, part.rstrip("0123456789 "), ours, theirs, tolerance)
                progress(len(found), len(run.activations))

    answer, stopped = run.answer, run.stopped
    if run.image_token_id in answer:  # transformers would look for a picture to put there
        answer, stopped = answer[: answer.index(run.image_token_id) + 1], False
    num_prompt = len(run.prompt.ids)
    try:
        logits = networks.run(
            [*run.prompt.ids, *answer[: len(answer) - (not stopped)]], run.pixels, run.case.images, see
        )
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        if ran_out_of_memory(error):
            raise
        return [*found.values(), _refused("transformers' run", f"it fails on our ids and pixels: {error}")]
    see(LOGITS, logits[None])
    missing = {name: _refused(name, "transformers' networks have no such stage") for name in run.activations}
    stages = missing | found  # in the order of our computation
    choices = compare_choices(
        answer, logits[num_prompt - 1 :], networks.end_tokens, stopped=stopped, tolerance=tolerance
    )
    return [*stages.values(), choices]


def _parts(name: str, seen: Tensor, visual_rows: Tensor) -> dict[str, Tensor]:
    """What transformers' networks show under a name, as the stages of `Trace.activations`; our prompt's rows only."""
    if name != MERGED and name != LOGITS and not name.startswith(DECODER):
        return {name: seen}
    rows = seen[0, : len(visual_rows)]  # [T, E], without the answer
    return {FEATURES: rows[visual_rows], TEXT: rows[~visual_rows]} if name == MERGED else {name: rows}


def _refused(name: str, note: str) -> Stage:
    return Stage(name=name, kind=name, parted=True, note=" ".join(note.split()))

"""`vlmfast verify`: does a checkpoint compute here what it computes in transformers, and if not, from where on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from vlmfast.cli.options import field_docs
from vlmfast.cli.output import write, write_json
from vlmfast.errors import OptionError
from vlmfast.options import Verification

if TYPE_CHECKING:
    from vlmfast.verify.compare import CaseReport, Report, Stage

_DEFAULT = Verification()
_HELP = field_docs(Verification)


def verify(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint folder, or a Hugging Face hub name such as HuggingFaceTB/SmolVLM-256M-Instruct. "
            "The default is the small model that comes with vlmfast.",
        ),
    ] = None,
    images: Annotated[
        list[str] | None,
        typer.Option(
            "--image",
            "-i",
            metavar="IMAGE",
            help="A picture to ask about; may be given several times. The default is two generated ones.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What to ask, in place of built-in questions.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="NAME_OR_PATH",
            help="What transformers loads, if it is not MODEL: the original of a folder that was converted.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help=_HELP.get("max_new_tokens"))] = (
        _DEFAULT.max_new_tokens
    ),
    tolerance: Annotated[float | None, typer.Option(metavar="X", help=_HELP.get("tolerance"))] = _DEFAULT.tolerance,
    grey_levels: Annotated[float, typer.Option(metavar="X", help=_HELP.get("grey_levels"))] = _DEFAULT.grey_levels,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="For both sides: cpu, cuda, cuda:N or auto.")] = "cpu",
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="For both sides: float32, which shows faults best, bfloat16, float16 (CUDA only), or auto.",
        ),
    ] = "float32",
    layers: Annotated[bool, typer.Option("--layers", help="Show every layer, not the worst of each run of them.")] = (
        False
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object with every stage.")] = False,
) -> None:
    """Compare a checkpoint's run with transformers' and say where they part.

    For example: vlmfast verify HuggingFaceTB/SmolVLM-256M-Instruct

    Compared are prompt ids, pixels, each layer of the vision tower, the
    connector, each layer of the decoder, the logits of the prompt, and greedy
    tokens: for a question without a picture, with one, and with several.

    A difference is relative to the RMS of its row. That of pixels is in grey
    levels; that of tokens is how far our choice lies below transformers' own.

    Both networks run, one after the other, so memory must hold one of them
    and the activations of all layers. Large checkpoints take minutes.

    The exit code is 0 if nothing parts, 1 if something does, 2 if there is
    nothing to compare: a wrong name, a broken picture, too little memory.
    """
    from vlmfast.verify.run import verify as run

    if dtype in ("int8", "int4"):
        raise OptionError(f"--dtype {dtype} can not be verified: transformers has no such run; use float32 or bfloat16")
    options = Verification(max_new_tokens=max_new_tokens, tolerance=tolerance, grey_levels=grey_levels)
    with _progress() as progress:
        report = run(
            model,
            reference=reference,
            images=images or (),
            prompt=prompt,
            device=device,
            dtype=dtype,
            options=options,
            progress=progress,
        )
    if as_json:
        write_json(report.to_dict())
    else:
        write(_text(report, layers))
    if not report.passed:
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on stderr that names what is going on and leaves no trace; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


def _text(report: Report, layers: bool) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [f"{report.model}\n{report.dtype} on {report.device}; {versions}\n"]
    if report.reference != report.model:
        lines.append(f"transformers runs {report.reference}\n")
    for case in report.cases:
        lines += _case_lines(case, layers)
    partings = [f"{case.parting.name} ({case.name})" for case in report.cases if case.parting]
    if partings:
        lines.append(f"\nParts at {', '.join(partings)}.\n")
    else:
        num_compared = sum(bool(case.stages) for case in report.cases)
        lines.append(f"\nThe same as transformers in {num_compared} of {len(report.cases)} cases.\n")
    return "".join(lines)


def _case_lines(case: CaseReport, layers: bool) -> Iterator[str]:
    counts = f"{case.num_prompt_tokens} tokens, {case.num_visual_tokens} of them visual, {case.num_answer_tokens} new"
    yield f"\n{case.name}: {counts}\n" if case.stages else f"\n{case.name}\n"
    yield from (f"  {note}\n" for note in case.notes)
    if case.stages:
        yield f"  {'stage':<24}{'verdict':<9}{'difference':>11}{'allowed':>9}{'max abs':>10}\n"
    for _, group in groupby(case.stages, key=lambda stage: stage.name if layers else (stage.kind, stage.parted)):
        yield _stage_line(list(group))


def _stage_line(stages: Sequence[Stage]) -> str:
    """One line for a stage, or for a run of layers with one verdict: the worst of them, or the first that parts."""
    stage = stages[0] if stages[0].parted else max(stages, key=lambda stage: stage.relative or 0.0)
    name = stages[0].name
    if len(stages) > 1:
        first, last = (end.name.removeprefix(end.kind).strip() for end in (stages[0], stages[-1]))
        name = f"{stages[0].kind}s {first} - {last}"
    numbers = (stage.relative, stage.tolerance, stage.max_abs)
    columns = "".join(
        f"{'' if number is None else f'{number:.1e}':>{width}}"
        for number, width in zip(numbers, (11, 9, 10), strict=True)
    )
    note = f"{stage.name}: {stage.note}" if stage.note and len(stages) > 1 else stage.note
    return f"  {name:<24}{'PARTS' if stage.parted else 'same':<9}{columns}  {note}".rstrip() + "\n"

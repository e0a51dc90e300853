"""`vlmfast caption`: the same question about a folder of pictures, one row of JSON each."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from glob import glob, has_magic
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from vlmfast.cli.loading import load_model
from vlmfast.cli.options import (
    DeviceOption,
    DraftModelOption,
    DtypeOption,
    ModelOption,
    NoCacheOption,
    SpeculationOption,
    VisionDtypeOption,
    drafting_of,
)
from vlmfast.cli.output import check_not_input, write_error, write_note
from vlmfast.cli.vision import (
    FastVLayerOption,
    FastVOption,
    KeepOption,
    ReduceOption,
    ResolutionOption,
    TomeOption,
    vision_of,
)
from vlmfast.options import IMAGE_FORMATS, Caching, Sampling
from vlmfast.spec.options import DEFAULT_DRAFTER
from vlmfast.types import Answer, CaptionError

if TYPE_CHECKING:
    from rich.progress import Progress


def caption(
    sources: Annotated[
        list[str], typer.Argument(metavar="FOLDER_OR_GLOB", help="Folders (with all below them), patterns, or files.")
    ],
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", metavar="TEXT", help="What to ask about each picture.")
    ] = "Describe the picture.",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where the rows go; stdout if not given.")
    ] = None,
    model: ModelOption = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Longest caption, in tokens.")
    ] = Sampling().max_new_tokens,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    vision_dtype: VisionDtypeOption = "auto",
    no_cache: NoCacheOption = False,
    resolution: ResolutionOption = "high",
    tome: TomeOption = None,
    reduce: ReduceOption = None,
    keep: KeepOption = None,
    fastv: FastVOption = None,
    fastv_layer: FastVLayerOption = None,
    speculation: SpeculationOption = DEFAULT_DRAFTER,
    draft_model: DraftModelOption = None,
) -> None:
    """Caption many pictures, several at a time, in the order of their paths.

    A row is {"path", "caption", "usage"}, or {"path", "error": {"kind", "message"}} for a picture that can not be
    answered; the others go on. The exit code is 1 if there was an error row.
    """
    drafting = drafting_of(speculation, draft_model)
    paths = _paths(sources)
    if not paths:
        write_error(f"no pictures in {', '.join(sources)}; looked for files named *{', *'.join(sorted(_suffixes()))}")
        raise typer.Exit(2)
    if not any(os.path.exists(path) for path in paths):  # said at once, not when the model is loaded
        write_error(f"{', '.join(map(str, paths))}: no such file; give folders, patterns, or files")
        raise typer.Exit(2)
    if out is not None:
        check_not_input(out, paths, "--out")
    vision = vision_of(resolution=resolution, tome=tome, reduce=reduce, keep=keep, fastv=fastv, fastv_layer=fastv_layer)
    caching = Caching.off() if no_cache else None
    vlm = load_model(
        model, device=device, dtype=dtype, vision_dtype=vision_dtype, caching=caching, speculation=drafting
    )
    rows = vlm.caption(paths, prompt, sampling=Sampling(max_new_tokens=max_new_tokens), vision=vision)
    num_errors, started = 0, time.monotonic()
    with _opened(out) as file, _progress() as bar:
        task = bar.add_task("captioning", total=len(paths), errors=0, rate=0.0)
        for done, (path, row) in enumerate(zip(paths, rows, strict=True), start=1):
            num_errors += isinstance(row, CaptionError)
            file.write(json.dumps(_record(path, row)) + "\n")
            file.flush()
            bar.update(task, completed=done, errors=num_errors, rate=done / (time.monotonic() - started))
    if out is not None:
        write_note(f"{len(paths)} row{'s' * (len(paths) != 1)} in {out}")
    if num_errors:
        write_note(f"{num_errors} of {len(paths)} pictures could not be captioned; their rows say why")
        raise typer.Exit(1)


def _record(path: Path, row: Answer | CaptionError) -> dict[str, object]:
    if isinstance(row, CaptionError):
        return {"path": str(path), "error": {"kind": row.kind, "message": row.message}}
    return {"path": str(path), "caption": row.text.strip(), "usage": asdict(row.usage)}


def _paths(sources: list[str]) -> list[Path]:
    """The pictures that the arguments name, each once, sorted within an argument. A file named outright always counts,
    so that a wrong name becomes an error row; of folders and patterns only what is called like a picture."""
    found: dict[Path, None] = {}
    for source in sources:
        path = Path(source)
        if path.is_dir():
            found |= dict.fromkeys(sorted(file for file in path.rglob("*") if _is_picture(file)))
        elif not path.exists() and has_magic(source):
            found |= dict.fromkeys(
                sorted(file for name in glob(source, recursive=True) if _is_picture(file := Path(name)))
            )
        else:
            found[path] = None
    return list(found)


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in _suffixes() and path.is_file()


def _suffixes() -> set[str]:
    """File name endings of the formats that are read by default."""
    from PIL import Image

    Image.init()
    return {suffix for suffix, name in Image.registered_extensions().items() if name in IMAGE_FORMATS}


def _opened(out: Path | None) -> AbstractContextManager[IO[str]]:
    if out is None:
        return nullcontext(sys.stdout)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.open("w", encoding="utf-8")
    except OSError as error:
        write_error(f"{out} can not be written: {error.strerror or error}; choose another file with --out")
        raise typer.Exit(2) from error


def _progress() -> Progress:
    """A bar on stderr with rate, errors and time to go; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f} a second, {task.fields[errors]} errors"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )

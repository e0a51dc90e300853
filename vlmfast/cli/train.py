"""`vlmfast train`: the recipe of the bundled model as one command."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmfast.cli.output import write

if TYPE_CHECKING:
    from vlmfast.train.recipe import Recipe, Workplace

app = typer.Typer(
    help="Train the bundled model, or one that drafts for it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _commands() -> None:
    """Train the bundled model, or one that drafts for it."""


_Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the checkpoint.")]
_Resume = Annotated[bool, typer.Option("--resume", help="Go on from what lies in the work folder.")]
_Anneal = Annotated[
    bool, typer.Option("--anneal", help="End the long stage where it was last saved, cool down, and write the result.")
]
_Seed = Annotated[int, typer.Option(metavar="S", help="Seed of the weights and of everything random.")]
_Scale = Annotated[
    float, typer.Option(metavar="X", min=0.001, max=1000, help="Train for X times the steps of the recipe.")
]
_Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")]
_Threads = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="Processes that draw, and on CPU as many, of one thread, that train together."
    ),
]


@app.command()
def pocket(
    out: _Out,
    work: Annotated[
        Path, typer.Option("--work", metavar="DIR", help="Folder for frames and training state (40 GB).")
    ] = Path("runs/pocket"),
    start: Annotated[
        Path | None,
        typer.Option(
            "--start", metavar="DIR", exists=True, file_okay=False, help="A pocket to go on from, not from nothing."
        ),
    ] = None,
    one_frame: Annotated[
        bool, typer.Option("--one-frame", help="See pictures as one frame of 256 pixels, not as tiles of 512.")
    ] = False,
    resume: _Resume = False,
    anneal: _Anneal = False,
    seed: _Seed = 0,
    scale: _Scale = 1.0,
    device: _Device = "auto",
    threads: _Threads = 2,
) -> None:
    """Train a pocket model and write it as a Hugging Face checkpoint.

    Progress and held-out accuracy go to stderr. Broken off, the same command with --resume goes on.
    """
    from vlmfast.train.recipe import POCKET_RECIPE

    place = _workplace(work, device, threads, resume=resume, anneal=anneal)
    recipe = replace(POCKET_RECIPE.one_frame() if one_frame else POCKET_RECIPE, seed=seed)
    _train(recipe.scaled(scale), place, out, start)


@app.command()
def draft(
    out: _Out,
    work: Annotated[
        Path, typer.Option("--work", metavar="DIR", help="Folder for frames and training state (17 GB).")
    ] = Path("runs/draft"),
    resume: _Resume = False,
    seed: _Seed = 0,
    scale: _Scale = 1.0,
    device: _Device = "auto",
    threads: _Threads = 2,
) -> None:
    """Train a smaller model that drafts for the bundled one (`--draft-model`): same scenes, tokenizer and tower."""
    from vlmfast.checkpoint import bundled_model
    from vlmfast.train.recipe import DRAFT_RECIPE

    place = _workplace(work, device, threads, resume=resume, anneal=False)
    target = bundled_model()
    recipe = replace(DRAFT_RECIPE, seed=seed, tokenizer=target / "tokenizer.json", tower=target)
    _train(recipe.scaled(scale), place, out)


def _workplace(work: Path, device: str, threads: int, *, resume: bool, anneal: bool) -> Workplace:
    import torch

    from vlmfast.device import resolve_device
    from vlmfast.train.parallel import LOG_FORMAT
    from vlmfast.train.recipe import Workplace

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    torch.set_num_threads(threads)  # of this process, which scores the result
    chosen = resolve_device(device)
    return Workplace(
        folder=work,
        device=chosen,
        num_workers=threads,
        num_processes=threads if chosen.type == "cpu" else 1,
        resume=resume or anneal,  # what is ended goes on from its own stages
        anneal=anneal,
    )


def _train(recipe: Recipe, place: Workplace, out: Path, start: Path | None = None) -> None:
    from vlmfast.train.stages import train_pocket

    tally = train_pocket(recipe, place, out, start=start)
    write(f"{tally}\n{out}\n")

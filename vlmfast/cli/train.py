"""`vlmfast train`: the recipe of the bundled model as one command."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from vlmfast.cli.output import write

app = typer.Typer(
    help="Train the bundled model.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _commands() -> None:
    """Train the bundled model."""


@app.command()
def pocket(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the checkpoint.")],
    work: Annotated[
        Path, typer.Option("--work", metavar="DIR", help="Folder for frames, features and training state (12 GB).")
    ] = Path("runs/pocket"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from what lies in the work folder.")] = False,
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the weights and of everything random.")] = 0,
    scale: Annotated[
        float,
        typer.Option(metavar="X", min=0.001, max=1000, help="Train for X times the steps of the recipe."),
    ] = 1.0,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(metavar="N", min=1, help="CPU threads, and processes that draw.")] = 2,
) -> None:
    """Train a pocket model from nothing and write it as a Hugging Face checkpoint.

    Progress and held-out accuracy go to stderr. Broken off, the same command with --resume goes on.
    """
    import torch

    from vlmfast.device import resolve_device
    from vlmfast.train.recipe import FIRST_POCKET, Workplace, train_pocket

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(threads)
    recipe = replace(FIRST_POCKET, seed=seed).scaled(scale)
    place = Workplace(folder=work, device=resolve_device(device), num_workers=threads, resume=resume)
    tally = train_pocket(recipe, place, out)
    write(f"{tally}\n{out}\n")

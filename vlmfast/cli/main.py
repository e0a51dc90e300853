"""The entry point: commands, and what happens to errors on their way out.

A command's module imports what is slow inside its functions, so that help and bad arguments are answered at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

import vlmfast
from vlmfast.cli import cache, scenes, train
from vlmfast.cli.caption import caption
from vlmfast.cli.chat import chat
from vlmfast.cli.describe import describe
from vlmfast.cli.models import models
from vlmfast.cli.output import write, write_error
from vlmfast.cli.verify import verify
from vlmfast.errors import VLMFastError

app = typer.Typer(
    name="vlmfast",
    help="Fast answers about images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(describe)
app.command()(caption)
app.command()(chat)
app.command()(models)
app.command()(verify)
app.add_typer(cache.app, name="cache")
app.add_typer(scenes.app, name="scenes")
app.add_typer(train.app, name="train")


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0, or 2 for input that can not be used, or 130 after Ctrl-C."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  closed by the caller (`>&-`)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer must not fail on a terminal that lacks a character
    warnings.filterwarnings("ignore", module="PIL")  # of odd files, beside an answer or an error of our own
    try:
        app(args=args, prog_name="vlmfast")
    except VLMFastError as error:
        write_error(error)
        sys.exit(2)
    except OSError as error:
        write_error(f"{error.filename}: {error.strerror}" if error.filename else error)
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        write(f"vlmfast {vlmfast.__version__}\n")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass

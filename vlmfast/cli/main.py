"""The entry point: commands, and what happens to errors on their way out."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import vlmfast
from vlmfast.cli.describe import describe
from vlmfast.cli.models import models
from vlmfast.cli.output import write, write_error
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
app.command()(models)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0, or 2 for input that can not be used, or 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer must not fail on a terminal that lacks a character
    try:
        app(args=args, prog_name="vlmfast")
    except VLMFastError as error:
        write_error(error)
        sys.exit(2)


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


def _mount(name: str, summary: str) -> None:
    """Adds `vlmfast.cli.<name>:app` as a sub-command that is imported when it is called, and not for `--help`."""

    def run(context: typer.Context) -> None:
        sub_app = importlib.import_module(f"vlmfast.cli.{name}").app
        code = sub_app(args=context.args, prog_name=f"vlmfast {name}", standalone_mode=False)
        if isinstance(code, int) and code:
            raise typer.Exit(code)

    pass_on = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
    app.command(name, help=summary, add_help_option=False, context_settings=pass_on)(run)


_mount("scenes", "Make generated scenes with known truths, and score a model on them.")
_mount("train", "Train the bundled model.")

"""Options of the command for fewer visual tokens. All of them are lossy, and off unless given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias, cast

import typer

from vlmfast.cli.output import check_not_input
from vlmfast.errors import OptionError
from vlmfast.options import REDUCERS, FastV, Reduce, Resolution, ToMe, Vision

_KEEP = "a share up to 1 (all), or a number of tokens from 2 on"

ResolutionOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--resolution",
        metavar="R",
        help="high (the checkpoint's own), low, auto (lossy: the lowest at which a picture loses little), or the "
        "most tiles to encode.",
    ),
]
TomeOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--tome", metavar="R", help="Lossy: merge R patches in every layer of the vision tower (or a share)."),
]
ReduceOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--reduce", metavar="METHOD", help=f"Lossy: cut each picture's tokens by {', '.join(REDUCERS)}."),
]
KeepOption: TypeAlias = Annotated[
    str | None, typer.Option("--keep", metavar="K", help=f"What --reduce keeps: {_KEEP}, or auto. Default: 0.25.")
]
FastVOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--fastv", metavar="K", help=f"Lossy: keep K of a question's visual tokens inside the decoder: {_KEEP}."
    ),
]
FastVLayerOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--fastv-layer",
        metavar="L",
        help=f"The first layer that --fastv runs on fewer tokens. Default: {FastV().layer}.",
    ),
]

ShowTokensOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--show-tokens",
        metavar="FILE.png",
        help="Also draw which tokens were kept, merged (tinted) or left out (dark) by --tome, --reduce and --fastv.",
    ),
]


def check_show_tokens(file: Path | None, images: Sequence[str], num_questions: int) -> None:
    """Checks the file for the drawing.

    Raises:
        BadParameter: it can not be drawn to, or several questions would share it.
        OptionError: it is one of the pictures asked about.
    """
    if file is None:
        return
    if file.suffix.lower() != ".png" or not file.absolute().parent.is_dir():
        raise typer.BadParameter(
            "give a file name that ends in .png, in a folder that is there", param_hint="--show-tokens"
        )
    check_not_input(file, images, "--show-tokens")
    if num_questions > 1:
        raise typer.BadParameter("draws one question; give one picture, or --together", param_hint="--show-tokens")


def is_vision_given(context: typer.Context) -> bool:
    """Whether any of these options was given, be it with its default value."""
    names = ("resolution", "tome", "reduce", "keep", "fastv", "fastv_layer")
    sources = [context.get_parameter_source(name) for name in names]
    return any(source is not None and source.name != "DEFAULT" for source in sources)


def vision_of(
    *,
    resolution: str,
    tome: str | None,
    reduce: str | None,
    keep: str | None,
    fastv: str | None,
    fastv_layer: int | None,
) -> Vision:
    """What the options ask for.

    Raises:
        OptionError: a value out of its range.
    """
    if keep is not None and reduce is None:
        raise typer.BadParameter("says how much --reduce keeps; give --reduce METHOD, too", param_hint="--keep")
    if fastv is None and fastv_layer is not None:
        raise typer.BadParameter("says where --fastv begins; give --fastv K, too", param_hint="--fastv-layer")
    merging = cutting = dropping = None
    if tome is not None:
        with _of("--tome"):
            merging = ToMe(r=_number(tome, "--tome"))
    if reduce is not None:
        with _of("--reduce" if keep is None else "--reduce, --keep"):
            cutting = _reduce(reduce, keep)
    if fastv is not None:
        layer = FastV().layer if fastv_layer is None else fastv_layer
        with _of("--fastv" if fastv_layer is None else "--fastv, --fastv-layer"):
            dropping = FastV(layer=layer, keep=_number(fastv, "--fastv"))
    with _of("--resolution"):
        return Vision(resolution=_resolution(resolution), tome=merging, reduce=cutting, fastv=dropping)


@contextmanager
def _of(option: str) -> Iterator[None]:
    """Names the option in an error about its value."""
    try:
        yield
    except OptionError as error:
        raise OptionError(f"{option}: {error}") from error


def _resolution(text: str) -> Resolution:
    """A number of tiles, or a name, which `Vision` checks."""
    return int(text) if text.isdecimal() and len(text) < 1000 else cast(Resolution, text)


def _reduce(method: str, keep: str | None) -> Reduce:
    if keep is None:
        return Reduce(method)
    return Reduce(method, keep="auto" if keep == "auto" else _number(keep, "--keep"))


def _number(text: str, option: str) -> int | float:
    """A whole number is a count, one with a point a share."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise typer.BadParameter(f"'{text}' is no number", param_hint=option)

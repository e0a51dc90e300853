"""Options of the command for fewer visual tokens. All of them are lossy, and off unless given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias, cast

import typer

from vlmfast.options import REDUCERS, FastV, Reduce, Resolution, ToMe, Vision

_KEEP = "a share up to 1, or a number of tokens"

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
    int, typer.Option("--fastv-layer", metavar="L", help="The first layer that --fastv runs on fewer tokens.")
]

ShowTokensOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--show-tokens",
        metavar="FILE.png",
        help="Also draw which tokens were kept, merged (tinted) or left out (dark) by --tome, --reduce and --fastv.",
    ),
]


def check_show_tokens(file: Path | None, num_questions: int) -> None:
    """Raises BadParameter for a file that can not be drawn to, or that several questions would share."""
    if file is None:
        return
    if file.suffix.lower() != ".png" or not file.absolute().parent.is_dir():
        raise typer.BadParameter(
            "give a file name that ends in .png, in a folder that is there", param_hint="--show-tokens"
        )
    if num_questions > 1:
        raise typer.BadParameter("draws one question; give one picture, or --together", param_hint="--show-tokens")


def vision_of(
    *, resolution: str, tome: str | None, reduce: str | None, keep: str | None, fastv: str | None, fastv_layer: int
) -> Vision:
    """What the options ask for.

    Raises:
        OptionError: a value out of its range.
    """
    if keep is not None and reduce is None:
        raise typer.BadParameter("says how much --reduce keeps; give --reduce METHOD, too", param_hint="--keep")
    if fastv is None and fastv_layer != FastV().layer:
        raise typer.BadParameter("says where --fastv begins; give --fastv K, too", param_hint="--fastv-layer")
    return Vision(
        resolution=_resolution(resolution),
        tome=None if tome is None else ToMe(r=_number(tome, "--tome")),
        reduce=None if reduce is None else _reduce(reduce, keep),
        fastv=None if fastv is None else FastV(layer=fastv_layer, keep=_number(fastv, "--fastv")),
    )


def _resolution(text: str) -> Resolution:
    """A number of tiles, or a name, which `Vision` checks."""
    return int(text) if text.isdecimal() and len(text) < 10 else cast(Resolution, text)


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

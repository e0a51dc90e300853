"""`vlmfast scenes`: generated pictures with known truths, and a model's accuracy on them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmfast.cli.output import write, write_json

if TYPE_CHECKING:
    from PIL import Image

    from vlmfast.train.tally import Tally

app = typer.Typer(
    help="Make generated scenes with known truths, and score a model on them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def make(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the pictures and truth.jsonl.")],
    seed: Annotated[int, typer.Option(metavar="S", help="Which scenes; the same seed gives the same pictures.")] = 0,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="How many scenes.")] = 16,
    training: Annotated[
        bool, typer.Option("--training", help="Make training scenes. Without it they are held out: never trained on.")
    ] = False,
) -> None:
    """Write pictures, and a line of truth.jsonl for each: its things, and questions with right answers."""
    from vlmfast.train.scenes import Split
    from vlmfast.train.truth import write_scenes

    split = Split.TRAIN if training else Split.HELD_OUT
    for path in write_scenes(out, seed, count, split):
        if sys.stdout.isatty():
            write(f"\r{path.name}")
    write(f"\r{count} scenes and truth.jsonl in {out}\n" if sys.stdout.isatty() else f"{out}\n")


@app.command()
def score(
    seed: Annotated[int, typer.Option(metavar="S", help="Which held-out scenes.")] = 0,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="How many scenes; each has 6 to 8 questions.")] = 50,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME_OR_PATH", help="The default is the bundled model.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="auto, float32, bfloat16, or float16 (CUDA only).")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a table.")] = False,
) -> None:
    """Ask a model about held-out scenes and show its accuracy for each kind of question.

    The intervals are 95 % Wilson intervals. An answer counts as right for its content, not its wording.
    """
    from vlmfast.cli.loading import load_model
    from vlmfast.train.score import score as score_scenes

    vlm = load_model(model, device=device, dtype=dtype)

    def ask(picture: Image.Image, prompt: str) -> str:
        return vlm.describe(picture, prompt).text

    tally = score_scenes(ask, seed, count)
    if as_json:
        write_json({"seed": seed, "count": count, "model": model, "kinds": tally.to_json()})
    else:
        write(_table(tally))


def _table(tally: Tally) -> str:
    lines = [f"{'kind':<10}{'right':>8}{'asked':>8}{'accuracy':>11}   95 % interval\n"]
    for kind, share in tally.shares.items():
        low, high = share.interval
        lines.append(
            f"{kind:<10}{share.num_right:>8}{share.num_asked:>8}{share.accuracy:>10.1%}   {low:.1%} - {high:.1%}\n"
        )
    return "".join(lines)

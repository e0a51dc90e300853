"""`vlmfast scenes`: generated pictures with known truths, and a model's accuracy on them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmfast.cli.output import write, write_json

if TYPE_CHECKING:
    from vlmfast.train.tally import Share, Tally

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
    count: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many scenes (or pictures); about 8 questions each.")
    ] = 50,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME_OR_PATH", help="The default is the bundled model.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        str,
        typer.Option(metavar="DTYPE", help="auto, float32, bfloat16, int8 or int4 (CPU only), or float16 (CUDA only)."),
    ] = "auto",
    easy_vqa: Annotated[
        bool, typer.Option("--easy-vqa", help="Score on the test split of easy-VQA (pip install easy-vqa) instead.")
    ] = False,
    unseen: Annotated[
        bool, typer.Option("--unseen", help="Score on scenes of stickers that no training picture held instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a table.")] = False,
) -> None:
    """Ask a model about held-out scenes and show its accuracy for each kind of question.

    The intervals are 95 % Wilson intervals. An answer counts as right for its content, not its wording. Below them,
    what was right in part: the share of a page's words read in order, and F1 of the things that captions name.
    With --unseen nothing that is asked or answered names an unseen thing: a model can only name the likest it knows.
    """
    from vlmfast.cli.loading import load_model
    from vlmfast.train import score as scoring
    from vlmfast.train.asking import Asker
    from vlmfast.train.easy_vqa import require_easy_vqa

    if easy_vqa and unseen:
        raise typer.BadParameter("--easy-vqa and --unseen are two different sets of pictures; give one of them")
    if easy_vqa:
        require_easy_vqa()  # before the model is loaded
    asker = Asker(load_model(model, device=device, dtype=dtype))
    if easy_vqa:
        source, tally = "easy-vqa", scoring.score_easy_vqa(asker.ask, count)
    elif unseen:
        source, tally = "unseen", scoring.score_unseen(asker.ask, seed, count)
    else:
        source, tally = "scenes", scoring.score(asker.ask, seed, count, asker.continue_chat)
    if as_json:
        write_json({"source": source, "seed": seed, "count": count, "model": model, "kinds": tally.to_json()})
    else:
        write(_table(tally))


def _table(tally: Tally) -> str:
    from vlmfast.train.tally import CREDITED, Share

    lines = [f"{'kind':<16}{'right':>8}{'asked':>8}{'accuracy':>11}   95 % interval\n"]
    lines += [_row(kind, share) for kind, share in tally.shares.items()]
    if len(tally.shares) > 1:
        shares = tally.shares.values()
        both = Share(num_right=sum(s.num_right for s in shares), num_asked=sum(s.num_asked for s in shares))
        lines.append(_row("all", both))
    for kind, mean in tally.credits.items():
        low, high = mean.interval
        lines.append(f"{kind + ' ' + CREDITED[kind]:<32}{mean.value:>10.1%}   {low:.1%} - {high:.1%}\n")
    return "".join(lines)


def _row(kind: str, share: Share) -> str:
    low, high = share.interval
    return f"{kind:<16}{share.num_right:>8}{share.num_asked:>8}{share.accuracy:>10.1%}   {low:.1%} - {high:.1%}\n"

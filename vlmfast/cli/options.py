"""Options of the command, taken from the option classes: their docstrings are the help, their defaults the defaults."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Annotated, Any, TypeAlias

import typer

from vlmfast.errors import OptionError
from vlmfast.options import Sampling
from vlmfast.spec.options import DEFAULT_DRAFTER, Speculation

ModelOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME_OR_PATH",
        help="A checkpoint folder, or a Hugging Face hub name such as HuggingFaceTB/SmolVLM-256M-Instruct. "
        "The default is the small model that comes with vlmfast.",
    ),
]
DeviceOption: TypeAlias = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")]
DtypeOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--dtype", metavar="DTYPE", help="auto, float32, bfloat16, int8 or int4 (CPU only), or float16 (CUDA only)."
    ),
]
VisionDtypeOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--vision-dtype",
        metavar="DTYPE",
        help="Of the vision tower: auto (as everything else), or int8 (CPU only; lossy; faster on CPUs without AMX).",
    ),
]
NoCacheOption: TypeAlias = Annotated[
    bool, typer.Option("--no-cache", help="Use nothing of earlier work and keep nothing, in memory or on disk.")
]
SpeculationOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--speculation",
        metavar="HOW",
        help="Draft tokens and verify them together, which never changes an answer: auto, lookup (from the prompt "
        "and the answer so far), suffix (from earlier answers, too), model (with --draft-model) or off.",
    ),
]
DraftModelOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="NAME_OR_PATH",
        help="Draft with this smaller checkpoint, which must have the model's tokenizer.",
    ),
]


def drafting_of(speculation: str, draft_model: str | None) -> Speculation:
    """How to draft, by the two options; `--draft-model` alone drafts with that model.

    Raises:
        OptionError: there is no such drafter, or it and the draft model do not go together.
    """
    if draft_model is None:
        if speculation == "model":
            raise OptionError("--speculation model needs a model to draft with; name one with --draft-model")
        return Speculation.of(speculation).loadable()
    if speculation not in (DEFAULT_DRAFTER, "model"):
        raise OptionError(f"--draft-model goes with --speculation model, got {speculation}; leave one of them out")
    return Speculation(drafter="model", draft_model=draft_model)


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, read from its source; empty where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:
        return {}
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, following in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[field.target.id] = " ".join(following.value.value.split())
    return docs


def sampling_option(field: str, *names: str, metavar: str | None = None, note: str = "") -> Any:
    """A typer option for a field of `Sampling`; `note` is added to the field's own text."""
    text = " ".join(part for part in (field_docs(Sampling).get(field, ""), note) if part)
    return typer.Option(*names, help=text, metavar=metavar)

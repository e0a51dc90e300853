"""Options of the command, taken from the option classes: their docstrings are the help, their defaults the defaults."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any

import typer

from vlmfast.options import Sampling


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

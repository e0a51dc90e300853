"""What a command writes: answers on stdout, errors as one line on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vlmfast.errors import OptionError

_UNPRINTABLE = {code: None for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\t\n"}


def check_not_input(file: Path, inputs: Iterable[str | Path], option: str) -> None:
    """Raises OptionError where a file that is to be written is one of those that are read."""
    if any(is_same_file(file, source) for source in inputs):
        raise OptionError(f"{option}: {file} is one of the pictures; give another file")


def is_same_file(one: str | Path, other: str | Path) -> bool:
    """Whether both are there and the same, by whatever names."""
    try:
        return Path(one).samefile(other)
    except (OSError, ValueError):  # one of them is not there, or no path at all
        return False


def write(text: str) -> None:
    """Our own text to stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_foreign(text: str) -> None:
    """A model's text to stdout, at once. A terminal gets it without control characters: it must not steer it."""
    write(text.translate(_UNPRINTABLE) if sys.stdout.isatty() else text)


def write_json(value: dict[str, Any]) -> None:
    """One JSON object on a line of its own, at once."""
    text = json.dumps(value, ensure_ascii=False)
    if not text.isprintable():  # half characters of undecodable file names must stay distinguishable
        text = json.dumps(value)
    write(text + "\n")


def write_note(message: str) -> None:
    """A remark on stderr, beside the answers."""
    print(f"({' '.join(message.split()).translate(_UNPRINTABLE)})", file=sys.stderr)


def write_error(message: object) -> None:
    """One line on stderr, whatever the message holds."""
    line = " ".join(str(message).split()).translate(_UNPRINTABLE)
    print(f"vlmfast: error: {line}", file=sys.stderr)

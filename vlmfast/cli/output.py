"""What a command writes: answers on stdout, errors as one line on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

_UNPRINTABLE = {code: None for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\t\n"}


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

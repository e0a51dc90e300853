"""From token ids to text as it streams: whole characters only, and nothing of a stop text."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"
_KEPT_TOKENS = 6
"""Tokens kept before new ones when decoding: enough for a character of four bytes, one byte a token."""
_MAX_WINDOW = 24
"""Tokens decoded again for each new one, so that the cost does not grow with the answer (more only while held back)."""


class TextStream:
    """Turns the tokens of one answer into text, piece by piece.

    A character whose bytes are spread over tokens is held back until it is whole, and so is text that may turn out to
    begin a stop text. White space before the first character is dropped. The pieces concatenate to `text`.

        tokens   ............|--- window ---|
        text     ... released -----|-- new -|
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stop = stop
        self._window: list[int] = []
        self._seen = ""
        """What the window's tokens decoded to, as far as it was taken."""
        self._pending = ""
        self.text = ""
        """All text handed out so far."""
        self.stopped = False
        """Whether a stop text was met; nothing more comes out then."""

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that is certain now (often empty)."""
        self._window.append(token_id)
        return self._release(self._pending + self._take(self._decode()), final=False)

    def finish(self) -> str:
        """Returns what was held back for a stop text that did not come; an unfinished character is dropped."""
        return self._release(self._pending, final=True)

    def _take(self, decoded: str) -> str:
        """The part of the window's text that is new and certain; slides the window on when it has grown long.

        The bytes of an unfinished character decode to replacement characters at the end. Whether these stay is known
        when something else follows them; until then they are held back.
        """
        certain = decoded.rstrip(_REPLACEMENT)
        new = certain[len(self._seen) :]
        self._seen = certain
        if certain == decoded and len(self._window) > _MAX_WINDOW:
            self._window = self._window[-_KEPT_TOKENS:]
            self._seen = self._decode()
        return new

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._window, skip_special_tokens=True))

    def _release(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        cut = min((at for at in (text.find(stop) for stop in self._stop) if at >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            text, self._pending = text[:cut], ""
        else:
            held = 0 if final else self._stop_overlap(text)
            text, self._pending = text[: len(text) - held], text[len(text) - held :]
        if not self.text:
            text = text.lstrip()  # templates that end in "Assistant:" make answers begin with a space
        self.text += text
        return text

    def _stop_overlap(self, text: str) -> int:
        """Length of the longest end of `text` that a stop text could go on from."""
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:size])
            ),
            default=0,
        )

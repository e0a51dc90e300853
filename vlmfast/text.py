"""From token ids to text as it streams: whole characters only, and nothing of a stop text."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6
"""Tokens re-decoded before the new ones: enough for a character of four bytes, one byte a token."""


class TextStream:
    """Turns the tokens of one answer into text, piece by piece.

    A character whose bytes are spread over tokens is held back until it is whole, and so is text that may turn out to
    begin a stop text. The pieces concatenate to `text`.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._decoded_tokens = 0
        self._pending = ""
        self.text = ""
        """All text handed out so far."""
        self.stopped = False
        """Whether a stop text was met; nothing more comes out then."""

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that is certain now (often empty)."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._window_start() : self._decoded_tokens])
        after = self._decode(self._ids[self._window_start() :])
        if after.endswith(_REPLACEMENT) and len(self._ids) - self._decoded_tokens < _CONTEXT_TOKENS:
            return ""
        self._decoded_tokens = len(self._ids)
        return self._release(self._pending + after[len(before) :], final=False)

    def finish(self) -> str:
        """Returns what was held back; an unfinished character is dropped."""
        before = self._decode(self._ids[self._window_start() : self._decoded_tokens])
        rest = self._decode(self._ids[self._window_start() :])[len(before) :].rstrip(_REPLACEMENT)
        self._decoded_tokens = len(self._ids)
        return self._release(self._pending + rest, final=True)

    def _window_start(self) -> int:
        return max(0, self._decoded_tokens - _CONTEXT_TOKENS)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

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

"""Ctrl-C for processes that a test starts."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """A `preexec_fn`: a shell's background jobs are started with SIGINT ignored, and hand that on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

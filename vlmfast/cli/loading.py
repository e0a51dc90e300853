"""Loads a model for a command, with progress on the terminal when it takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vlmfast.spec.options import DEFAULT_DRAFTER, Drafting

if TYPE_CHECKING:
    from vlmfast.options import Caching, Limits
    from vlmfast.vlm import VLM

_QUIET_SECONDS = 1.0


def load_model(
    name: str | None,
    *,
    device: str,
    dtype: str,
    vision_dtype: str = "auto",
    limits: Limits | None = None,
    caching: Caching | None = None,
    speculation: Drafting = DEFAULT_DRAFTER,
) -> VLM:
    """The model by this name (None is the bundled one).

    Raises:
        ModelError: the checkpoint is missing or can not be used.
        DeviceError: the device or dtype is not available.
    """
    from vlmfast.checkpoint import resolve_folder

    folder = resolve_folder(name)  # a download shows the hub's own bars, so it comes before ours
    with _progress(f"Loading {folder.name}") as report:
        from vlmfast.vlm import VLM

        return VLM.from_pretrained(
            folder,
            device=device,
            dtype=dtype,
            vision_dtype=vision_dtype,
            limits=limits,
            caching=caching,
            speculation=speculation,
            progress=report,
        )


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr that appears once a second has passed and leaves no trace; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(title, total=None)
    timer = threading.Timer(_QUIET_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()  # it may be starting the bar at this moment
        bar.stop()

"""Where the disk caches live. No torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vlmfast.errors import OptionError
from vlmfast.options import Caching

ENVIRONMENT_VARIABLE = "VLMFAST_CACHE_DIR"


def cache_folder(caching: Caching) -> Path:
    """The folder of all disk caches: the option, else VLMFAST_CACHE_DIR, else `vlmfast` in the user's cache directory.

    Nothing is created.

    Raises:
        OptionError: no folder was named and the user has no home directory.
    """
    named = caching.folder or os.environ.get(ENVIRONMENT_VARIABLE)
    try:
        return Path(named).expanduser().absolute() if named else _user_cache() / "vlmfast"
    except RuntimeError as error:
        raise OptionError(
            f"no cache folder: the home directory is unknown ({error}); set {ENVIRONMENT_VARIABLE}"
        ) from error


def _user_cache() -> Path:
    """The platform's directory for caches of this user (XDG base directory specification on Linux)."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named) if os.path.isabs(named) else Path.home() / ".cache"

"""`vlmfast cache`: what is kept on disk of earlier work, and getting rid of it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from vlmfast.cli.output import write, write_error, write_json

if TYPE_CHECKING:
    from vlmfast.cache.disk import DiskStore, Entry
    from vlmfast.cache.weights import WeightsStore

app = typer.Typer(
    help="Look at what is kept on disk of earlier work, check it, clear it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Stores: TypeAlias = "Mapping[str, DiskStore | WeightsStore]"
_Folder = Annotated[
    Path | None,
    typer.Option("--folder", metavar="DIR", help="The cache folder. The default is VLMFAST_CACHE_DIR, or the user's."),
]
_Json = Annotated[bool, typer.Option("--json", help="Write JSON instead of a table.")]


@app.command()
def stats(folder: _Folder = None, as_json: _Json = False) -> None:
    """Show what the caches hold and how often they helped, counted over the life of the folder."""
    root, stores = _open(folder)
    values: dict[str, dict[str, Any]] = {}
    for name, store in stores.items():
        kinds = Counter(row["kind"] for row in store.entries(partial(_describe, name)))
        totals = store.totals() if name == "weights" else {"hits": 0, "misses": 0, **store.totals()}
        values[name] = {
            "entries_by_kind": dict(sorted(kinds.items())),
            **totals,
            "file_bytes": store.file_bytes,
            "limit_bytes": store.limit_bytes,
        }
    _exit_if_failed(stores)
    if as_json:
        write_json({"folder": str(root), **values})
        return
    rows = [
        (f"{name} {key.replace('_', ' ')}", _shown(key, value))
        for name in values
        for key, value in values[name].items()
    ]
    _table((str(root), ""), rows or [("empty", "")])


@app.command("list")
def list_entries(
    folder: _Folder = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="At most so many, the last used first.")] = 50,
    as_json: _Json = False,
) -> None:
    """List what is kept, the last used first; with --json one object a line."""
    _, stores = _open(folder)
    rows = [row for name, store in stores.items() for row in store.entries(partial(_describe, name))]
    _exit_if_failed(stores)
    rows.sort(key=lambda row: float(row["used_at"]), reverse=True)
    if as_json:
        for row in rows[:limit]:
            write_json(row)
        return
    fixed = ("kind", "key", "bytes", "used_at")
    _table(
        ("kind", "key", "bytes", "last used", "what"),
        [
            (
                row["kind"],
                row["key"][:12],
                str(row["bytes"]),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(row["used_at"])),
                ", ".join(f"{key} {str(value)[:16]}" for key, value in row.items() if key not in fixed),
            )
            for row in rows[:limit]
        ],
    )
    if len(rows) > limit:
        write(f"and {len(rows) - limit} more\n")


@app.command()
def verify(folder: _Folder = None, as_json: _Json = False) -> None:
    """Read every entry and drop those that are not whole; exit code 1 if there were any."""
    _, stores = _open(folder)
    num_good = num_bad = 0
    for name, store in stores.items():
        num_good += len(store.entries(partial(_describe, name)))
        num_bad += store.counters[f"{name}.dropped"]
    _exit_if_failed(stores)
    if as_json:
        write_json({"good": num_good, "dropped": num_bad})
    else:
        write(f"{num_good} entries are whole, {num_bad} were not and have been dropped\n")
    if num_bad:
        raise typer.Exit(1)


@app.command()
def clear(folder: _Folder = None, as_json: _Json = False) -> None:
    """Remove everything that is kept. Running processes go on and begin a new cache."""
    root, stores = _open(folder)
    num_bytes = sum(store.file_bytes for store in stores.values())
    for store in stores.values():
        store.clear()
        if store.folder.exists():
            write_error(f"{store.folder} can not be removed; check its permissions")
            raise typer.Exit(1)
    if as_json:
        write_json({"folder": str(root), "removed_bytes": num_bytes})
    else:
        write(f"removed {_megabytes(num_bytes)} from {root}\n")


def _open(folder: Path | None) -> tuple[Path, _Stores]:
    """The cache folder and the stores that are in it; none is made."""
    from vlmfast.cache.disk import DiskStore
    from vlmfast.cache.folder import cache_folder
    from vlmfast.metrics import Counters
    from vlmfast.options import Caching

    caching = Caching(folder=folder)
    root = cache_folder(caching)
    limits = {"features": caching.features_disk_bytes, "prefixes": caching.prefix_disk_bytes}
    stores: dict[str, DiskStore | WeightsStore] = {
        name: DiskStore(root / name, max_bytes=limit, counters=Counters(), name=name)
        for name, limit in limits.items()
        if (root / name).is_dir()
    }
    if (root / "weights").is_dir():
        from vlmfast.cache.weights import open_weights_store

        weights = open_weights_store(caching)
        assert weights is not None
        stores["weights"] = weights
    return root, stores


def _exit_if_failed(stores: _Stores) -> None:
    """The store has said what is wrong."""
    if any(store.failed for store in stores.values()):
        raise typer.Exit(1)


def _kind(store: str, key: bytes) -> str:
    if store == "weights":
        return "quantized weights"
    from vlmfast.cache.features import FEATURES
    from vlmfast.cache.key import WEIGHTS
    from vlmfast.cache.pictures import PICTURES

    kinds = {FEATURES: "features", PICTURES: "known file", WEIGHTS: "weights digest"}
    return kinds.get(key[:1], "unknown") if store == "features" else "prefix"


def _describe(store: str, entry: Entry, value: memoryview) -> dict[str, Any]:
    from vlmfast.cache.pictures import describe_picture
    from vlmfast.cache.record import describe_features

    kind = _kind(store, entry.key)
    row = {
        "kind": kind,
        "key": entry.key[1:].hex() if store == "features" else entry.key.hex(),
        "bytes": entry.num_bytes,
        "used_at": entry.used_at,
    }
    if kind == "features":
        row |= describe_features(value)
    elif kind == "known file":
        row |= describe_picture(value)
    elif kind == "quantized weights":
        row |= json.loads(bytes(value))
    return row


def _shown(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {kind}" for kind, count in value.items())
    return _megabytes(value) if "bytes" in key else str(value)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    import sys

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*map(escape, head))
    for row in rows:
        table.add_row(*map(escape, row))
    Console(file=sys.stdout).print(table)

"""What features depend on, as one name: `ImageKey`. Anything that changes a single bit of them belongs in here."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from vlmfast.cache.disk import DiskStore
from vlmfast.image.identity import digest_of
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.geometry import TilePlan
from vlmfast_models.weights import checkpoint_files

ImageKey: TypeAlias = str
"""sha256 in hex. Equal keys mean equal features, bit for bit."""

WEIGHTS = b"w"
"""First byte of a weights digest's key on disk."""
_SCHEMA = 1
"""Raise it when the same weights and pixels come to give other features."""


def vision_fingerprint(
    *,
    weights: str,
    network: str,
    preprocess: PreprocessConfig,
    arithmetic: Iterable[str],
    salt: str = "",
) -> str:
    """Digest of all that the features of every picture have in common.

    Args:
        weights: digest of the vision tower's and the connector's weights.
        network: what is made of them: the family and its configuration.
        arithmetic: dtype, device and implementations: what decides how sums are rounded.
        salt: keeps tenants apart.
    """
    return digest_of("vision", _SCHEMA, weights, network, repr(preprocess), json.dumps([*arithmetic]), salt)


def image_key(fingerprint: str, plan: TilePlan, picture_digest: str, merges: tuple[int, ...] = ()) -> ImageKey:
    """The name of a picture's whole features under a `vision_fingerprint`; `merges`: ToMe's schedule in the tower."""
    return digest_of("features", fingerprint, repr(plan), repr(merges), picture_digest)


def arithmetic_of(
    device: torch.device, dtype: torch.dtype, explanation: str, max_tiles: int, tower: str = ""
) -> tuple[str, ...]:
    """What decides the rounding of a run.

    Args:
        explanation: names the implementations of the operations.
        tower: number format of the vision tower's weights; empty is `dtype`.
    """
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return (str(dtype), device.type, processor, torch.__version__, explanation, f"{max_tiles} tiles", tower)


def file_identity(file: Path) -> tuple[int, ...]:
    """What changes when a file is written or replaced: device, inode, size, times of change."""
    found = file.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def weights_digest(folder: Path, wanted: Callable[[str], bool], store: DiskStore | None = None) -> str:
    """Digest of the checkpoint tensors whose names are `wanted`: names, dtypes, shapes and bytes.

    Each file is read once; `store` remembers the result by (device, inode, size, times of change).
    """
    parts: list[str] = []
    for file in checkpoint_files(folder):
        identity = file_identity(file)
        names = {name: entry for name, entry in _safetensors_header(file).items() if wanted(name)}
        if names:
            memo = WEIGHTS + bytes.fromhex(digest_of("weights", _SCHEMA, repr(identity), *sorted(names)))
            parts.append(_remembered(memo, store, partial(_tensors_digest, file, names)))
    return digest_of("weights", *sorted(parts))


def _remembered(memo: bytes, store: DiskStore | None, compute: Callable[[], str]) -> str:
    known = None if store is None else store.get(memo, lambda value: bytes(value).decode())
    if known is None:
        known = compute()
        if store is not None:
            store.put(memo, [known.encode()])
    return known


def _safetensors_header(file: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> dtype, shape, data_offsets. Format: github.com/huggingface/safetensors, section Format."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return dict(header)


def _tensors_digest(file: Path, names: dict[str, dict[str, Any]]) -> str:
    state = hashlib.sha256()
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            for name, entry in sorted(names.items()):
                begin, end = entry["data_offsets"]
                state.update(digest_of(name, repr((entry["dtype"], entry["shape"]))).encode())
                with view[start + begin : start + end] as tensor:
                    state.update(tensor)
    return state.hexdigest()

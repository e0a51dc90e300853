"""Too little memory, said as an error: before loading where that can be known, after a failed allocation elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vlmfast.errors import DeviceError
from vlmfast_models.weights import checkpoint_files

_FAILED_ALLOCATION = re.compile("allocate memory|out of memory|not enough memory", re.IGNORECASE)


@contextmanager
def memory_for_weights(folder: Path, stored_dtype: str, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Checks that a checkpoint's weights fit, once, and names a failed allocation in the context.

    Raises:
        DeviceError: they do not fit, or memory ran out; with what would help.
    """
    stored = getattr(torch, stored_dtype, torch.float32)
    needed = sum(file.stat().st_size for file in checkpoint_files(folder)) * dtype.itemsize // stored.itemsize
    free = _free_bytes(device)
    remedy = "close other programs, use a smaller --dtype, or another --device"
    if free is not None and needed > free:
        raise DeviceError(
            f"{folder}: its weights take {needed / 1e9:.1f} GB as {dtype}, {device} has {free / 1e9:.1f} GB free; "
            f"{remedy}"
        )
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if ran_out_of_memory(error):
            raise DeviceError(f"{folder}: {device} ran out of memory ({error}); {remedy}") from error
        raise


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: torch raises RuntimeError, with words that differ by device and system."""
    return isinstance(error, MemoryError) or bool(_FAILED_ALLOCATION.search(str(error)))


def _free_bytes(device: torch.device) -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available[0]) * 1024 if available else None

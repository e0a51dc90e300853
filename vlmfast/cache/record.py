"""Visual features as bytes: a header that says what they are, then the tensors as they lie in memory."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmfast.cache.disk import BadEntryError, Buffer
from vlmfast_models.batch import VisionFeatures
from vlmfast_models.geometry import TilePlan

_HEADER = struct.Struct("<HBBIIHH")
"""Schema, dtype, whether saliency follows, N, E, rows and columns of the tile grid."""
_SCHEMA = 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack_features(features: VisionFeatures) -> list[Buffer]:
    """The bytes of features on the CPU: header, saliency (float32 [N]) if there is one, tokens [N, E] as they are."""
    num_tokens, width = features.tokens.shape
    saliency = features.saliency
    header = _HEADER.pack(
        _SCHEMA,
        _DTYPES.index(features.tokens.dtype),
        saliency is not None,
        num_tokens,
        width,
        features.plan.rows,
        features.plan.cols,
    )
    return [header, *(bytes_of(tensor) for tensor in (saliency, features.tokens) if tensor is not None)]


def unpack_features(value: memoryview, plan: TilePlan) -> VisionFeatures:
    """The features of a picture of this plan, copied once, out of a buffer that may vanish.

    Raises:
        BadEntryError: they are of another version or another plan.
    """
    schema, dtype, scored, num_tokens, width, rows, cols = _header(value)
    if schema != _SCHEMA or dtype >= len(_DTYPES) or (num_tokens, rows, cols) != (plan.n_tokens, plan.rows, plan.cols):
        raise BadEntryError("features of another version or another plan")
    start = _HEADER.size
    end = start + (num_tokens * 4 if scored else 0)
    if len(value) != end + num_tokens * width * _DTYPES[dtype].itemsize:
        raise BadEntryError("features of another size than their header says")
    return VisionFeatures(
        tokens=tensor_of(value[end:], _DTYPES[dtype]).view(num_tokens, width),
        plan=plan,
        saliency=tensor_of(value[start:end], torch.float32) if scored else None,
    )


def describe_features(value: memoryview) -> dict[str, Any]:
    """What the header says, in plain values.

    Raises:
        BadEntryError: it is of another version.
    """
    schema, dtype, scored, num_tokens, width, rows, cols = _header(value)
    if schema != _SCHEMA or dtype >= len(_DTYPES):
        raise BadEntryError("features of another version")
    return {
        "num_tokens": num_tokens,
        "width": width,
        "dtype": str(_DTYPES[dtype]).removeprefix("torch."),
        "tiles": f"{rows}x{cols}+1" if rows else "1",
        "saliency": bool(scored),
    }


def _header(value: memoryview) -> tuple[int, ...]:
    if len(value) < _HEADER.size:
        raise BadEntryError("features cut short")
    return _HEADER.unpack_from(value)


def bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(array)


def tensor_of(value: memoryview, dtype: torch.dtype) -> Tensor:
    copy = torch.empty(len(value), dtype=torch.uint8)
    copy.numpy()[:] = np.frombuffer(value, np.uint8)
    return copy.view(dtype)

"""vlmfast: fast answers about images.

The public surface is what `__all__` lists. Names are loaded on first use, so that `import vlmfast` costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmfast.chat import Chat
    from vlmfast.default import describe
    from vlmfast.image.load import load_image
    from vlmfast.options import Batching, Caching, FastV, Limits, Reduce, Sampling, ToMe, Vision
    from vlmfast.spec.options import Speculation
    from vlmfast.types import Answer, CaptionError, Chunk, ImageInput, Timings, Usage
    from vlmfast.vlm import VLM

__version__ = "0.1.0"

__all__ = [
    "VLM",
    "Answer",
    "Batching",
    "Caching",
    "CaptionError",
    "Chat",
    "Chunk",
    "FastV",
    "ImageInput",
    "Limits",
    "Reduce",
    "Sampling",
    "Speculation",
    "Timings",
    "ToMe",
    "Usage",
    "Vision",
    "describe",
    "load_image",
]

_HOME = {
    "VLM": "vlmfast.vlm",
    "describe": "vlmfast.default",
    "Chat": "vlmfast.chat",
    "load_image": "vlmfast.image.load",
    "Batching": "vlmfast.options",
    "Caching": "vlmfast.options",
    "Limits": "vlmfast.options",
    "Sampling": "vlmfast.options",
    "Vision": "vlmfast.options",
    "Speculation": "vlmfast.spec.options",
    "ToMe": "vlmfast.options",
    "Reduce": "vlmfast.options",
    "FastV": "vlmfast.options",
    **dict.fromkeys(("Answer", "CaptionError", "Chunk", "ImageInput", "Timings", "Usage"), "vlmfast.types"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vlmfast' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

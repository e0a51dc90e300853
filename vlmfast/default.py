"""`describe`: one question without loading anything first, by a model that stays loaded."""

from __future__ import annotations

import os

from vlmfast.options import Sampling, Vision
from vlmfast.spec.options import Drafting
from vlmfast.types import Answer
from vlmfast.vlm import VLM, Images

_default: tuple[str | None, VLM] | None = None
"""The one piece of global state: the model behind `describe`, with the name it was asked for by."""


def describe(
    images: Images,
    prompt: str,
    *,
    model: VLM | str | os.PathLike[str] | None = None,
    sampling: Sampling | None = None,
    vision: Vision | None = None,
    speculation: Drafting | None = None,
) -> Answer:
    """Answers a question about a picture: `print(vlmfast.describe("dog.png", "What is in the picture?"))`.

    Args:
        images: a path, bytes, data URL, PIL picture, numpy array, or a list of these (one question over all of them).
        prompt: the question.
        model: a loaded `VLM`, a checkpoint folder or hub name (kept loaded until another is named), or None for the
            small model that comes with vlmfast.
        sampling: how to answer; greedy by default.
        vision: compute on fewer visual tokens (lossy); all of them by default.
        speculation: how to draft for this answer; None is as the model was loaded.

    Raises:
        VLMFastError: see `VLM.describe` and `VLM.from_pretrained`.
    """
    global _default
    if isinstance(model, VLM):
        return model.describe(images, prompt, sampling=sampling, vision=vision, speculation=speculation)
    name = None if model is None else os.fspath(model)
    if _default is None or _default[0] != name:
        _default = (name, VLM.from_pretrained(name))
    vlm = _default[1]
    return vlm.describe(images, prompt, sampling=sampling, vision=vision, speculation=speculation)

"""Model families. A family is found by the `model_type` of a checkpoint's config.json.

To add one: a module here with a class like `Idefics3`, stating its difference from its parent, and a line in
`FAMILIES`.
"""

from __future__ import annotations

import importlib
from typing import Any

from vlmfast_models.errors import UnsupportedModelError

FAMILIES: dict[str, tuple[str, str]] = {
    "idefics3": ("vlmfast_models.families.idefics3", "Idefics3"),
    "llava": ("vlmfast_models.families.llava", "Llava"),
    "llava_next": ("vlmfast_models.families.llava_next", "LlavaNext"),
    "llava_onevision": ("vlmfast_models.families.llava_next", "LlavaNext"),
    "smolvlm": ("vlmfast_models.families.idefics3", "Idefics3"),
}
"""model_type -> (module, class); modules are imported when a checkpoint asks for them."""


def family(model_type: str) -> Any:
    """The family class for a `model_type`.

    Raises:
        UnsupportedModelError: naming the types that are supported.
    """
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type '{model_type}' is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    module, name = FAMILIES[model_type]
    return getattr(importlib.import_module(module), name)

"""How the ways to compute less go together with everything else: one table, from which the docs' is made. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from vlmfast.errors import OptionError
from vlmfast.options import FastV, Vision


class Method(StrEnum):
    """A lossy way to compute less."""

    TOME = "ToMe"
    REDUCE = "Reduce"
    FASTV = "FastV"
    RESOLUTION = "resolution"
    INT8 = "int8, int4"
    VISION_INT8 = "int8 vision"


class Setting(StrEnum):
    """What a method may meet in a request."""

    FEATURE_CACHE = "feature cache"
    PREFIX_CACHE = "prefix cache"
    CHAT = "chat"
    PICTURES = "several pictures"
    BATCH = "batch"
    SPECULATION = "speculation"
    OTHERS = "the other methods"


_CELLS: Mapping[Method, Mapping[Setting, str]] = {
    Method.TOME: {
        Setting.FEATURE_CACHE: "features made with another schedule have another key",
        Setting.PREFIX_CACHE: "pictures in a prefix are known by the same key",
        Setting.CHAT: "one setting for all turns",
        Setting.PICTURES: "each frame is merged by itself",
        Setting.BATCH: "each request as alone",
        Setting.SPECULATION: "drafts are verified on the merged features",
        Setting.OTHERS: "reducers and FastV see the merged features",
    },
    Method.REDUCE: {
        Setting.FEATURE_CACHE: "features are stored whole and cut anew, whatever was asked before",
        Setting.PREFIX_CACHE: "a prefix is reused under the same reduction only",
        Setting.CHAT: "one setting for all turns",
        Setting.PICTURES: "each picture is cut by itself",
        Setting.BATCH: "each request as alone",
        Setting.SPECULATION: "drafts are verified on the shorter prompt",
        Setting.OTHERS: "cuts what ToMe gives; FastV ranks what is left",
    },
    Method.FASTV: {
        Setting.FEATURE_CACHE: "drops after the look-up; nothing pruned is stored",
        Setting.PREFIX_CACHE: "not used and not filled by such a request: what it keeps depends on the question",
        Setting.CHAT: "each turn's pictures are ranked by that turn's question; every turn is computed anew",
        Setting.PICTURES: "all pictures of a turn are ranked together",
        Setting.BATCH: "each request as alone, at its own layers; a prompt waits for a step with room for all of it",
        Setting.SPECULATION: "drafts are verified over the layers as they are; none in the pass that prunes",
        Setting.OTHERS: "ranks what ToMe and a reducer have left",
    },
    Method.RESOLUTION: {
        Setting.FEATURE_CACHE: "the plan of the tiles is part of the key",
        Setting.PREFIX_CACHE: "pictures in a prefix are known by the same key",
        Setting.CHAT: "one setting for all turns",
        Setting.PICTURES: "decided for each picture by itself",
        Setting.BATCH: "each request as alone",
        Setting.SPECULATION: "drafts are verified on the smaller pictures",
        Setting.OTHERS: "comes first; the others work on what it gives",
    },
    Method.INT8: {
        Setting.FEATURE_CACHE: "features are made in bfloat16 either way",
        Setting.PREFIX_CACHE: "keys and values carry the arithmetic that made them",
        Setting.CHAT: "the model's, for all turns",
        Setting.PICTURES: "does not depend on them",
        Setting.BATCH: "activations are rounded token by token: each request as alone",
        Setting.SPECULATION: "drafts are verified with the same weights",
        Setting.OTHERS: "decoder weights only (int4: its head in int8); the others decide as in bfloat16",
    },
    Method.VISION_INT8: {
        Setting.FEATURE_CACHE: "the tower's number format is part of the key",
        Setting.PREFIX_CACHE: "keys and values carry the arithmetic that made them",
        Setting.CHAT: "the model's, for all turns",
        Setting.PICTURES: "activations are rounded token by token: each frame as alone",
        Setting.BATCH: "each request as alone",
        Setting.SPECULATION: "drafts are verified on the same features",
        Setting.OTHERS: "ToMe merges by the keys, reducers cut the features that int8 gives",
    },
}


def cell(method: Method, setting: Setting) -> str:
    """How the two get along."""
    return _CELLS[method][setting]


def names_of(vision: Vision) -> tuple[str, ...]:
    """What a request asks for that changes answers, in the order it takes effect: "resolution low", "ToMe r=0.08"."""
    found: list[str] = []
    if vision.resolution != "high":
        found.append(f"{Method.RESOLUTION} {vision.resolution}")
    if vision.max_pixels is not None:
        found.append(f"max_pixels {vision.max_pixels}")
    if vision.tome is not None:
        r = vision.tome.r
        found.append(f"{Method.TOME} r={','.join(map(str, r)) if isinstance(r, tuple) else r}")
    if vision.reduce is not None:
        found.append(f"{Method.REDUCE} {vision.reduce.method} keep={vision.reduce.keep}")
    if vision.fastv is not None:
        steps = ", ".join(f"layer={layer} keep={keep}" for layer, keep in vision.fastv.steps)
        found.append(f"{Method.FASTV} {steps}" + (" at random" if vision.fastv.rank == "random" else ""))
    return tuple(found)


def check_layers(fastv: FastV, num_layers: int) -> None:
    """Raises OptionError where FastV names a layer that the decoder does not have."""
    for layer, _ in fastv.steps:
        if layer > num_layers:
            raise OptionError(f"FastV: layer={layer}, the decoder has {num_layers} layers; give 1 .. {num_layers}")


def markdown() -> str:
    """The table as docs/compose.md has it."""
    lines = [
        "# What goes together",
        "",
        "Made by `python -c 'import vlmfast.compose as c; print(c.markdown(), end=\"\")'`; a test compares.",
        "Every method is lossy, and off unless asked for. Every cell is tested in `tests/cpu/test_compose.py`.",
        "Refused with an error that says what to do instead: FastV for a prompt longer than one pass, or in a chat",
        'whose template rewrites earlier turns; `Reduce("pool")` for tokens in one grid with line breaks.',
        "",
        "| | " + " | ".join(Method) + " |",
        "|---" * (1 + len(Method)) + "|",
    ]
    lines += [
        f"| **{setting}** | " + " | ".join(cell(method, setting) for method in Method) + " |" for setting in Setting
    ]
    return "\n".join([*lines, ""])

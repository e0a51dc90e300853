"""Loading a checkpoint's weights: quantised ones come from disk where an earlier load has left them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vlmfast.cache.weights import WeightsStore, open_weights_store, weights_key
from vlmfast.checkpoint import Checkpoint
from vlmfast.options import Caching
from vlmfast_models.quantized import Plan, parts_of, quantization_plan, quantize_all, stored_form, with_parts
from vlmfast_models.weights import load_checkpoint


def load_weights(
    model: Any,
    checkpoint: Checkpoint,
    caching: Caching,
    *,
    dtype: str,
    vision_dtype: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fills `model` from the checkpoint, and says what of it `prepare_for_inference` shall quantise.

    Weights are quantised once, for later loads, too: where they are on disk so, their originals are not read.

    Args:
        dtype: "int8" and "int4" quantise the decoder.
        vision_dtype: "int8" quantises the vision tower.

    Raises:
        WeightsError: the checkpoint does not match its configuration.
    """
    model.decoder.quantization = dtype if dtype in ("int8", "int4") else None
    model.vision.int8 = vision_dtype == "int8"
    store = open_weights_store(caching)
    plan = quantization_plan(model)
    if store is None or not plan:
        load_checkpoint(model, checkpoint.folder, progress=progress)
        return
    known: set[str] = set()
    to_store: list[tuple[str, str, Plan]] = []
    for network in ("decoder", "vision"):  # a file each: the tower's is the same beside any decoder
        part: Plan = {name: entry for name, entry in plan.items() if name.startswith(f"{network}.")}
        if part:
            key, about = _name(model, checkpoint, network, part)
            if _restore(store, key, part):
                known.update(part)
            else:
                to_store.append((key, about, part))
    load_checkpoint(model, checkpoint.folder, progress=progress, known=known)
    for key, about, part in to_store:
        store.save(key, parts_of(quantize_all(part)), about)


def _name(model: Any, checkpoint: Checkpoint, network: str, part: Plan) -> tuple[str, str]:
    """The key of a network's quantised weights, and how to call them."""
    kinds = sorted({kind for _, kind in part.values()})
    dtype = str(next(model.parameters()).dtype)  # what the weights are rounded to before they are quantised
    scheme = (network, dtype, repr(checkpoint.config), *(f"{name} {kind}" for name, (_, kind) in sorted(part.items())))
    return weights_key(checkpoint.folder, *scheme), f"{checkpoint.folder.name} {network} {'+'.join(kinds)}"


def _restore(store: WeightsStore, key: str, part: Plan) -> bool:
    """Hands the layers their weights from disk; whether these are there."""
    found = store.load(key, stored_form(part))
    if found is None:
        return False
    for name, weight in with_parts(part, found).items():
        part[name][0].quantized = weight
    return True

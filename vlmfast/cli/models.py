"""`vlmfast models`: what loads, and the model that comes along."""

from __future__ import annotations

from vlmfast.checkpoint import bundled_model, supported_model_types
from vlmfast.cli.output import write
from vlmfast.errors import VLMFastError


def models() -> None:
    """List the model types that load and the bundled model."""
    write("Model types (model_type in a checkpoint's config.json), for --model NAME_OR_PATH:\n")
    for model_type in supported_model_types():
        write(f"  {model_type}\n")
    write("\nBundled model, used when no --model is given:\n")
    try:
        folder = bundled_model()
        num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        write(f"  {folder.name} ({num_bytes / 1e6:.0f} MB): {folder}\n")
    except VLMFastError as error:
        write(f"  {error}\n")
    write(
        "  Trained from scratch on generated scenes of stickers, shapes, signs and pages; it reads with many mistakes\n"
        "  and does not know photographs. It is for trying things out; name a real checkpoint for those.\n"
    )

"""Reading and writing checkpoints: safetensors files, whole or sharded, streamed tensor by tensor and strict.

A family states for each of its tensors which checkpoint tensors it is made of (`TensorSources`); every checkpoint
tensor must be used and every one of ours filled, or the error lists the names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vlmfast_models.errors import WeightsError

TensorSources = Mapping[str, tuple[tuple[str, int], ...]]
"""Our tensor name -> ((checkpoint name, rows), ...), stacked along the first dimension in that order."""


class CheckpointModule(nn.Module):
    """A network that knows how its tensors are called and shaped in a checkpoint."""

    def tensor_sources(self) -> TensorSources:
        """Where each tensor of this network is found; tensors tied to another are not listed."""
        raise TypeError(f"{type(self).__name__} does not say where its tensors are")

    def canonical_name(self, name: str) -> str:
        """The name that `tensor_sources` uses for a tensor that a file may call otherwise."""
        return name

    def ignored_tensor(self, name: str) -> bool:
        """Whether a checkpoint tensor carries nothing (a stored position table, a tied head written out)."""
        return False

    def tie(self) -> None:
        """Lets tensors that a checkpoint stores once share their memory."""

    def stored_shape(self, source: str) -> tuple[int, ...] | None:
        """The checkpoint's shape of a tensor where it differs from ours (a convolution that we run as a product)."""
        return None


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, through the index where there is one.

    Raises:
        WeightsError: no safetensors file, a broken index, or a shard of the index is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index} is not a safetensors index: {error}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise WeightsError(f"{folder}: shards named in the index are missing: {_listed(missing)}")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} has no *.safetensors file (pickle checkpoints are not loaded)")
    return files


def allocate(network: Callable[[], CheckpointModule], *, device: torch.device, dtype: torch.dtype) -> CheckpointModule:
    """The network with unfilled memory on `device`; nothing is initialised twice and nothing is held in float32."""
    with torch.device("meta"):
        model = network().to(dtype)
    model = model.to_empty(device=device)
    model.tie()  # moving off the meta device gave every parameter memory of its own
    return model


def load_checkpoint(
    model: CheckpointModule,
    folder: str | Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    known: Container[str] = frozenset(),
) -> None:
    """Fills `model` (a family network, on its device and in its dtype) from the checkpoint in `folder`.

    Args:
        progress: called as progress(tensors done, tensors in all).
        known: tensors of ours that are not filled.

    Raises:
        WeightsError: a tensor is missing, left over, of another shape, or a file is damaged.
    """
    sources = model.tensor_sources()
    parameters = dict(model.named_parameters())
    files = checkpoint_files(Path(folder))
    with ExitStack() as stack:
        where: dict[str, tuple[Any, str]] = {}
        for file in files:
            try:
                reader = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise WeightsError(
                    f"{file} can not be read as safetensors: {error}; is the download complete?"
                ) from error
            for name in reader.keys():  # noqa: SIM118  (the reader is no mapping)
                canonical = model.canonical_name(name)
                if where.get(canonical, (None, name))[1] != name:
                    raise WeightsError(f"{folder}: {where[canonical][1]} and {name} are the same tensor of the model")
                where[canonical] = reader, name
        _check_names(model, sources, where, folder)
        for done, (name, pieces) in enumerate(sources.items(), 1):
            if name not in known:
                _fill(model, parameters[name], name, pieces, where)
            if progress is not None:
                progress(done, len(sources))


def save_checkpoint(model: CheckpointModule, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes the model's tensors under their checkpoint names to `folder`/model.safetensors."""
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, pieces in model.tensor_sources().items():
        start = 0
        for source, rows in pieces:
            piece = parameters[name].detach()[start : start + rows].to("cpu", dtype)
            shape = model.stored_shape(source)
            tensors[source] = (piece if shape is None else piece.reshape(shape)).clone()
            start += rows
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = Path(folder) / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes it readable for its owner only


def _check_names(
    model: CheckpointModule, sources: TensorSources, where: Mapping[str, tuple[Any, str]], folder: str | Path
) -> None:
    wanted = {source for pieces in sources.values() for source, _ in pieces}
    missing = sorted(wanted - set(where))
    left_over = sorted(where[name][1] for name in set(where) - wanted if not model.ignored_tensor(name))
    problems = []
    if missing:
        problems.append(f"missing tensors: {_listed(missing)}")
    if left_over:
        problems.append(f"tensors that this architecture has no place for: {_listed(left_over)}")
    if problems:
        raise WeightsError(f"{folder}: " + "; ".join(problems))


def _fill(
    model: CheckpointModule,
    parameter: Tensor,
    name: str,
    pieces: Iterable[tuple[str, int]],
    where: Mapping[str, tuple[Any, str]],
) -> None:
    start = 0
    for source, rows in pieces:
        target = parameter.detach()[start : start + rows]
        expected = model.stored_shape(source) or tuple(target.shape)
        reader, stored = where[source]
        tensor = reader.get_tensor(stored)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise WeightsError(f"tensor {stored} is stored as {tensor.dtype}; quantized weights are not supported")
        if tuple(tensor.shape) != expected:
            raise WeightsError(
                f"tensor {stored} has shape {list(tensor.shape)}, the configuration needs {list(expected)}"
                + ("" if name == stored else f" (for {name})")
            )
        target.copy_(tensor.reshape(target.shape))
        start += rows


def _listed(names: list[str], limit: int = 12) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"

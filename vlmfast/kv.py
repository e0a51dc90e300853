"""Keys and values of the sequences, in pages. Page ids come from the scheduler; the tensors are the runner's."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast_models.config import TextConfig


class SequenceKV:
    """The keys and values of one sequence, in one page: [L, 2, G, capacity, D].

    Layers keep lengths of their own, since layers above a pruning boundary hold fewer tokens than those below it.
    """

    def __init__(self, config: TextConfig, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        # Untouched memory of a fresh allocation costs nothing: the system backs it when it is first written.
        shape = (config.num_layers, 2, config.num_kv_heads, capacity, config.head_dim)
        self._pages = torch.empty(shape, device=device, dtype=dtype)
        self._layers = [(page[0], page[1]) for page in self._pages]  # each [G, capacity, D]
        self.capacity = capacity
        self.lengths = [0] * config.num_layers

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds key, value [T, G, D] to a layer and returns all of its keys and values, views [G, S, D]."""
        start = self.lengths[layer]
        end = start + key.shape[0]
        assert end <= self.capacity, f"layer {layer}: {end} tokens in a page of {self.capacity}"
        keys, values = self._layers[layer]
        keys[:, start:end] = key.transpose(0, 1)
        values[:, start:end] = value.transpose(0, 1)
        self.lengths[layer] = end
        return keys[:, :end], values[:, :end]

    def truncate(self, length: int) -> None:
        """Forgets all tokens from `length` on, in every layer that has more."""
        self.lengths = [min(length, have) for have in self.lengths]

    def compact(self, start: int, path: Tensor) -> None:
        """Keeps, of the tokens from `start` on, those at the offsets `path` (int64 [P]), in that order."""
        for layer, (keys, values) in enumerate(self._layers):
            for rows in (keys, values):
                rows[:, start : start + len(path)] = rows[:, start + path]  # indexing copies first: overlap is safe
            self.lengths[layer] = start + len(path)

    def fork(self, other: SequenceKV, length: int) -> None:
        """Makes this page a copy of the first `length` tokens of another."""
        assert length <= self.capacity and all(have >= length for have in other.lengths)
        self._pages[:, :, :, :length] = other._pages[:, :, :, :length]
        self.lengths = [length] * len(self.lengths)


class KVPages:
    """The page tensors of a runner, made when an id is first used and kept for the next holder."""

    def __init__(self, config: TextConfig, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._capacity = config, capacity
        self._device, self._dtype = device, dtype
        self._pages: dict[int, SequenceKV] = {}

    def page(self, page_id: int) -> SequenceKV:
        """The page under an id, with what its holder has stored in it."""
        if page_id not in self._pages:
            self._pages[page_id] = SequenceKV(self._config, self._capacity, self._device, self._dtype)
        return self._pages[page_id]

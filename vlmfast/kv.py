"""Keys and values of the sequences, in pages, and how long they may get. Page ids come from the scheduler;
the tensors are the runner's."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmfast_models.config import ModelConfig, TextConfig

_log = logging.getLogger(__name__)
_TABLE_SHARE = 64
"""The tables of rotary positions, which are made whole, may take this part of the memory."""
_UNKNOWN_MEMORY = 16 * 2**30


def within_memory(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelConfig:
    """The configuration with no longer context than the device has memory for, see `text_within_memory`."""
    text = text_within_memory(config.text, device, dtype)
    return config if text is config.text else replace(config, text=text)


def text_within_memory(text: TextConfig, device: torch.device, dtype: torch.dtype) -> TextConfig:
    """A decoder's configuration with no longer context than the device has memory for.

    A checkpoint may claim any number of positions. Of these remain as many as the page of one sequence could hold if
    it had all memory, and as the tables of positions could with a 64th of it.
    """
    memory = total_memory(device)
    page_bytes = text.num_layers * 2 * text.num_kv_heads * text.head_dim * dtype.itemsize  # of one token
    table_bytes = 2 * text.head_dim * torch.float32.itemsize
    most = max(min(memory // page_bytes, memory // _TABLE_SHARE // table_bytes), 1)
    if text.max_positions <= most:
        return text
    _log.info("the context is %d tokens, not %d: no more fit in memory", most, text.max_positions)
    return replace(text, max_positions=most)


def total_memory(device: torch.device) -> int:
    """Bytes that the device has in all; a guess of 16 GiB where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return _UNKNOWN_MEMORY


@dataclass(frozen=True, slots=True, eq=False)
class KVSegment:
    """Keys and values of consecutive tokens outside of any page: [L, 2, G, n, D], in memory of its own."""

    rows: Tensor

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes

    def split(self, at: int) -> tuple[KVSegment, KVSegment]:
        """The first `at` tokens and the rest, both copied: a part that is dropped gives its memory back."""
        return KVSegment(_copied(self.rows[..., :at, :])), KVSegment(_copied(self.rows[..., at:, :]))


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
        self._left_out = [0] * config.num_layers

    @property
    def storage(self) -> Tensor:
        """The whole page."""
        return self._pages

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

    def keys(self, layer: int) -> Tensor:
        """All keys of a layer, a view [G, S, D]."""
        return self._layers[layer][0][:, : self.lengths[layer]]

    def truncate(self, length: int) -> None:
        """Forgets all tokens from `length` on, in every layer that has more."""
        if length == 0:
            self._left_out = [0] * len(self.lengths)
        self.lengths = [min(length - out, have) for out, have in zip(self._left_out, self.lengths, strict=True)]

    def settle(self, length: int) -> None:
        """Notes that the page holds `length` tokens, and that what a layer lacks of them was left out of it.

        From here on only tokens after these may be forgotten, or all.
        """
        self._left_out = [length - have for have in self.lengths]

    def compact(self, num_last: int, path: Sequence[int]) -> None:
        """Keeps, of each layer's last `num_last` tokens, those at the offsets `path`, in that order."""
        if list(path) == list(range(len(path))):  # the first ones, where they are
            self.lengths = [length - num_last + len(path) for length in self.lengths]
            return
        offsets = torch.tensor(path, device=self._pages.device)
        for layer, (keys, values) in enumerate(self._layers):
            start = self.lengths[layer] - num_last
            for rows in (keys, values):
                rows[:, start : start + len(path)] = rows[:, start + offsets]  # indexing copies first: overlap is safe
            self.lengths[layer] = start + len(path)

    def fork(self, other: SequenceKV, length: int) -> None:
        """Makes this page a copy of the first `length` tokens of another."""
        assert length <= self.capacity and all(have >= length for have in other.lengths)
        self._pages[:, :, :, :length] = other._pages[:, :, :, :length]
        self.lengths = [length] * len(self.lengths)

    def load(self, segment: KVSegment, num_tokens: int) -> None:
        """Appends the first tokens of a segment to every layer; the layers must be equally long."""
        start, end = self.lengths[0], self.lengths[0] + num_tokens
        assert end <= self.capacity and self.lengths == [start] * len(self.lengths)
        self._pages[:, :, :, start:end] = segment.rows[:, :, :, :num_tokens]
        self.lengths = [end] * len(self.lengths)

    def copy_out(self, start: int, end: int) -> KVSegment:
        """A copy of the tokens start .. end - 1, which every layer must have."""
        assert start < end <= min(self.lengths)
        return KVSegment(_copied(self._pages[:, :, :, start:end]))


def bytes_per_token(config: TextConfig, dtype: torch.dtype) -> int:
    """Size of one token's keys and values in all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


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


def _copied(rows: Tensor) -> Tensor:
    return rows.clone(memory_format=torch.contiguous_format)

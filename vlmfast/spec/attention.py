"""Attention of one decoder pass over sequences, and over trees drafted after them."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.kv import SequenceKV
from vlmfast.spec.tree import DraftTree
from vlmfast_kernels.masks import tree_mask
from vlmfast_kernels.ops.attention import attend, attend_masked


class BatchAttention:
    """Attention of a ragged batch: each sequence's rows over its own page."""

    def __init__(self, parts: list[tuple[int, int, SequenceKV]], device: torch.device, dtype: torch.dtype) -> None:
        self.causal_pages = parts
        self._attend = attend.resolve(device, dtype)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `vlmfast_models.decoder.Attention`."""
        if len(self.causal_pages) == 1:
            return self._attend(query, *self.causal_pages[0][2].append(layer, key, value))
        mixed = [
            self._attend(query[start:end], *kv.append(layer, key[start:end], value[start:end]))
            for start, end, kv in self.causal_pages
        ]
        return torch.cat(mixed)


def row_parents(num_rows: int, draft: DraftTree) -> tuple[int, ...]:
    """For `tree_mask`: rows of a sequence one after the other, and after the last of them a draft."""
    return (*range(-1, num_rows - 1), *(num_rows + parent for parent in draft.parents))


class TreeAttention:
    """As `BatchAttention`, where drafts branch. No `causal_pages`: the compiled step knows no trees.

    Args:
        parents: for each part the row above each of its rows (see `tree_mask`), counted within the part.
    """

    def __init__(
        self,
        parts: list[tuple[int, int, SequenceKV]],
        parents: list[tuple[int, ...]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._parts = parts
        self._parents = parents
        self._device = device
        self._attend = attend_masked.resolve(device, dtype)
        self._masks: dict[tuple[int, int], Tensor] = {}
        """(part, keys) -> mask: layers of one length share it."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `vlmfast_models.decoder.Attention`."""
        mixed = []
        for index, (start, end, kv) in enumerate(self._parts):
            keys, values = kv.append(layer, key[start:end], value[start:end])
            at = index, keys.shape[1]
            if at not in self._masks:
                self._masks[at] = tree_mask(self._parents[index], keys.shape[1], self._device)
            mixed.append(self._attend(query[start:end], keys, values, self._masks[at]))
        return torch.cat(mixed)

"""Which key a query may see, as small dense masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Returns bool [T, S], true where query t of the last T tokens may see key s: s <= S - T + t."""
    rows = torch.arange(num_keys - num_queries, num_keys, device=device)
    return torch.arange(num_keys, device=device) <= rows[:, None]


def tree_mask(parents: Sequence[int], num_keys: int, device: torch.device) -> Tensor:
    """Returns bool [T, S], true where row t of a tree may see key s: the S - T keys before the tree, and of the tree's
    own the row itself and those above it.

    parents[t] < t is the row above t, -1 where there is none. Of a chain it is the causal mask.
    """
    num_past = num_keys - len(parents)
    mask = torch.zeros(len(parents), num_keys, dtype=torch.bool)
    mask[:, :num_past] = True
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] = mask[parent]
        mask[row, num_past + row] = True
    return mask.to(device)

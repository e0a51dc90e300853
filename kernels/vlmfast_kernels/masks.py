"""Which key a query may see, as small dense masks."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Returns bool [T, S], true where query t of the last T tokens may see key s: s <= S - T + t."""
    rows = torch.arange(num_keys - num_queries, num_keys, device=device)
    return torch.arange(num_keys, device=device) <= rows[:, None]

"""AdamW with warm-up and decay, and training state that survives an interruption. Knows no model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.errors import InputError
from vlmfast.train.parallel import average_gradients, rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long and how fast one stage learns."""

    num_steps: int
    batch_size: int
    learning_rate: float
    warmup_steps: int = 150
    weight_decay: float = 0.05
    final_share: float = 0.02
    """Learning rate at the end, as a share of the peak; 1 keeps it constant, so that a stage may end anywhere."""
    max_gradient: float = 1.0
    muon_scale: float = 2.0
    """Learning rate of Muon's matrices, in `learning_rate`s."""

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then half a cosine."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.learning_rate * (self.final_share + (1 - self.final_share) * cosine)


class Optimiser:
    """Steps the parameters of some modules along a schedule; matrices decay, everything else does not.

    The matrices of the layers take Muon's steps (Jordan et al. 2024, kellerjordan.github.io/posts/muon), scaled to the
    size of AdamW's (Liu et al., arXiv 2502.16982); all other parameters take AdamW's.
    """

    def __init__(self, modules: Iterable[nn.Module], schedule: Schedule) -> None:
        self.schedule = schedule
        # A tied matrix appears under two names; the dictionary keeps it once.
        named = {id(p): (name, p) for module in modules for name, p in module.named_parameters()}
        self.parameters = [parameter for _, parameter in named.values()]
        hidden = [p for name, p in named.values() if name.startswith("layers.") and p.ndim == 2]
        taken = {id(p) for p in hidden}
        others = [p for p in self.parameters if id(p) not in taken]
        groups = [
            {"params": [p for p in others if p.ndim >= 2], "weight_decay": schedule.weight_decay},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        rate = schedule.learning_rate
        self.optimisers: dict[str, torch.optim.Optimizer] = {
            "adamw": torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
        }
        if hidden:
            self.optimisers["muon"] = torch.optim.Muon(
                hidden, lr=rate, weight_decay=schedule.weight_decay, adjust_lr_fn="match_rms_adamw"
            )

    def step(self, loss: Tensor, step: int) -> None:
        """One update from the loss. Mutates the parameters and clears their gradients."""
        rate = self.schedule.rate(step)
        loss.backward()
        average_gradients(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, self.schedule.max_gradient)
        for name, optimiser in self.optimisers.items():
            for group in optimiser.param_groups:
                group["lr"] = rate * (self.schedule.muon_scale if name == "muon" else 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)


def save_state(path: Path, step: int, modules: dict[str, nn.Module], optimiser: Optimiser | None = None) -> None:
    """Writes everything a stage needs to go on. An interruption while writing leaves the previous file whole.

    Of several processes that train as one only the first writes.
    """
    if rank() > 0:
        return
    state: dict[str, Any] = {"step": step, "modules": {name: module.state_dict() for name, module in modules.items()}}
    if optimiser is not None:
        state |= {name: part.state_dict() for name, part in optimiser.optimisers.items()}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_state(path: Path, modules: dict[str, nn.Module], optimiser: Optimiser | None = None) -> int:
    """Fills the modules (and the optimiser) from a file of `save_state`; returns the step to go on from.

    Raises:
        InputError: the file was left by another optimiser, that of an earlier version.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, module in modules.items():
        module.load_state_dict(state["modules"][name])
    if optimiser is not None:
        if missing := optimiser.optimisers.keys() - state.keys():
            raise InputError(f"{path} has no state of {', '.join(missing)}: an earlier version left it; train anew")
        for name, part in optimiser.optimisers.items():
            part.load_state_dict(state[name])
    return int(state["step"])

"""Several processes that train as one: each takes its part of every batch, and their gradients are averaged.

On CPU this uses the cores better than threads of one process, which wait for each other many times within a step.
Without a group, everything here is for one process alone.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

LOG_FORMAT = "%(asctime)s %(message)s"


def rank() -> int:
    """This process's number in its group; the first one scores, logs and saves."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Processes of the group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def my_part(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """This process's share of a batch."""
    return numbers[rank() :: size()]


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Replaces every gradient by its mean over the group, in one message. Parameters without one count as zero.

    All processes count alike, also where a batch does not divide evenly.
    """
    if size() == 1:
        return
    with torch.no_grad():
        flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
        dist.all_reduce(flat)
        flat /= size()
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)


def run_group(function: Callable[[], None], num_processes: int) -> None:
    """Calls `function` in each of so many new processes of one group, which run one thread each.

    `function` must be importable by name (`functools.partial` of such a function will do).

    Raises:
        torch.multiprocessing.ProcessRaisedException: one of them failed; the others are stopped.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    level = logging.getLogger().getEffectiveLevel()
    spawn(_member, args=(function, num_processes, port, level), nprocs=num_processes)


def _member(number: int, function: Callable[[], None], num_processes: int, port: int, log_level: int) -> None:
    logging.basicConfig(level=log_level, format=LOG_FORMAT)
    if hasattr(os, "sched_setaffinity"):  # each on cores of its own, where there are enough
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number::num_processes] or cores)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=num_processes)
    try:
        function()
    finally:
        dist.destroy_process_group()

"""A Llama-type decoder over a few tokens in one call: no Python and no torch between its layers.

Hidden states are float32 from layer to layer; weights are bfloat16 or int8, keys and values bfloat16. A token's numbers
do not depend on what else is in the call, nor on how a sequence is cut into calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from vlmfast_kernels.cpu.library import BatchStruct, DecoderStruct, LayerStruct, address, library, why_not_compiled
from vlmfast_kernels.cpu.packed import PackedWeight

_MAX_HEAD_DIM = 256


class Page(Protocol):
    """Keys and values of one sequence."""

    @property
    def storage(self) -> Tensor:
        """bfloat16 [L, 2, G, capacity, D], contiguous."""
        ...

    lengths: list[int]
    """Tokens held, by layer."""


PageRows = tuple[int, int, Page]
"""(start, end, page): rows start .. end - 1 of a batch continue the page; each sees all before it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLayer:
    """One layer's weights; norms are vectors, None where the decoder has none."""

    attn_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    qkv: PackedWeight
    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a decoder."""

    hidden: int
    heads: int
    groups: int
    dim: int
    intermediate: int
    eps: float


def why_not_step(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why a decoder can not run as one call; empty when it can."""
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        return f"heads of {head_dim} dimensions; even and at most {_MAX_HEAD_DIM}"
    return why_not_compiled(device, dtype)


class DecoderStep:
    """The compiled decoder. One call at a time: calls share a workspace."""

    def __init__(
        self,
        shape: StepShape,
        layers: Sequence[StepLayer],
        norm: Tensor,
        head: PackedWeight,
        rope: tuple[Tensor, Tensor],
    ) -> None:
        """rope: cosines and sines, float32 [positions, D/2]."""
        self._shape, self._num_layers, self._vocab_size = shape, len(layers), head.outputs
        self._cos, self._sin = (table.float().contiguous() for table in rope)
        self._norm = norm.detach().float()
        self._kept: list[object] = [layers, head]  # C holds addresses of these
        self._layers = (LayerStruct * len(layers))(*(self._layer(layer) for layer in layers))
        self._decoder = DecoderStruct(
            num_layers=len(layers),
            hidden=shape.hidden,
            heads=shape.heads,
            groups=shape.groups,
            dim=shape.dim,
            intermediate=shape.intermediate,
            eps=shape.eps,
            layers=self._layers,
            cos=address(self._cos),
            sin=address(self._sin),
            norm=address(self._norm),
            head=head.struct(),
        )
        self._workspace = torch.empty(0, dtype=torch.uint8)
        packed = [weight for layer in layers for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self.num_bytes = sum(weight.num_bytes for weight in (*packed, head))
        """Weights that one call reads."""

    def run(self, hidden: Tensor, positions: Tensor, parts: Sequence[PageRows], first: int, last: int) -> Tensor:
        """Hidden states [T, E] of any float dtype through layers first .. last - 1: float32 [T, E].

        Adds the keys and values to the pages. positions is int64 [T], each within the rotary tables.
        """
        rows = len(hidden)
        out = hidden.float().contiguous()
        if out.data_ptr() == hidden.data_ptr():
            out = out.clone()
        if rows == 0 or first >= last:
            return out
        assert positions.dtype == torch.int64 and len(positions) == rows
        positions = positions.contiguous()
        batch, longest, _kept = self._batch(out, positions, parts, first, last)
        threads = torch.get_num_threads()
        memory = self._memory(rows, longest, threads)
        library().vlmfast_layers(
            ctypes.byref(self._decoder), ctypes.byref(batch), first, last, longest, memory, threads
        )
        for start, end, page in parts:
            page.lengths[first:last] = [length + end - start for length in page.lengths[first:last]]
        return out

    def go_on(
        self, tokens: Tensor, positions: Tensor, pages: Sequence[Page], table: Tensor, steps: int, num_choices: int
    ) -> Tensor:
        """The likeliest tokens int64 [steps, B] that follow, each after the one before, tokens int64 [B] at positions.

        Adds the keys and values of `tokens` and of all that is chosen but the last to the pages, one for each sequence.

        Args:
            table: embeddings, bfloat16 [V, E].
            num_choices: tokens 0 .. num_choices - 1 may be chosen, of equals the first.
        """
        assert steps > 0 and table.dtype == torch.bfloat16 and table.is_contiguous()
        rows = len(pages)
        parts = [(index, index + 1, page) for index, page in enumerate(pages)]
        tokens, positions = tokens.contiguous(), positions.clone()
        hidden = torch.empty(rows, self._shape.hidden)
        batch, longest, kept = self._batch(hidden, positions, parts, 0, self._num_layers, steps)
        chosen = torch.empty(steps, rows, dtype=torch.int64)
        logits = torch.empty(rows, self._vocab_size)
        threads = torch.get_num_threads()
        library().vlmfast_continue(
            ctypes.byref(self._decoder),
            ctypes.byref(batch),
            table.data_ptr(),
            tokens.data_ptr(),
            steps,
            min(num_choices, self._vocab_size),
            longest,
            positions.data_ptr(),
            ctypes.addressof(kept[-1]),
            chosen.data_ptr(),
            logits.data_ptr(),
            self._memory(rows, longest, threads),
            threads,
        )
        for page in pages:
            page.lengths[:] = [length + steps for length in page.lengths]
        return chosen

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary scores, float32 [T, V], of last-layer states [T, E]: final norm and head."""
        hidden = hidden.float().contiguous()
        out = torch.empty(len(hidden), self._vocab_size)
        if len(hidden):
            threads = torch.get_num_threads()
            memory = self._memory(len(hidden), 1, threads)
            library().vlmfast_logits(
                ctypes.byref(self._decoder), hidden.data_ptr(), len(hidden), out.data_ptr(), memory, threads
            )
        return out

    def _batch(
        self, hidden: Tensor, positions: Tensor, parts: Sequence[PageRows], first: int, last: int, steps: int = 1
    ) -> tuple[BatchStruct, int, tuple[Any, ...]]:
        """For C: the rows, the most keys one of them sees in `steps`, and what must live as long."""
        rows = len(hidden)
        part_of_row, index_in_part, lengths, longest = self._places(rows, parts, first, last, steps)
        pages = [page.storage for _, _, page in parts]
        arrays = (
            (c_int32 * rows)(*part_of_row),
            (c_int32 * rows)(*index_in_part),
            (c_void_p * len(pages))(*(page.data_ptr() for page in pages)),
            (c_int64 * len(pages))(*(page.shape[3] for page in pages)),
            (c_int32 * len(lengths))(*lengths),
        )
        addresses = [ctypes.addressof(array) for array in arrays]
        return BatchStruct(rows, hidden.data_ptr(), positions.data_ptr(), *addresses), longest, arrays

    def _places(
        self, rows: int, parts: Sequence[PageRows], first: int, last: int, steps: int
    ) -> tuple[list[int], list[int], list[int], int]:
        """By row: its part, its place in it. By part and layer: the tokens already held. The most keys a row sees."""
        part_of_row: list[int] = []
        index_in_part: list[int] = []
        lengths: list[int] = []
        longest = 0
        for number, (start, end, page) in enumerate(parts):
            storage, count = page.storage, end - start
            assert start == len(part_of_row), "parts must follow each other"
            assert storage.dtype == torch.bfloat16 and storage.is_contiguous() and len(page.lengths) == self._num_layers
            most = max(page.lengths[first:last]) + count + steps - 1
            assert most <= storage.shape[3], f"{most} tokens in a page of {storage.shape[3]}"
            longest = max(longest, most)
            part_of_row += [number] * count
            index_in_part += range(count)
            lengths += page.lengths
        assert len(part_of_row) == rows, "parts must cover the batch"
        return part_of_row, index_in_part, lengths, longest

    def _memory(self, rows: int, longest: int, threads: int) -> int:
        size = library().vlmfast_workspace_bytes(ctypes.byref(self._decoder), rows, longest, threads)
        if len(self._workspace) < size:
            self._workspace = torch.empty(size, dtype=torch.uint8)
        return self._workspace.data_ptr()

    def _layer(self, layer: StepLayer) -> LayerStruct:
        values: dict[str, object] = {}
        for field in fields(layer):
            value = getattr(layer, field.name)
            if isinstance(value, PackedWeight):
                values[field.name] = value.struct()
            else:
                wide = None if value is None else value.detach().float().contiguous()
                self._kept.append(wide)
                values[field.name] = address(wide)
        return LayerStruct(**values)

"""What crosses between networks and runtime: pixels going in, features coming out, one forward's tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vlmfast_models.decoder import Attention
from vlmfast_models.geometry import TilePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchBatch:
    """The tiles of one picture as its checkpoint wants them."""

    pixels: Tensor
    """float32 [P, C, side, side], normalised, on the CPU; the global frame last."""
    plan: TilePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionFeatures:
    """A picture's visual tokens in the decoder's width, in prompt order."""

    tokens: Tensor
    """[N, E] in the run's dtype, with N == plan.n_tokens."""
    plan: TilePlan
    saliency: Tensor | None = None
    """float32 [N]: the attention that each token received in the tower; None where it was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBatch:
    """Every tensor that one decoder pass over a ragged batch needs. The tokens of all sequences stand in one row."""

    embeddings: Tensor
    """[T, E]: token embeddings with the visual tokens already in place."""
    positions: Tensor
    """int64 [T]: each token's position in its own sequence."""
    attention: Attention
    """Knows which rows belong to which sequence, their cached keys and values, and their mask."""
    logit_rows: Tensor
    """int64 [R]: the rows whose logits are wanted."""

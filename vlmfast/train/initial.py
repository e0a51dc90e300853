"""A start for the vision tower from which little data suffices: it knows at once which patches are neighbours.

Positions begin as 2-D sine waves (Beyer et al., arXiv 2205.01580) and queries begin equal to keys (after Trockman and
Kolter, arXiv 2305.09828), so that attention first looks at similar and nearby patches instead of everywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vlmfast_models.vit import VisionBlock, VisionTransformer

_POSITION_SCALE = 0.5
_LONGEST_WAVE = 30.0
"""Longest wave over the shortest; a tile is about 16 patches wide."""
_QUERY_STD = 0.06
"""With normalised input of width 192 and heads of 64 a patch starts about 5 logits in favour of itself."""


def initialize_vision(vision: VisionTransformer, *, seed: int) -> None:
    """Fills the tower in place. Matrices are Xavier-normal, norms one, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in vision.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                std = math.sqrt(2 / sum(parameter.shape))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        side, width = vision.config.patches_per_side, vision.config.hidden_size
        vision.position_embed.weight.copy_(_POSITION_SCALE * sine_positions(side, width))
        for layer in vision.layers:
            assert isinstance(layer, VisionBlock)
            query = torch.randn((width, width), generator=generator) * _QUERY_STD
            layer.qkv.weight[: 2 * width] = query.repeat(2, 1)


def sine_positions(side: int, width: int) -> Tensor:
    """[side * side, width]: sines and cosines of the row and of the column, at width / 4 frequencies."""
    frequencies = _LONGEST_WAVE ** -torch.linspace(0, 1, width // 4)
    angles = torch.arange(side)[:, None] * frequencies  # [side, width / 4]
    waves = torch.cat((angles.sin(), angles.cos()), dim=-1)  # [side, width / 2]
    rows, columns = waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)
    return torch.cat((rows, columns), dim=-1).flatten(0, 1)

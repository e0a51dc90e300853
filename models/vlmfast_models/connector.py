"""From patch features to the decoder's width.

Pixel shuffle and one linear layer (Idefics3, arXiv 2408.12637), or two linear layers (LLaVA-1.5, arXiv 2310.03744).
"""

from __future__ import annotations

from torch import Tensor, nn

from vlmfast_models.config import ConnectorConfig
from vlmfast_models.layers import Linear


def pixel_shuffle(x: Tensor, scale: int) -> Tensor:
    """Returns [P, N / s^2, E s^2]: each s x s block of a square grid of patches becomes one wide token, row by row."""
    tiles, patches, width = x.shape
    side = int(patches**0.5)
    blocks = x.view(tiles, side // scale, scale, side // scale, scale * width)
    return blocks.transpose(2, 3).reshape(tiles, patches // scale**2, width * scale**2)


class PixelShuffleConnector(nn.Module):
    """Patch features [P, N, Ev] -> visual tokens [P, N / s^2, E]."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        self.scale_factor = config.scale_factor
        self.proj = Linear(config.input_size, config.output_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(pixel_shuffle(x, self.scale_factor))

    def sum_scores(self, scores: Tensor) -> Tensor:
        """Scores of patches [P, N] -> of the tokens they become [P, N / s^2]: a token has what its patches have."""
        return pixel_shuffle(scores[..., None], self.scale_factor).sum(-1)


class MLPConnector(nn.Module):
    """Patch features [P, N, Ev] -> visual tokens [P, N, E]."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__()
        width = config.output_size
        self.fc1 = Linear(config.input_size, width, bias=config.bias, activation=config.activation)
        self.fc2 = Linear(width, width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))

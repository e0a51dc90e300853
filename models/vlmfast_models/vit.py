"""Vision transformer over square tiles: pre-norm blocks, learned positions, full attention within a tile (SigLIP)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlmfast_kernels.ops.attention import attend_all
from vlmfast_models.config import VisionConfig
from vlmfast_models.layers import Linear


def position_ids(rows: int, cols: int, side: int) -> Tensor:
    """Returns int64 [rows * cols]: the entry of a side x side position table for each patch of a grid, row by row.

    Each coordinate is the fraction of its axis put into `side` equal buckets. The float32 comparison is part of the
    definition: for some sides rounding puts a patch into its neighbour's bucket, and checkpoints were trained so.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side)

    def buckets(count: int) -> Tensor:
        fractions = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
        return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)

    return (buckets(rows)[:, None] * side + buckets(cols)[None]).flatten()


class VisionBlock(nn.Module):
    """Attention and feed-forward, each behind a layer norm: [P, N, E] -> [P, N, E]."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_heads
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.qkv = Linear(width, 3 * width, bias=True)
        self.out = Linear(width, width, bias=True)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.fc1 = Linear(width, config.intermediate_size, bias=True, activation=config.activation)
        self.fc2 = Linear(config.intermediate_size, width, bias=True)
        self._attend_all = attend_all.reference

    def prepare(self) -> None:
        weight = self.norm1.weight
        self._attend_all = attend_all.resolve(weight.device, weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        tiles, patches, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(tiles, patches, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [P, H, N, D]
        mixed = self._attend_all(query, key, value)
        x = self.out(mixed.transpose(1, 2).reshape(tiles, patches, width), residual=x)
        return self.fc2(self.fc1(self.norm2(x)), residual=x)


class VisionTransformer(nn.Module):
    """Tiles [P, C, side, side] -> patch features [P, N, E]."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = Linear(config.num_channels * config.patch_size**2, config.hidden_size, bias=True)
        self.position_embed = nn.Embedding(config.patches_per_side**2, config.hidden_size)
        self.layers = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def embed(self, pixels: Tensor) -> Tensor:
        """Patch embeddings plus positions, [P, N, E]. A stride-p convolution over p x p patches is one product."""
        tiles, channels, height, width = pixels.shape
        patch = self.config.patch_size
        rows, cols = height // patch, width // patch
        patches = pixels.view(tiles, channels, rows, patch, cols, patch).permute(0, 2, 4, 1, 3, 5)
        embedded = self.patch_embed(patches.reshape(tiles, rows * cols, channels * patch * patch))
        ids = position_ids(rows, cols, self.config.patches_per_side).to(pixels.device)
        return embedded + self.position_embed(ids)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

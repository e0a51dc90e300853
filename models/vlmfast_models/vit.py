"""Vision transformer over square tiles: pre-norm blocks, learned positions, full attention within a tile.

SigLIP, Idefics3's variant of it, and CLIP (a class token, a norm before the blocks) are configurations of one network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from vlmfast_kernels.ops.attention import attend_all
from vlmfast_kernels.ops.merge import attend_sized, bipartite_match, merge_tokens, merged_sizes, unmerge
from vlmfast_models.config import VisionConfig
from vlmfast_models.layers import Linear

_SCORING_QUERIES = 64
"""At least so many where there are so many patches, and fewer than twice as many."""
_GOLDEN = 0.6180339887498949


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


def attention_received(query: Tensor, key: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Returns float32 [P, N]: the mean attention that each of N keys gets from all heads and all given queries.

    query [P, H, Q, D], key [P, H, N, D]; a key of size s (`sizes` [P, N]) counts as s. Each tile's row sums to 1.
    """
    logits = ((query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)).float()  # [P, H, Q, N]
    if sizes is not None:
        logits = logits + sizes.log()[:, None, None]
    return logits.softmax(-1).mean((1, 2))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Merged:
    """Which patches the tokens of a tile stand for, once some are merged."""

    source: Tensor
    """int64 [P, N]: the token that each of all N patches went into."""
    sizes: Tensor
    """float32 [P, M]: how many patches each token stands for."""

    @classmethod
    def none(cls, tiles: int, patches: int, device: torch.device) -> Merged:
        """Every patch is a token by itself."""
        return cls(
            source=torch.arange(patches, device=device).expand(tiles, -1),
            sizes=torch.ones(tiles, patches, device=device),
        )

    def after(self, step: Tensor, num_left: int) -> Merged:
        """As it is once the tokens themselves are merged by `step` [P, M]."""
        return Merged(source=step.gather(1, self.source), sizes=merged_sizes(self.sizes, step, num_left))


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
        self._attend_all, self._attend_sized = attend_all.reference, attend_sized.reference

    def prepare(self) -> None:
        weight = self.norm1.weight
        self._attend_all = attend_all.resolve(weight.device, weight.dtype)
        self._attend_sized = attend_sized.resolve(weight.device, weight.dtype)

    def forward(self, x: Tensor, queries: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The block's output, and the attention received from the rows `queries` (int64), float32 [P, N]."""
        query, key, value = self._heads(x)
        mixed = self._attend_all(query, key, value)
        x = self.out(mixed.transpose(1, 2).reshape(x.shape), residual=x)
        received = None if queries is None else attention_received(query[:, :, queries], key)
        return self.fc2(self.fc1(self.norm2(x)), residual=x), received

    def forward_merged(
        self, x: Tensor, merged: Merged, num_merged: int, *, protect_first: bool, queries: Tensor | None = None
    ) -> tuple[Tensor, Merged, Tensor | None]:
        """As `forward` over tokens that stand for several patches; `num_merged` of them are merged after attention.

        Tokens are alike when their keys are, averaged over the heads (ToMe, arXiv 2210.09461).
        """
        query, key, value = self._heads(x)
        mixed = self._attend_sized(query, key, value, merged.sizes)
        x = self.out(mixed.transpose(1, 2).reshape(x.shape), residual=x)
        received = None if queries is None else attention_received(query[:, :, queries], key, merged.sizes)
        if received is not None:  # of the patches, each its share
            received = (received / merged.sizes).gather(1, merged.source)
        if num_merged:
            step = bipartite_match(key.float().mean(1), num_merged, protect_first=protect_first)
            num_left = x.shape[1] - num_merged
            x = merge_tokens.reference(x, merged.sizes, step, num_left)
            merged = merged.after(step, num_left)
        return self.fc2(self.fc1(self.norm2(x)), residual=x), merged, received

    def _heads(self, x: Tensor) -> Tensor:
        """Query, key and value of every head, [3, P, H, N, D]."""
        tiles, patches, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(tiles, patches, 3, self.num_heads, width // self.num_heads)
        return qkv.permute(2, 0, 3, 1, 4)


class VisionTransformer(nn.Module):
    """Tiles [P, C, side, side] -> features [P, N, E], or [P, N, E * F] of F chosen hidden states."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.patch_embed = Linear(config.num_channels * config.patch_size**2, width, bias=not config.class_token)
        self.class_embed = nn.Parameter(torch.empty(width)) if config.class_token else None
        self.position_embed = nn.Embedding(config.num_positions, width)
        self.embed_norm = nn.LayerNorm(width, eps=config.norm_eps) if config.class_token else None
        self.layers = nn.ModuleList(VisionBlock(config) for _ in range(config.num_run_layers))
        self.norm = None if config.feature_layers else nn.LayerNorm(width, eps=config.norm_eps)
        self.int8 = False
        """Whether `prepare` quantises `int8_linears`, weights and tokens."""

    def int8_linears(self) -> dict[str, Linear]:
        """The linear layers that int8 is for, by name: those of all blocks but the last one run. The patch embedding
        and the last block, whose errors nothing after them evens out, keep their dtype."""
        blocks = [cast(VisionBlock, layer) for layer in self.layers[:-1]]
        return {
            f"layers.{index}.{name}": getattr(block, name)
            for index, block in enumerate(blocks)
            for name in ("qkv", "out", "fc1", "fc2")
        }

    def prepare(self) -> None:
        """Comes before its parts are prepared."""
        if self.int8:
            for linear in self.int8_linears().values():
                linear.pack_w8a8()

    def embed(self, pixels: Tensor) -> Tensor:
        """Patch embeddings plus positions, [P, N, E]. A stride-p convolution over p x p patches is one product."""
        tiles, channels, height, width = pixels.shape
        patch = self.config.patch_size
        rows, cols = height // patch, width // patch
        whole = pixels[:, :, : rows * patch, : cols * patch]
        patches = whole.view(tiles, channels, rows, patch, cols, patch).permute(0, 2, 4, 1, 3, 5)
        embedded = self.patch_embed(patches.reshape(tiles, rows * cols, channels * patch * patch))
        if self.config.bucketed_positions:
            ids = position_ids(rows, cols, self.config.patches_per_side).to(pixels.device)
            return embedded + self.position_embed(ids).to(embedded.dtype)  # float32 weights under autocast
        if self.class_embed is not None:
            embedded = torch.cat((self.class_embed.expand(tiles, 1, -1), embedded), 1)
        embedded = embedded + self.position_embed.weight
        return embedded if self.embed_norm is None else self.embed_norm(embedded)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.run(pixels)[0]

    def run(self, pixels: Tensor, *, scored: bool = False, merges: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """The features, and with `scored` the attention that each of them received in a late layer, float32 [P, N].

        `merges`: how many tokens are merged in each layer; every patch gets the row of the token it went into.
        """
        x = self.embed(pixels)
        if any(merges):
            return self._run_merged(x, scored, merges)
        wanted = self.config.feature_layers
        kept = {0: x} if 0 in wanted else {}
        queries = self._scoring_queries(x) if scored else None
        received = None
        for index, layer in enumerate(self.layers, 1):
            if queries is not None and index == self._scoring_layer:
                x, received = layer(x, queries)
            else:
                x, _ = layer(x)
            if index in wanted:
                kept[index] = x
        return self._features(x, kept), self._without_class(received)

    def _run_merged(self, x: Tensor, scored: bool, merges: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        tiles, patches, _ = x.shape
        wanted = self.config.feature_layers
        kept = {0: x} if 0 in wanted else {}
        merged: Merged | None = None
        received = None
        for index, layer in enumerate(self.layers, 1):
            num_merged = merges[index - 1] if index <= len(merges) else 0
            queries = self._scoring_queries(x) if scored and index == self._scoring_layer else None
            if merged is None and num_merged:
                merged = Merged.none(tiles, patches, x.device)
            assert isinstance(layer, VisionBlock)
            if merged is None:
                x, found = layer(x, queries)
            else:
                x, merged, found = layer.forward_merged(
                    x, merged, num_merged, protect_first=self.config.class_token, queries=queries
                )
            received = found if found is not None else received
            if index in wanted:
                kept[index] = x if merged is None else unmerge(x, merged.source)
        if self.norm is not None and merged is not None:
            x = unmerge(x, merged.source)
        return self._features(x, kept), self._without_class(received)

    def merge_groups(self, pixels: Tensor, merges: Sequence[int]) -> Tensor:
        """Which patches end up as one under `merges`, int64 [P, N]: equal numbers within a tile, the class token's left
        out. For drawing: it runs the tower."""
        x = self.embed(pixels)
        tiles, patches, _ = x.shape
        merged: Merged | None = None
        for layer, num_merged in zip(self.layers, merges, strict=False):
            if merged is None and num_merged:
                merged = Merged.none(tiles, patches, x.device)
            assert isinstance(layer, VisionBlock)
            if merged is None:
                x, _ = layer(x)
            else:
                x, merged, _ = layer.forward_merged(x, merged, num_merged, protect_first=self.config.class_token)
        source = (Merged.none(tiles, patches, x.device) if merged is None else merged).source
        return source[:, int(self.config.class_token) :]

    def _features(self, x: Tensor, kept: dict[int, Tensor]) -> Tensor:
        """What the tower hands out, of its last state and of those that were kept."""
        if self.norm is not None:
            return self.norm(x)
        first = int(self.config.drop_first)
        features = [kept[index][:, first:] for index in self.config.feature_layers]
        return features[0] if len(features) == 1 else torch.cat(features, -1)

    def _without_class(self, received: Tensor | None) -> Tensor | None:
        first = int(self.norm is None and self.config.drop_first)
        return None if received is None else received[:, first:]

    @property
    def _scoring_layer(self) -> int:
        """The last but one of the checkpoint, counted from 1: what VisionZip (arXiv 2412.04467) ranks tokens by."""
        return min(max(self.config.num_layers - 1, 1), self.config.num_run_layers)

    def _scoring_queries(self, x: Tensor) -> Tensor:
        """Whose attention counts, int64 [Q]: the class token's, else a sample of the patches, which costs little."""
        if self.config.class_token:
            return torch.zeros(1, dtype=torch.int64, device=x.device)
        num_patches = x.shape[1]
        stride = max(num_patches // _SCORING_QUERIES, 1)
        index = torch.arange(num_patches // stride, device=x.device)
        # One of each run of `stride` patches, at a place that changes: an even step would see a few columns only.
        return index * stride + (index * _GOLDEN % 1.0 * stride).long()

"""LLaVA-NeXT (LLaVA-1.6) and LLaVA-OneVision (arXiv 2408.03326): LLaVA over several tiles of one picture.

Differences from LLaVA: a picture is fitted to one of the checkpoint's canvases and cut into tiles beside a global
frame; the tiles' tokens are laid out as one grid, the canvas's empty borders are left out, and each row of the grid
ends with a learned line break. OneVision also pools large grids, and shows each of several pictures as one frame.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from vlmfast_models.config import ModelConfig, PreprocessConfig
from vlmfast_models.families.llava import Llava
from vlmfast_models.geometry import TilePlan, llava_next_plan, pinpoint_levels
from vlmfast_models.weights import TensorSources


class LlavaNext(Llava):
    """LLaVA with a line break token, `image_newline` [E]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.image_newline = nn.Parameter(torch.empty(config.text.hidden_size))

    @staticmethod
    def levels(preprocess: PreprocessConfig) -> tuple[PreprocessConfig, ...]:
        """Preprocessing of lower resolution, the lowest first; the last is the checkpoint's own."""
        return pinpoint_levels(preprocess)

    @staticmethod
    def plan(
        width: int, height: int, preprocess: PreprocessConfig, config: ModelConfig, *, num_images: int = 1
    ) -> TilePlan:
        """The tiles of a picture of this size, one of `num_images` in its prompt; see `llava_next_plan`."""
        return llava_next_plan(
            width,
            height,
            preprocess,
            config.tokens_per_tile,
            patches_per_side=config.vision.patches_per_side,
            max_grid_tiles=config.max_grid_tiles,
            num_images=num_images,
        )

    def pack(self, tokens: Tensor, plan: TilePlan) -> Tensor:
        """Visual tokens of a picture's tiles [P, tokens_per_tile, E] in prompt order: [plan.n_tokens, E].

        First the global frame's, then the grid's row by row, each with the line break behind it.
        """
        return self._lay_out(tokens, plan, self.image_newline)

    def pack_scores(self, scores: Tensor, plan: TilePlan) -> Tensor:
        return self._lay_out(scores[..., None], plan, scores.new_zeros(1))[:, 0]

    def _lay_out(self, tokens: Tensor, plan: TilePlan, newline: Tensor) -> Tensor:
        assert plan.grid is not None
        if plan.kept is None:
            return torch.cat((tokens[-1], newline[None]))
        side, width = self.config.vision.patches_per_side, tokens.shape[-1]
        tiles = tokens[:-1].view(plan.rows, plan.cols, side, side, width)
        grid = tiles.transpose(1, 2).reshape(plan.rows * side, plan.cols * side, width)
        left, top, right, bottom = plan.kept
        grid = grid[top:bottom, left:right]
        cols, rows = plan.grid
        if grid.shape[:2] != (rows, cols):
            pooled = nnf.interpolate(grid.permute(2, 0, 1)[None], (rows, cols), mode="bilinear")  # [1, E, rows, cols]
            grid = pooled[0].permute(1, 2, 0)
        lines = torch.cat((grid, newline.expand(rows, 1, width)), 1)
        return torch.cat((tokens[-1], lines.flatten(0, 1)))

    def tensor_sources(self) -> TensorSources:
        newline = ("image_newline", self.config.text.hidden_size)
        return {**super().tensor_sources(), "image_newline": (newline,)}

"""From a decoded picture to the visual tokens the decoder reads."""

from __future__ import annotations

from typing import Any

import torch

from vlmfast.image.preprocess import preprocess
from vlmfast.types import ImageInput
from vlmfast_models.batch import VisionFeatures
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.geometry import TilePlan


class VisionEncoder:
    """Plans and encodes pictures for one loaded model."""

    def __init__(
        self, model: Any, config: PreprocessConfig, *, device: torch.device, dtype: torch.dtype, max_tiles: int
    ) -> None:
        self._model = model
        self._config = config
        self._device = device
        self._dtype = dtype
        self._max_tiles = max_tiles

    def plan(self, image: ImageInput) -> TilePlan:
        """The tiles and token count of a picture, before any pixel is touched."""
        plan: TilePlan = self._model.plan(image.width, image.height, self._config, self._model.config)
        return plan

    @torch.inference_mode()
    def encode(self, image: ImageInput, plan: TilePlan) -> VisionFeatures:
        """The visual tokens [N, E] of a picture. Tiles go through the tower in bounded groups."""
        pixels = preprocess(image, plan, self._config).pixels.to(self._device, self._dtype)
        groups = [self._model.encode(group).flatten(0, 1) for group in pixels.split(self._max_tiles)]
        return VisionFeatures(tokens=groups[0] if len(groups) == 1 else torch.cat(groups), plan=plan)

"""From a picture to the visual tokens the decoder reads: its plan, a look in the cache, and the networks on a miss."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vlmfast.cache.features import FeatureCache
from vlmfast.cache.key import ImageKey, image_key
from vlmfast.image.preprocess import preprocess
from vlmfast.image.resolution import choose_plan
from vlmfast.options import Vision
from vlmfast.prune.counts import merge_schedule, reduce_id, run_counts
from vlmfast.prune.reducers import Reduction, auto_counts, reduce_tokens
from vlmfast.tower import TowerMemory
from vlmfast.types import FeatureSource, ImageInput
from vlmfast_models.batch import VisionFeatures
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.geometry import TilePlan

_WHOLE = Vision()
_MAX_DECISIONS = 4096
"""Pictures for which "auto" options remember what they chose."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundFeatures:
    """A picture's features, where they came from, and how long it took."""

    features: VisionFeatures
    source: FeatureSource
    ms: float


class VisionEncoder:
    """Plans and encodes pictures for one loaded model.

    Args:
        max_tiles: tiles in one pass of the tower.
        fingerprint: what the features of all pictures depend on (see `vlmfast.cache.key.vision_fingerprint`).
        cache: None encodes every picture anew.
    """

    def __init__(
        self,
        model: Any,
        config: PreprocessConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_tiles: int,
        fingerprint: str = "",
        cache: FeatureCache | None = None,
    ) -> None:
        self._model = model
        self._config = config
        self._device = device
        self._dtype = dtype
        self._max_tiles = max_tiles
        self._fingerprint = fingerprint
        self._cache = cache
        self._levels: tuple[PreprocessConfig, ...] = model.levels(config)
        self._auto_plans: dict[tuple[str, int | None, tuple[TilePlan, ...]], TilePlan] = {}
        self._auto_counts: dict[tuple[ImageKey, float], tuple[int, ...]] = {}
        self._lent: TowerMemory | None = None
        self._borrowed: TowerMemory | None = None

    def borrow_tower(self, other: VisionEncoder) -> None:
        """From now on takes what the other's tower made of a picture; it must be one tower, given the same pixels."""
        assert self._model.vision is other._model.vision and self._config.same_pixels(other._config)
        self._borrowed = other._lent = other._lent or TowerMemory()

    def check(self, vision: Vision) -> None:
        """Raises OptionError where the tower can not merge as asked."""
        self._merges(vision)

    def plan(self, image: ImageInput, vision: Vision = _WHOLE, *, num_images: int = 1) -> TilePlan:
        """The tiles and token count of a picture, one of `num_images` in its prompt.

        Only `resolution="auto"` looks at pixels; all else goes by the size.
        """
        levels = self._levels if vision.resolution != "high" or vision.max_pixels else self._levels[-1:]
        plans = tuple(
            self._model.plan(image.width, image.height, level, self._model.config, num_images=num_images)
            for level in levels
        )
        if vision.resolution != "auto":
            return choose_plan(image, plans, vision.resolution, vision.max_pixels)
        known = (image.digest, vision.max_pixels, plans)
        if known not in self._auto_plans:
            self._auto_plans[known] = choose_plan(image, plans, "auto", vision.max_pixels)
            _forget_oldest(self._auto_plans)
        return self._auto_plans[known]

    def key(self, image: ImageInput, plan: TilePlan, vision: Vision = _WHOLE) -> ImageKey:
        """The name of the picture's features: equal keys, equal features. A reducer plays no part in it."""
        return image_key(self._fingerprint, plan, image.digest, self._merges(vision))

    def features(self, image: ImageInput, plan: TilePlan, vision: Vision = _WHOLE) -> FoundFeatures:
        """The picture's whole features on the device, from the cache or the networks; bit for bit the same either way.

        They may be shared with the cache and with other requests: read only.
        """
        started = time.perf_counter()
        merges = self._merges(vision)
        if self._cache is None:
            scored = vision.reduce is not None
            features, source = self.encode(image, plan, scored=scored, merges=merges), FeatureSource.ENCODER
        else:
            features, source = self._cache.get_or_encode(
                self.key(image, plan, vision), plan, lambda: self.encode(image, plan, scored=True, merges=merges)
            )
            features = _on_device(features, self._device)
        return FoundFeatures(features=features, source=source, ms=(time.perf_counter() - started) * 1e3)

    def features_of(
        self, images: Sequence[ImageInput], plans: Sequence[TilePlan], vision: Vision = _WHOLE
    ) -> list[FoundFeatures]:
        """`features` of each; the same picture again is had from the first, however small the cache."""
        found: dict[ImageKey, FoundFeatures] = {}
        results = []
        for image, plan in zip(images, plans, strict=True):
            key = self.key(image, plan, vision)
            if key in found:
                results.append(replace(found[key], source=FeatureSource.RAM, ms=0.0))
            else:
                found[key] = self.features(image, plan, vision)
                results.append(found[key])
        return results

    @torch.inference_mode()
    def global_frame(self, image: ImageInput, plan: TilePlan, shared: TilePlan) -> torch.Tensor | None:
        """The visual tokens [N, E] of a plan of one frame, from the global frame of a plan that the tower ran lately.

        None where it has not, or where the plan has more frames. They are nearly the plan's own: that frame was made
        from a picture of another size. Good enough to draft with; never cached.
        """
        if self._borrowed is None or plan.rows or plan == shared:
            return None
        ran = self._borrowed.take((image.digest, shared, ()), scored=False)
        if ran is None:
            return None
        outputs: torch.Tensor = ran[-1][0][-1:]
        tokens: torch.Tensor = self._model.pack(self._model.connector(outputs), plan)
        return tokens

    def counts(self, image: ImageInput, plan: TilePlan, vision: Vision) -> tuple[int, ...] | None:
        """Tokens that `vision.reduce` leaves of each of `plan.runs`; None where it leaves all, always.

        They follow from the plan alone, except with keep="auto": then the picture is encoded, unless it was before.

        Raises:
            OptionError: the method can not be used with this model's frames.
        """
        reduce = vision.reduce
        if not reduce_id(reduce):
            return None
        assert reduce is not None
        if reduce.keep != "auto":
            return run_counts(plan.runs, reduce)
        key = self.key(image, plan, vision), reduce.floor
        if key not in self._auto_counts:
            tokens = self.features(image, plan, vision).features.tokens
            self._auto_counts[key] = auto_counts(tokens, plan.runs, reduce.floor)
            _forget_oldest(self._auto_counts)
        return self._auto_counts[key]

    @torch.inference_mode()
    def reduced(self, features: VisionFeatures, vision: Vision, counts: tuple[int, ...] | None) -> Reduction:
        """The visual tokens [M, E] that a prompt has room for: `counts` of each run, None all."""
        plan = features.plan
        if counts is None or vision.reduce is None:
            places = torch.arange(len(features.tokens), device=features.tokens.device)
            return Reduction(tokens=features.tokens, source=places)
        return reduce_tokens(features.tokens, features.saliency, plan.runs, vision.reduce, counts)

    def _merges(self, vision: Vision) -> tuple[int, ...]:
        """ToMe's schedule in this model's tower.

        Raises:
            OptionError: the tower can not merge so.
        """
        config = self._model.config.vision
        return merge_schedule(vision.tome, config.num_run_layers, config.num_positions, int(config.class_token))

    @torch.inference_mode()
    def encode(
        self, image: ImageInput, plan: TilePlan, *, scored: bool = False, merges: tuple[int, ...] = ()
    ) -> VisionFeatures:
        """The visual tokens [N, E] of a picture, `scored` with their saliency. Tiles go in bounded groups."""
        model, key = self._model, (image.digest, plan, merges)
        ran = None if self._borrowed is None else self._borrowed.take(key, scored=scored)
        if ran is None:
            pixels = preprocess(image, plan, self._config).pixels.to(self._device, self._dtype)
            ran = [model.vision.run(group, scored=scored, merges=merges) for group in pixels.split(self._max_tiles)]
            if self._lent is not None:
                self._lent.put(key, ran)
        tiles = torch.cat([model.connector(outputs) for outputs, _ in ran])  # [P, N / P, E]
        saliency = None
        if scored:
            scores = [model.tile_scores(received) for _, received in ran if received is not None]
            saliency = model.pack_scores(torch.cat(scores), plan)
        return VisionFeatures(tokens=model.pack(tiles, plan), plan=plan, saliency=saliency)


def _on_device(features: VisionFeatures, device: torch.device) -> VisionFeatures:
    if device.type == "cpu":
        return features
    saliency = None if features.saliency is None else features.saliency.to(device)
    return replace(features, tokens=features.tokens.to(device), saliency=saliency)


def _forget_oldest(decisions: dict[Any, Any]) -> None:
    while len(decisions) > _MAX_DECISIONS:
        decisions.pop(next(iter(decisions)), None)

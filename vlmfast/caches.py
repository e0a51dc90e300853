"""What is kept of earlier work for one loaded model: opened as `Caching` says, named by all that it depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vlmfast.cache.features import open_feature_cache, open_feature_store
from vlmfast.cache.key import arithmetic_of, vision_fingerprint, weights_digest
from vlmfast.cache.pictures import PictureMemory
from vlmfast.cache.prefix import PrefixCache
from vlmfast.cache.prefix_disk import PrefixDisk, open_prefix_store, prefix_fingerprint
from vlmfast.checkpoint import Checkpoint
from vlmfast.device import explain
from vlmfast.kv import KVSegment, bytes_per_token
from vlmfast.metrics import Counters
from vlmfast.options import Batching, Caching


class ModelCaches:
    """The caches of one model; None where `caching` switches one off."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Any,
        caching: Caching,
        batching: Batching,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._checkpoint = checkpoint
        self._model = model
        self._caching = caching
        self._device = device
        self._dtype = dtype
        self._arithmetic = arithmetic_of(
            device,
            dtype,
            explain(model, device, dtype),
            batching.max_encode_tiles,
            tower="int8" if model.vision.int8 else "",
        )
        self.counters = Counters()
        self._store = open_feature_store(caching, self.counters)
        self.features = open_feature_cache(caching, self._store, self.counters)
        self.pictures = None if self.features is None else PictureMemory(self._store)
        named = self.features is not None or caching.prefix_disk
        self.fingerprint = self.fingerprint_of(checkpoint, model) if named else ""
        """What the features of every picture depend on; empty where nothing is named by it."""
        self.prefixes = self._open_prefixes()

    def fingerprint_of(self, checkpoint: Checkpoint, model: Any) -> str:
        """What the features of every picture depend on in this model, or in one that drafts for it."""
        config = checkpoint.config
        return vision_fingerprint(
            weights=self._weights_digest(checkpoint, model, lambda ours: not ours.startswith("decoder.")),
            network=repr((config.model_type, config.vision, config.connector)),
            preprocess=checkpoint.preprocess,
            arithmetic=self._arithmetic,
            salt=self._caching.salt,
        )

    def tower_digest(self, checkpoint: Checkpoint, model: Any) -> str:
        """Names the vision tower's weights."""
        return self._weights_digest(checkpoint, model, lambda ours: ours.startswith("vision."))

    def _weights_digest(self, checkpoint: Checkpoint, model: Any, wanted: Callable[[str], bool]) -> str:
        """Digest of the checkpoint's tensors that our `wanted` parameters are made of; the store remembers it."""
        sources = model.tensor_sources()
        names = {name for ours, pieces in sources.items() if wanted(ours) for name, _ in pieces}
        return weights_digest(checkpoint.folder, lambda name: model.canonical_name(name) in names, self._store)

    def _open_prefixes(self) -> PrefixCache | None:
        """The known prefixes, with a tier on disk if asked for."""
        text, caching = self._checkpoint.config.text, self._caching
        if caching.prefix_ram_bytes == 0:
            return None
        token_bytes = bytes_per_token(text, self._dtype)
        store = open_prefix_store(caching, self.counters)
        if store is None:
            return PrefixCache(caching.prefix_ram_bytes, token_bytes)
        disk = PrefixDisk(
            store,
            fingerprint=prefix_fingerprint(
                weights=self._weights_digest(self._checkpoint, self._model, lambda ours: ours.startswith("decoder.")),
                network=repr(text),
                arithmetic=self._arithmetic,
                salt=caching.salt,
            ),
            shape=(text.num_layers, text.num_kv_heads, text.head_dim),
            dtype=self._dtype,
            device=self._device,
            rows_of=lambda segment: segment.rows,
            wrap=KVSegment,
        )
        return PrefixCache(caching.prefix_ram_bytes, token_bytes, disk)

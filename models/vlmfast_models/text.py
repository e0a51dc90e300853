"""A decoder alone, as checkpoints without a vision tower hold it."""

from __future__ import annotations

from vlmfast_models.config import TextConfig
from vlmfast_models.decoder import Decoder
from vlmfast_models.sources import decoder_sources
from vlmfast_models.weights import CheckpointModule, TensorSources


class TextModel(CheckpointModule):
    """One of `config.TEXT_MODELS`, under `decoder`."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config)

    def tie(self) -> None:
        self.decoder.tie()

    def tensor_sources(self) -> TensorSources:
        """Checkpoint names of every tensor (`model.…`)."""
        return decoder_sources(self.config, "model", "lm_head.weight")

    def ignored_tensor(self, name: str) -> bool:
        """Tables that are computed, and a tied head written out."""
        tied_head = name == "lm_head.weight" and self.config.tie_embeddings
        return tied_head or name.endswith(".rotary_emb.inv_freq")

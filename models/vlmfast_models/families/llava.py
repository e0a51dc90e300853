"""LLaVA-1.5 (arXiv 2310.03744): CLIP or SigLIP tower, two-layer connector, any of our decoders."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vlmfast_models.config import ModelConfig, PreprocessConfig
from vlmfast_models.connector import MLPConnector
from vlmfast_models.decoder import Decoder
from vlmfast_models.geometry import TilePlan, llava_plan
from vlmfast_models.sources import decoder_sources, not_run, patch_shape, vit_sources
from vlmfast_models.vit import VisionTransformer
from vlmfast_models.weights import CheckpointModule, TensorSources

IMAGE_TOKEN = "<image>"
_TOWER = "vision_tower.vision_model"
_DECODER = "language_model.model"
_HEAD = "language_model.lm_head.weight"
_CONNECTOR = "multi_modal_projector"


class Llava(CheckpointModule):
    """The three networks of a checkpoint: `vision`, `connector`, `decoder`."""

    image_token = IMAGE_TOKEN

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vision = VisionTransformer(config.vision)
        self.connector = MLPConnector(config.connector)
        self.decoder = Decoder(config.text)

    def tie(self) -> None:
        self.decoder.tie()

    def encode(self, pixels: Tensor, merges: Sequence[int] = ()) -> Tensor:
        """Tiles [P, C, side, side], normalised -> visual tokens [P, tokens_per_tile, E].

        `merges`: patches merged in each of the tower's layers (`VisionTransformer.run`).
        """
        return self.connector(self.vision.run(pixels, merges=merges)[0])

    def tile_scores(self, received: Tensor) -> Tensor:
        """Of the attention that each patch received in the tower [P, patches], what each token has: the same."""
        return received

    def pack(self, tokens: Tensor, plan: TilePlan) -> Tensor:
        """Visual tokens of a picture's tiles [P, tokens_per_tile, E] in prompt order: [plan.n_tokens, E]."""
        return tokens.flatten(0, 1)

    def pack_scores(self, scores: Tensor, plan: TilePlan) -> Tensor:
        """Scores [P, tokens_per_tile] in prompt order, as `pack`: [plan.n_tokens]. Line breaks have none."""
        return scores.flatten()

    @staticmethod
    def plan(
        width: int, height: int, preprocess: PreprocessConfig, config: ModelConfig, *, num_images: int = 1
    ) -> TilePlan:
        """The frame of a picture of this size; see `llava_plan`. Other pictures of the prompt change nothing."""
        return llava_plan(width, height, preprocess, config.tokens_per_tile)

    @staticmethod
    def levels(preprocess: PreprocessConfig) -> tuple[PreprocessConfig, ...]:
        """Preprocessing of lower resolution; there is none below the checkpoint's own."""
        return (preprocess,)

    @staticmethod
    def placeholder(plan: TilePlan) -> str:
        """The text that stands for a picture in the prompt: its visual tokens and nothing else."""
        return IMAGE_TOKEN * plan.n_tokens

    def canonical_name(self, name: str) -> str:
        """A tensor's name as the hub's checkpoints have it.

        transformers 5 drops the tower's inner `vision_model`; its networks in memory begin with `model.` and keep the
        output layer at the top.
        """
        name = name.removeprefix("model.")
        if name == "lm_head.weight":
            return _HEAD
        for outer, inner in (("vision_tower.", "vision_model."), ("language_model.", "model.")):
            rest = name.removeprefix(outer)
            if rest != name and not rest.startswith((inner, "lm_head.")):
                return f"{outer}{inner}{rest}"
        return name

    def tensor_sources(self) -> TensorSources:
        """Checkpoint names of every tensor, in the hub's layout."""
        connector = self.config.connector
        kinds = ("weight", "bias") if connector.bias else ("weight",)
        return {
            **vit_sources(self.config.vision, _TOWER),
            **{
                f"connector.fc{index}.{kind}": ((f"{_CONNECTOR}.linear_{index}.{kind}", connector.output_size),)
                for index in (1, 2)
                for kind in kinds
            },
            **decoder_sources(self.config.text, _DECODER, _HEAD),
        }

    def stored_shape(self, source: str) -> tuple[int, ...] | None:
        return patch_shape(self.config.vision) if source == f"{_TOWER}.embeddings.patch_embedding.weight" else None

    def ignored_tensor(self, name: str) -> bool:
        """Tables that are computed, a tied head written out, and tower parts that the features do not depend on."""
        if name == _HEAD and self.config.text.tie_embeddings:
            return True
        return name.endswith((".position_ids", ".rotary_emb.inv_freq")) or not_run(self.config.vision, _TOWER, name)

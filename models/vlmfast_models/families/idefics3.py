"""Idefics3 and SmolVLM: SigLIP tower, pixel-shuffle connector, Llama decoder.

SmolVLM checkpoints differ from Idefics3 in sizes only; both are this class.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vlmfast_models.config import ModelConfig, PreprocessConfig
from vlmfast_models.connector import PixelShuffleConnector
from vlmfast_models.decoder import Decoder
from vlmfast_models.geometry import TilePlan, idefics3_levels, idefics3_plan
from vlmfast_models.sources import decoder_sources, patch_shape, vit_sources
from vlmfast_models.vit import VisionTransformer
from vlmfast_models.weights import CheckpointModule, TensorSources

IMAGE_TOKEN = "<image>"
_FRAME = "<fake_token_around_image>"
_GLOBAL = "<global-img>"
_TOWER = "model.vision_model"


class Idefics3(CheckpointModule):
    """The three networks of a checkpoint: `vision`, `connector`, `decoder`."""

    image_token = IMAGE_TOKEN

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vision = VisionTransformer(config.vision)
        self.connector = PixelShuffleConnector(config.connector)
        self.decoder = Decoder(config.text)

    def tie(self) -> None:
        self.decoder.tie()

    def encode(self, pixels: Tensor, merges: Sequence[int] = ()) -> Tensor:
        """Tiles [P, C, side, side], normalised -> visual tokens [P, tokens_per_tile, E].

        `merges`: patches merged in each of the tower's layers (`VisionTransformer.run`).
        """
        return self.connector(self.vision.run(pixels, merges=merges)[0])

    def tile_scores(self, received: Tensor) -> Tensor:
        """Of the attention that each patch received in the tower [P, patches], what each token has: [P, tokens]."""
        return self.connector.sum_scores(received)

    @staticmethod
    def pack(tokens: Tensor, plan: TilePlan) -> Tensor:
        """Visual tokens of a picture's tiles [P, tokens_per_tile, E] in prompt order: [plan.n_tokens, E]."""
        return tokens.flatten(0, 1)

    @staticmethod
    def pack_scores(scores: Tensor, plan: TilePlan) -> Tensor:
        """Scores [P, tokens_per_tile] in prompt order, as `pack`: [plan.n_tokens]."""
        return scores.flatten()

    @staticmethod
    def plan(
        width: int, height: int, preprocess: PreprocessConfig, config: ModelConfig, *, num_images: int = 1
    ) -> TilePlan:
        """The tiles of a picture of this size; see `idefics3_plan`. Other pictures of the prompt change nothing."""
        return idefics3_plan(width, height, preprocess, config.tokens_per_tile)

    @staticmethod
    def levels(preprocess: PreprocessConfig) -> tuple[PreprocessConfig, ...]:
        """Preprocessing of lower resolution, the lowest first; the last is the checkpoint's own."""
        return idefics3_levels(preprocess)

    @staticmethod
    def placeholder(plan: TilePlan) -> str:
        """The text that stands for a picture in the prompt: a frame mark, its place, and its visual tokens, per tile.

        Rows end with a line break and the global frame comes last, as the family's processor writes it.
        """
        tokens = IMAGE_TOKEN * plan.tokens_per_tile
        rows = "".join(
            "".join(f"{_FRAME}<row_{row}_col_{col}>{tokens}" for col in range(1, plan.cols + 1)) + "\n"
            for row in range(1, plan.rows + 1)
        )
        gap = "\n" if rows else ""
        return f"{rows}{gap}{_FRAME}{_GLOBAL}{tokens}{_FRAME}"

    def tensor_sources(self) -> TensorSources:
        """Checkpoint names of every tensor (`model.vision_model.…`, `model.connector.…`, `model.text_model.…`)."""
        text, connector = self.config.text, self.config.connector
        proj = ("model.connector.modality_projection.proj.weight", connector.output_size)
        return {
            **vit_sources(self.config.vision, _TOWER),
            "connector.proj.weight": (proj,),
            **decoder_sources(text, "model.text_model", "lm_head.weight"),
        }

    def stored_shape(self, source: str) -> tuple[int, ...] | None:
        return patch_shape(self.config.vision) if source == f"{_TOWER}.embeddings.patch_embedding.weight" else None

    def ignored_tensor(self, name: str) -> bool:
        """Tables that are computed, and the head that some writers store although it is tied."""
        tied_head = name == "lm_head.weight" and self.config.text.tie_embeddings
        return tied_head or name.endswith((".position_ids", ".rotary_emb.inv_freq"))

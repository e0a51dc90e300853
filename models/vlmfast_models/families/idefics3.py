"""Idefics3 and SmolVLM: SigLIP tower, pixel-shuffle connector, Llama decoder.

SmolVLM checkpoints differ from Idefics3 in sizes only; both are this class.
"""

from __future__ import annotations

from torch import Tensor

from vlmfast_models.config import ModelConfig, PreprocessConfig
from vlmfast_models.connector import PixelShuffleConnector
from vlmfast_models.decoder import Decoder
from vlmfast_models.geometry import TilePlan, idefics3_plan
from vlmfast_models.vit import VisionTransformer
from vlmfast_models.weights import CheckpointModule, TensorSources

IMAGE_TOKEN = "<image>"
_FRAME = "<fake_token_around_image>"
_GLOBAL = "<global-img>"


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

    def encode(self, pixels: Tensor) -> Tensor:
        """Tiles [P, C, side, side], normalised -> visual tokens [P, tokens_per_tile, E]."""
        return self.connector(self.vision(pixels))

    @staticmethod
    def plan(width: int, height: int, preprocess: PreprocessConfig, config: ModelConfig) -> TilePlan:
        """The tiles of a picture of this size; see `idefics3_plan`."""
        return idefics3_plan(width, height, preprocess, config.tokens_per_tile)

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
        return _vision_sources(self) | _text_sources(self)

    def stored_shape(self, source: str) -> tuple[int, ...] | None:
        """The patch embedding is stored as a convolution [E, C, p, p]."""
        if source != "model.vision_model.embeddings.patch_embedding.weight":
            return None
        vision = self.config.vision
        return (vision.hidden_size, vision.num_channels, vision.patch_size, vision.patch_size)

    def ignored_tensor(self, name: str) -> bool:
        """Tables that are computed, and the head that some writers store although it is tied."""
        tied_head = name == "lm_head.weight" and self.config.text.tie_embeddings
        return tied_head or name.endswith((".position_ids", ".rotary_emb.inv_freq"))


def _vision_sources(model: Idefics3) -> dict[str, tuple[tuple[str, int], ...]]:
    vision, theirs = model.config.vision, "model.vision_model"
    width, inner = vision.hidden_size, vision.intermediate_size
    sources: dict[str, tuple[tuple[str, int], ...]] = {
        "vision.position_embed.weight": (
            (f"{theirs}.embeddings.position_embedding.weight", vision.patches_per_side**2),
        ),
        "connector.proj.weight": (
            ("model.connector.modality_projection.proj.weight", model.config.connector.output_size),
        ),
    }
    for kind in ("weight", "bias"):
        sources[f"vision.patch_embed.{kind}"] = ((f"{theirs}.embeddings.patch_embedding.{kind}", width),)
        sources[f"vision.norm.{kind}"] = ((f"{theirs}.post_layernorm.{kind}", width),)
        for index in range(vision.num_layers):
            ours, layer = f"vision.layers.{index}", f"{theirs}.encoder.layers.{index}"
            sources |= {
                f"{ours}.norm1.{kind}": ((f"{layer}.layer_norm1.{kind}", width),),
                f"{ours}.qkv.{kind}": tuple((f"{layer}.self_attn.{part}_proj.{kind}", width) for part in "qkv"),
                f"{ours}.out.{kind}": ((f"{layer}.self_attn.out_proj.{kind}", width),),
                f"{ours}.norm2.{kind}": ((f"{layer}.layer_norm2.{kind}", width),),
                f"{ours}.fc1.{kind}": ((f"{layer}.mlp.fc1.{kind}", inner),),
                f"{ours}.fc2.{kind}": ((f"{layer}.mlp.fc2.{kind}", width),),
            }
    return sources


def _text_sources(model: Idefics3) -> dict[str, tuple[tuple[str, int], ...]]:
    text, theirs = model.config.text, "model.text_model"
    width, inner = text.hidden_size, text.intermediate_size
    query, kv = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
    sources: dict[str, tuple[tuple[str, int], ...]] = {
        "decoder.embed_tokens.weight": ((f"{theirs}.embed_tokens.weight", text.vocab_size),),
        "decoder.norm.weight": ((f"{theirs}.norm.weight", width),),
    }
    if not text.tie_embeddings:
        sources["decoder.head.weight"] = (("lm_head.weight", text.vocab_size),)
    for index in range(text.num_layers):
        ours, layer = f"decoder.layers.{index}", f"{theirs}.layers.{index}"
        sources[f"{ours}.attn_norm.weight"] = ((f"{layer}.input_layernorm.weight", width),)
        sources[f"{ours}.mlp_norm.weight"] = ((f"{layer}.post_attention_layernorm.weight", width),)
        for kind in ("weight", *(("bias",) if text.attention_bias else ())):
            sources[f"{ours}.qkv.{kind}"] = (
                (f"{layer}.self_attn.q_proj.{kind}", query),
                (f"{layer}.self_attn.k_proj.{kind}", kv),
                (f"{layer}.self_attn.v_proj.{kind}", kv),
            )
            sources[f"{ours}.out.{kind}"] = ((f"{layer}.self_attn.o_proj.{kind}", width),)
        for kind in ("weight", *(("bias",) if text.mlp_bias else ())):
            sources[f"{ours}.gate_up.{kind}"] = (
                (f"{layer}.mlp.gate_proj.{kind}", inner),
                (f"{layer}.mlp.up_proj.{kind}", inner),
            )
            sources[f"{ours}.down.{kind}"] = ((f"{layer}.mlp.down_proj.{kind}", width),)
    return sources

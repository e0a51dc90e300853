"""How Hugging Face checkpoints name the tensors of the networks that families share: ViT tower and decoder."""

from __future__ import annotations

from vlmfast_models.config import TextConfig, VisionConfig

Sources = dict[str, tuple[tuple[str, int], ...]]
"""See `weights.TensorSources`."""


def vit_sources(vision: VisionConfig, theirs: str) -> Sources:
    """Tensors of `vision.*`, found under the prefix `theirs` (SigLIP and CLIP use the same names)."""
    width, inner = vision.hidden_size, vision.intermediate_size
    sources: Sources = {
        "vision.patch_embed.weight": ((f"{theirs}.embeddings.patch_embedding.weight", width),),
        "vision.position_embed.weight": ((f"{theirs}.embeddings.position_embedding.weight", vision.num_positions),),
    }
    if vision.class_token:
        sources["vision.class_embed"] = ((f"{theirs}.embeddings.class_embedding", width),)
    else:
        sources["vision.patch_embed.bias"] = ((f"{theirs}.embeddings.patch_embedding.bias", width),)
    for kind in ("weight", "bias"):
        if vision.class_token:  # the misspelling is the checkpoints'
            sources[f"vision.embed_norm.{kind}"] = ((f"{theirs}.pre_layrnorm.{kind}", width),)
        if not vision.feature_layers:
            sources[f"vision.norm.{kind}"] = ((f"{theirs}.post_layernorm.{kind}", width),)
        for index in range(vision.num_run_layers):
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


def not_run(vision: VisionConfig, theirs: str, name: str) -> bool:
    """Whether a tower tensor is of a part that no feature depends on: later layers, final norm, pooling head."""
    layers = f"{theirs}.encoder.layers."
    if name.startswith(layers):
        index = name[len(layers) :].split(".")[0]
        return index.isdecimal() and vision.num_run_layers <= int(index) < vision.num_layers
    return bool(vision.feature_layers) and name.startswith((f"{theirs}.post_layernorm.", f"{theirs}.head."))


def patch_shape(vision: VisionConfig) -> tuple[int, ...]:
    """The patch embedding is stored as a convolution [E, C, p, p]."""
    return (vision.hidden_size, vision.num_channels, vision.patch_size, vision.patch_size)


def decoder_sources(text: TextConfig, theirs: str, head: str) -> Sources:
    """Tensors of `decoder.*`, found under the prefix `theirs`; the output layer is `head`, unless it is tied."""
    width, inner = text.hidden_size, text.intermediate_size
    query, kv = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
    sources: Sources = {
        "decoder.embed_tokens.weight": ((f"{theirs}.embed_tokens.weight", text.vocab_size),),
        "decoder.norm.weight": ((f"{theirs}.norm.weight", width),),
    }
    if not text.tie_embeddings:
        sources["decoder.head.weight"] = ((head, text.vocab_size),)
    for index in range(text.num_layers):
        ours, layer = f"decoder.layers.{index}", f"{theirs}.layers.{index}"
        sources[f"{ours}.attn_norm.weight"] = ((f"{layer}.input_layernorm.weight", width),)
        sources[f"{ours}.mlp_norm.weight"] = ((f"{layer}.post_attention_layernorm.weight", width),)
        if text.qk_norm:
            for part in ("q_norm", "k_norm"):
                sources[f"{ours}.{part}.weight"] = ((f"{layer}.self_attn.{part}.weight", text.head_dim),)
        for kind in ("weight", *(("bias",) if text.attention_bias else ())):
            sources[f"{ours}.qkv.{kind}"] = (
                (f"{layer}.self_attn.q_proj.{kind}", query),
                (f"{layer}.self_attn.k_proj.{kind}", kv),
                (f"{layer}.self_attn.v_proj.{kind}", kv),
            )
        for kind in ("weight", *(("bias",) if text.out_bias else ())):
            sources[f"{ours}.out.{kind}"] = ((f"{layer}.self_attn.o_proj.{kind}", width),)
        for kind in ("weight", *(("bias",) if text.mlp_bias else ())):
            sources[f"{ours}.gate_up.{kind}"] = (
                (f"{layer}.mlp.gate_proj.{kind}", inner),
                (f"{layer}.mlp.up_proj.{kind}", inner),
            )
            sources[f"{ours}.down.{kind}"] = ((f"{layer}.mlp.down_proj.{kind}", width),)
    return sources

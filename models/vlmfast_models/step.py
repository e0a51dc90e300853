"""A decoder's weights laid out for the compiled step (`vlmfast_kernels.cpu.step`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from vlmfast_kernels.cpu.step import DecoderStep, StepLayer, StepShape

if TYPE_CHECKING:
    from vlmfast_models.decoder import Decoder


def build_step(decoder: Decoder, rope: tuple[Tensor, Tensor]) -> DecoderStep:
    """Packs the weights, once: the decoder's linear layers share them with the step and let go of the originals.

    Args:
        rope: cosines and sines, float32 [positions, D/2].
    """
    config, quantization = decoder.config, decoder.quantization
    layers = [
        StepLayer(
            attn_norm=layer.attn_norm.weight,
            q_norm=None if layer.q_norm is None else layer.q_norm.weight,
            k_norm=None if layer.k_norm is None else layer.k_norm.weight,
            mlp_norm=layer.mlp_norm.weight,
            qkv=layer.qkv.pack(quantization),
            out=layer.out.pack(quantization),
            gate_up=layer.gate_up.pack(quantization),
            down=layer.down.pack(quantization),
        )
        for layer in decoder.decoder_layers()
    ]
    shape = StepShape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        groups=config.num_kv_heads,
        dim=config.head_dim,
        intermediate=config.intermediate_size,
        eps=config.norm_eps,
    )
    return DecoderStep(shape, layers, decoder.norm.weight, decoder.head.pack(decoder.head_quantization), rope)

"""Llama-type decoder over a flat row of tokens, run in segments of layers.

The tokens of all sequences of a step stand in one [T, E] row; what belongs together, and what was computed before, is
known to the `Attention` that the caller passes in. The decoder owns no cache and no mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from vlmfast_kernels.cpu.library import instructions
from vlmfast_kernels.cpu.step import DecoderStep, Page, PageRows, why_not_step
from vlmfast_kernels.ops.activation import silu_mul
from vlmfast_kernels.ops.quant import Quantization
from vlmfast_kernels.ops.rope import (
    llama3_frequencies,
    rope_frequencies,
    rope_table,
    rotate,
    yarn_frequencies,
)
from vlmfast_models.config import TextConfig
from vlmfast_models.errors import ConfigError
from vlmfast_models.layers import Linear, RMSNorm
from vlmfast_models.rope import RopeConfig
from vlmfast_models.step import build_step


class Attention(Protocol):
    """What a decoder layer asks of its caller."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores key and value [T, G, D] and returns the attended values [T, H, D] of query [T, H, D]."""
        ...


class PagedAttention(Attention, Protocol):
    """Attention that is plainly causal over pages; the compiled step then computes it itself."""

    @property
    def causal_pages(self) -> Sequence[PageRows]:
        """The pages that the rows continue, in order; their lengths grow as if `attend` had been called."""
        ...


class DecoderLayer(nn.Module):
    """Grouped-query attention and gated feed-forward: [T, E] -> [T, E]."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.qkv = Linear(config.hidden_size, query_size + 2 * kv_size, bias=config.attention_bias)
        self.out = Linear(query_size, config.hidden_size, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self._rotate, self._silu_mul = rotate.reference, silu_mul.reference
        self._bind()

    def prepare(self) -> None:
        weight = self.attn_norm.weight
        self._rotate = rotate.resolve(weight.device, weight.dtype)
        self._silu_mul = silu_mul.resolve(weight.device, weight.dtype)
        for part in (
            self.attn_norm,
            self.qkv,
            self.q_norm,
            self.k_norm,
            self.out,
            self.mlp_norm,
            self.gate_up,
            self.down,
        ):
            if part is not None:
                part.prepare()
        self._bind()

    def _bind(self) -> None:
        """Keeps the parts' functions at hand: a token passes six of them a layer, and `nn.Module` calls are slow."""
        self._norms = self.attn_norm.bound(), self.mlp_norm.bound()
        self._head_norms = None
        if self.q_norm is not None and self.k_norm is not None:
            self._head_norms = self.q_norm.bound(), self.k_norm.bound()
        self._linears = self.qkv.bound(), self.out.bound(), self.gate_up.bound(), self.down.bound()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, layer: int) -> Tensor:
        _, mlp_norm = self._norms
        _, out, gate_up, down = self._linears
        mixed = attention.attend(layer, *self.project(x, cos, sin))
        x = out(mixed.reshape(x.shape[0], -1), x)
        return down(self._silu_mul(gate_up(mlp_norm(x), None)), x)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [T, H, D], key and value [T, G, D] of the layer's input, turned to its positions."""
        config = self.config
        heads = self._linears[0](self._norms[0](x), None).view(x.shape[0], -1, config.head_dim)  # [T, H + 2G, D]
        split = config.num_heads + config.num_kv_heads
        turning = heads[:, :split]
        if self._head_norms is not None:
            q_norm, k_norm = self._head_norms
            turning = torch.cat((q_norm(turning[:, : config.num_heads]), k_norm(turning[:, config.num_heads :])), 1)
        turned = self._rotate(turning, cos, sin)
        return turned[:, : config.num_heads], turned[:, config.num_heads :], heads[:, split:]


class Decoder(nn.Module):
    """Token embeddings, decoder layers, final norm and output head."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        if config.activation != "silu":
            raise ConfigError(f"text_config: activation '{config.activation}' is not supported; supported: silu")
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.quantization: Quantization | None = None
        """What `prepare` quantises the linear layers to; the embeddings never are."""
        self._rope: tuple[Tensor, Tensor] | None = None
        self._step: DecoderStep | None = None
        self.tie()

    @property
    def head_quantization(self) -> Quantization | None:
        """What the head is quantised to: never to int4, which would blur the choice between tokens most of all."""
        return "int8" if self.quantization == "int4" else self.quantization

    def tie(self) -> None:
        """Makes the head read the embedding table where the checkpoint shares them; needed again after allocation."""
        if self.config.tie_embeddings:
            self.head.weight = cast(nn.Parameter, self.embed_tokens.weight)

    def prepare(self) -> None:
        """Builds the compiled step where it can run; comes before its parts are prepared."""
        weight, config = self.norm.weight, self.config
        if self._step is not None:
            return
        if not why_not_step(weight.device, weight.dtype, config.head_dim):
            frequencies = rotary_frequencies(config.rope, config.head_dim, weight.device)
            cos, signed_sin = rope_table(config.max_positions, frequencies, config.rope.magnitude)
            half = config.head_dim // 2
            self._step = build_step(self, (cos[:, half:], signed_sin[:, half:]))
        elif self.quantization is not None and self.head_quantization is not None:
            for layer in self.decoder_layers():
                for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                    linear.round_to(self.quantization)
            self.head.round_to(self.head_quantization)

    def decoder_layers(self) -> Iterable[DecoderLayer]:
        """The layers, in order."""
        return cast(Iterable[DecoderLayer], self.layers)

    def explain(self) -> str:
        """What the layers run on, and why not the compiled step."""
        weight = self.norm.weight
        kind = self.quantization or str(weight.dtype).removeprefix("torch.")
        reason = why_not_step(weight.device, weight.dtype, self.config.head_dim)
        if not reason:
            return f"decoder: compiled step on {instructions()}, {kind} weights: chosen"
        rounded = f", its weights rounded to {self.quantization} without gain" if self.quantization else ""
        return f"decoder: compiled step: {reason}\ndecoder: layer by layer{rounded}: chosen"

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of token ids, [T] -> [T, E]."""
        return self.embed_tokens(ids)

    def run(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention: Attention,
        first_layer: int = 0,
        last_layer: int | None = None,
    ) -> Tensor:
        """Hidden states [T, E] through layers first_layer .. last_layer - 1 (default: all that are left).

        positions is int64 [T], each below the configuration's `max_positions`. Calling it segment after segment gives
        the same numbers as one call. The compiled step returns float32.
        """
        if self._step is not None:
            # Of a PagedAttention; to ask a protocol by isinstance takes longer than a small layer.
            pages: Sequence[PageRows] | None = getattr(attention, "causal_pages", None)
            if pages is not None:
                last = len(self.layers) if last_layer is None else last_layer
                return self._step.run(hidden, positions, pages, first_layer, last)
            hidden = hidden.to(self.norm.weight.dtype)  # an earlier segment may have come from the step
        cos_table, sin_table = self._rope_tables(hidden.device, hidden.dtype)
        cos, sin = cos_table[positions][:, None], sin_table[positions][:, None]  # [T, 1, D]
        last = len(self.layers) if last_layer is None else last_layer
        for index, layer in enumerate(self.layers):
            if first_layer <= index < last:
                hidden = layer.forward(hidden, cos, sin, attention, index)
        return hidden

    def query(self, layer: int, hidden: Tensor, positions: Tensor) -> Tensor:
        """The queries [T, H, D] of a layer's input [T, E], as `run` computes them inside; they leave no trace."""
        hidden = hidden.to(self.norm.weight.dtype)  # the compiled step gives float32
        cos_table, sin_table = self._rope_tables(hidden.device, hidden.dtype)
        cos, sin = cos_table[positions][:, None], sin_table[positions][:, None]
        return cast(DecoderLayer, self.layers[layer]).project(hidden, cos, sin)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary scores of last-layer states, [T, E] -> [T, V]."""
        if self._step is not None:
            return self._step.logits(hidden)
        return self.head(self.norm(hidden))

    def go_on(
        self, tokens: Tensor, positions: Tensor, pages: Sequence[Page], steps: int, num_choices: int
    ) -> Tensor | None:
        """The likeliest tokens that follow, each after the one before, in one call: int64 [steps, B].

        The same as `run` over tokens int64 [B] at positions int64 [B], one for each page, the first maximum of
        `logits`[:, :num_choices], `run` over that and so on. None, and nothing has happened, without a compiled step.
        """
        if self._step is None:
            return None
        return self._step.go_on(tokens, positions, pages, self.embed_tokens.weight.detach(), steps, num_choices)

    def _rope_tables(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rotary tables in the run's dtype, made on first use (they are functions of the configuration alone)."""
        if self._rope is None or self._rope[0].device != device or self._rope[0].dtype != dtype:
            frequencies = rotary_frequencies(self.config.rope, self.config.head_dim, device)
            cos, sin = rope_table(self.config.max_positions, frequencies, self.config.rope.magnitude)
            self._rope = (cos.to(dtype), sin.to(dtype))
        return self._rope


def rotary_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Rotary frequencies [D/2] of a configuration."""
    plain = rope_frequencies(head_dim, rope.theta, device)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return llama3_frequencies(plain, rope.factor, rope.low, rope.high, rope.original_positions)
    if rope.kind == "yarn":
        scaling = (rope.theta, rope.factor, rope.low, rope.high, rope.original_positions, rope.truncate)
        return yarn_frequencies(plain, *scaling)
    return plain

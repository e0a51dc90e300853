"""Small random checkpoints in the real file formats, for tests and benchmarks.

The weights are random, so the answers mean nothing; sizes, files, tokenizer and template are those of the family.
transformers writes the folder, which keeps the files honest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] | capitalize }}:"
    "{% if message['content'] and message['content'][0]['type'] != 'image' %} {% endif %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>Assistant:{% endif %}"
)
"""One turn a line, in the manner of SmolVLM's template."""

_MAX_GRID = 6
_TEXT = "The quick brown fox jumps over a lazy dog. What is in the picture? There is a red circle. User: Assistant: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a random Idefics3 checkpoint; the defaults are tiny."""

    image_size: int = 32
    patch_size: int = 4
    scale_factor: int = 2
    longest_edge: int = 64
    vision: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
        }
    )
    text: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 2048,
        }
    )
    vocab_size: int = 512
    tied: bool = False
    do_image_splitting: bool = True
    initializer_range: float = 0.1
    """Standard deviation of the weights; wide enough that the likeliest token changes from step to step."""


SMOLVLM_256M = Shape(
    image_size=512,
    patch_size=16,
    scale_factor=4,
    longest_edge=2048,
    vision={"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    text={
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    },
    vocab_size=49280,
    initializer_range=0.02,
)
"""The sizes of HuggingFaceTB/SmolVLM-256M-Instruct."""


def random_checkpoint(
    folder: str | Path,
    shape: Shape | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> Path:
    """Writes a random Idefics3 checkpoint to `folder` and returns it."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor

    try:
        from transformers import Idefics3ImageProcessorPil as ImageProcessor
    except ImportError:  # older transformers: one class, which runs on Pillow
        from transformers import Idefics3ImageProcessor as ImageProcessor

    shape = shape or Shape()
    folder = Path(folder)
    tokenizer = _tokenizer(shape.vocab_size)
    image_processor = ImageProcessor(
        size={"longest_edge": shape.longest_edge},
        max_image_size={"longest_edge": shape.image_size},
        do_image_splitting=shape.do_image_splitting,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    tokens_per_tile = (shape.image_size // shape.patch_size // shape.scale_factor) ** 2
    processor = Idefics3Processor(
        image_processor, tokenizer, image_seq_len=tokens_per_tile, chat_template=CHAT_TEMPLATE
    )
    eos = tokenizer.convert_tokens_to_ids("<end_of_utterance>")
    config = Idefics3Config(
        vision_config=dict(
            shape.vision,
            image_size=shape.image_size,
            patch_size=shape.patch_size,
            initializer_range=shape.initializer_range,
        ),
        text_config=dict(
            shape.text,
            model_type="llama",
            vocab_size=shape.vocab_size,
            eos_token_id=eos,
            initializer_range=shape.initializer_range,
        ),
        scale_factor=shape.scale_factor,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=shape.tied,
    )
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(config).to(dtype)
    _fill(model, shape.initializer_range, seed)
    model.generation_config.eos_token_id = eos
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    processor.save_pretrained(folder)
    return folder


def _fill(model: torch.nn.Module, std: float, seed: int) -> None:
    """Normal weights everywhere, biases and norms included, so that none of them can be ignored unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0))


def _tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE tokenizer with the family's special tokens, filled up to `vocab_size` entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|im_start|>", "<|endoftext|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>"]
    places = ["<global-img>"]
    places += [f"<row_{row}_col_{col}>" for row in range(1, _MAX_GRID + 1) for col in range(1, _MAX_GRID + 1)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 512) - len(special) - len(places),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(places)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<unused_{index}>" for index in range(missing)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<end_of_utterance>", pad_token="<|endoftext|>"
    )

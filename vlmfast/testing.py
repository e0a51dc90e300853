"""Small random checkpoints in the real file formats, for tests and benchmarks.

The weights are random, so the answers mean nothing; sizes, files, tokenizer and template are those of the family.
transformers writes the folder, which keeps the files honest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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

VICUNA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }}: "
    "{% for part in message['content'] %}"
    "{{ '<image>\n' if part['type'] == 'image' else part['text'] + ' ' }}"
    "{% endfor %}{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""In the manner of LLaVA-1.5's template; the tokenizer puts the beginning-of-text token before it."""

MISTRAL_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'][0]['text'] }}</s>"
    "{% else %}[INST] {% for part in message['content'] %}"
    "{{ '<image>\n' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %} [/INST]{% endif %}{% endfor %}"
)
"""In the manner of LLaVA-1.6's templates for Mistral."""

_PREFIXES = {
    "idefics3": "Idefics3",
    "smolvlm": "SmolVLM",
    "llava": "Llava",
    "llava_next": "LlavaNext",
    "llava_onevision": "LlavaOnevision",
}
"""How transformers' classes of a family begin."""
_TEMPLATES = {"llava": VICUNA_TEMPLATE, "llava_next": MISTRAL_TEMPLATE}
_MAX_GRID = 6
_TEXT = "The quick brown fox jumps over a lazy dog. What is in the picture? There is a red circle. User: Assistant: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a random checkpoint is like; the defaults are a tiny Idefics3."""

    model_type: str = "idefics3"
    """One of vlmfast's families."""
    image_size: int = 32
    patch_size: int = 4
    scale_factor: int = 2
    """Idefics3 only."""
    longest_edge: int = 64
    """Idefics3 only."""
    pinpoints: tuple[tuple[int, int], ...] = ()
    """LLaVA-NeXT and LLaVA-OneVision only: canvases as (height, width), as their files have them."""
    vision: dict[str, Any] = field(
        default_factory=lambda: {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
        }
    )
    text: dict[str, Any] = field(
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
    more: dict[str, Any] = field(default_factory=dict)
    """Further entries of config.json, for example vision_feature_layer."""
    preprocessor: dict[str, Any] = field(default_factory=dict)
    """Further settings of the image processor."""
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


_TINY_VISION = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 3}
_TINY_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_PINPOINTS = ((28, 56), (56, 28), (56, 56), (84, 28), (28, 84))

TINY_SHAPES = {
    "idefics3": Shape(),
    "smolvlm": Shape(model_type="smolvlm"),
    "llava": Shape(model_type="llava", image_size=28, vision=_TINY_VISION, text=_TINY_TEXT),
    "llava_next": Shape(
        model_type="llava_next",
        image_size=28,
        pinpoints=_PINPOINTS,
        vision=_TINY_VISION,
        text={**_TINY_TEXT, "model_type": "mistral", "sliding_window": None},
    ),
    "llava_onevision": Shape(
        model_type="llava_onevision",
        image_size=30,  # the tower does not see the last two pixels, as in the checkpoints on the hub
        pinpoints=tuple((30 * rows, 30 * cols) for rows in range(1, 7) for cols in range(1, 7)),
        vision=_TINY_VISION,
        text={**_TINY_TEXT, "model_type": "qwen2"},
        more={"vision_aspect_ratio": "anyres_max_9"},
    ),
}
"""A tiny checkpoint of every family by its model_type."""


def random_checkpoint(
    folder: str | Path,
    shape: Shape | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> Path:
    """Writes a random checkpoint to `folder` and returns it; a tiny Idefics3 by default."""
    import transformers

    shape = shape or Shape()
    folder = Path(folder)
    llava = shape.model_type.startswith("llava")
    spelled = _LLAMA_TOKENS if shape.model_type in _TEMPLATES else _CHAT_TOKENS
    tokenizer = _tokenizer(shape.vocab_size, spelled)
    prefix = _PREFIXES[shape.model_type]
    eos = tokenizer.eos_token_id
    config = getattr(transformers, f"{prefix}Config")(
        vision_config={
            **({"model_type": _tower(shape)} if llava else {}),
            **shape.vision,
            "image_size": shape.image_size,
            "patch_size": shape.patch_size,
            "initializer_range": shape.initializer_range,
        },
        text_config={
            "model_type": "llama",
            **shape.text,
            "vocab_size": shape.vocab_size,
            "eos_token_id": eos,
            "initializer_range": shape.initializer_range,
        },
        **({"image_grid_pinpoints": [list(pair) for pair in shape.pinpoints]} if shape.pinpoints else {}),
        **({} if llava else {"scale_factor": shape.scale_factor}),
        **{"image_token_index" if llava else "image_token_id": tokenizer.convert_tokens_to_ids("<image>")},
        **shape.more,
        tie_word_embeddings=shape.tied,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).to(dtype)
    _fill(model, shape.initializer_range, seed)
    model.generation_config.eos_token_id = eos
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (_save_llava_processor if llava else _save_idefics3_processor)(folder, shape, tokenizer, prefix)
    return folder


def _tower(shape: Shape) -> str:
    return "siglip_vision_model" if shape.model_type == "llava_onevision" else "clip_vision_model"


def _image_processor(prefix: str, **settings: Any) -> Any:
    """transformers' image processor that runs on Pillow (the only one in older versions)."""
    import transformers

    name = f"{prefix}ImageProcessor"
    return (getattr(transformers, f"{name}Pil", None) or getattr(transformers, name))(**settings)


def _save_idefics3_processor(folder: Path, shape: Shape, tokenizer: Any, prefix: str) -> None:
    """SmolVLM's own processor needs torchvision; Idefics3's writes the same files."""
    from transformers import Idefics3Processor

    image_processor = _image_processor(
        "Idefics3",
        size={"longest_edge": shape.longest_edge},
        max_image_size={"longest_edge": shape.image_size},
        do_image_splitting=shape.do_image_splitting,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        **shape.preprocessor,
    )
    tokens_per_tile = (shape.image_size // shape.patch_size // shape.scale_factor) ** 2
    processor = Idefics3Processor(
        image_processor, tokenizer, image_seq_len=tokens_per_tile, chat_template=CHAT_TEMPLATE
    )
    processor.save_pretrained(folder)


def _save_llava_processor(folder: Path, shape: Shape, tokenizer: Any, prefix: str) -> None:
    """The processor's parts, one by one: LLaVA-OneVision's own needs torchvision."""
    side = {"height": shape.image_size, "width": shape.image_size}
    settings: dict[str, Any] = {"size": side}
    if shape.model_type != "llava_onevision":
        settings = {"size": {"shortest_edge": shape.image_size}, "crop_size": side}
    if shape.pinpoints:
        settings["image_grid_pinpoints"] = [list(pair) for pair in shape.pinpoints]
    _image_processor(prefix, **{**settings, **shape.preprocessor}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    template = _TEMPLATES.get(shape.model_type, CHAT_TEMPLATE)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _fill(model: torch.nn.Module, std: float, seed: int) -> None:
    """Normal weights everywhere, biases and norms included, so that none of them can be ignored unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0))


_CHAT_TOKENS = ("<|im_start|>", "<|endoftext|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>")
_LLAMA_TOKENS = ("<unk>", "<s>", "</s>", "<image>")


def _tokenizer(vocab_size: int, special: Sequence[str]) -> Any:
    """A BPE tokenizer with these special tokens, filled up to `vocab_size` entries.

    Byte-level like GPT-2's, or, with `_LLAMA_TOKENS`, like Llama's: spaces as "▁" (one before the text), unknown
    characters as bytes, and a beginning-of-text token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    like_llama = special is _LLAMA_TOKENS
    places: list[str] = []
    if not like_llama:
        places = ["<global-img>"]
        places += [f"<row_{row}_col_{col}>" for row in range(1, _MAX_GRID + 1) for col in range(1, _MAX_GRID + 1)]
    spaces = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = spaces if like_llama else pre_tokenizers.ByteLevel(add_prefix_space=False)
    reserved = 256 + len(special) if like_llama else len(special) + len(places)
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 512) - reserved,
        initial_alphabet=[] if like_llama else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    if like_llama:
        learnt = json.loads(tokenizer.to_str())["model"]
        tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
        tokenizer.model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(pair) for pair in learnt["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", special.index("<s>"))]
        )
    else:
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(places)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<unused_{index}>" for index in range(missing)])
    bos, eos, pad = ("<s>", "</s>", "<unk>") if like_llama else ("<|im_start|>", "<end_of_utterance>", "<|endoftext|>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)

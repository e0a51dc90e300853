"""A checkpoint's files, read once: where they are, what they configure, and the tokenizer they bring."""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmfast.errors import ConfigError, ModelNotFoundError
from vlmfast_models.config import TEXT_MODELS, ModelConfig, PreprocessConfig, TextConfig
from vlmfast_models.families import FAMILIES, family

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Named where none loads; a checkpoint may have another file that transformers knows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """What a checkpoint folder says about itself."""

    folder: Path
    config: ModelConfig
    preprocess: PreprocessConfig
    tokenizer: Any
    """A transformers fast tokenizer."""
    chat_template: str
    eos_token_ids: frozenset[int]
    stored_dtype: str
    """The dtype named in config.json, for example "bfloat16"."""


def bundled_model() -> Path:
    """The folder of the small model that comes with vlmfast.

    Raises:
        ModelNotFoundError: this installation lacks it.
    """
    try:
        folder = importlib.resources.files("vlmfast_pocket")
    except ModuleNotFoundError as error:
        raise ModelNotFoundError(
            "the bundled model is not installed (package vlmfast_pocket); install vlmfast again, or name a checkpoint"
        ) from error
    return Path(str(folder))


def resolve_folder(name_or_path: str | os.PathLike[str] | None, *, revision: str | None = None) -> Path:
    """The local folder of a checkpoint: the bundled model for None, a folder as it is, a hub name by download.

    Raises:
        ModelNotFoundError: no such folder, or the hub does not have it, or it can not be reached.
    """
    if name_or_path is None:
        return bundled_model()
    name = os.fspath(name_or_path)
    try:
        path = Path(name).expanduser()
        if name and path.is_dir():
            return path
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelNotFoundError(f"model '{name[:80]}': not a usable path ({error})") from error
    looks_local = not name or path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_local:
        raise ModelNotFoundError(
            f"model '{name}': no such folder; give a checkpoint folder or a hub name like "
            "HuggingFaceTB/SmolVLM-256M-Instruct"
        )
    return _download(name, revision)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads configuration, preprocessing, tokenizer and template of a folder; weights stay where they are.

    Raises:
        ConfigError: a file is missing, broken or incomplete.
        UnsupportedModelError: the architecture is not one of ours.
    """
    raw = _read_json(folder, "config.json")
    model_type = str(raw.get("model_type", "none given"))
    network = family(model_type)
    for part in ("vision_config", "text_config"):
        if not isinstance(raw.get(part), dict):
            raise ConfigError(f"{folder / 'config.json'} has no '{part}'; the checkpoint's configuration is incomplete")
    if raw.get("quantization_config"):
        raise ConfigError(f"{folder}: quantized checkpoints are not supported; use the original weights")
    with _values_checked(folder / "config.json"):
        config = ModelConfig.from_hf(_with_defaults(folder, raw))
    with _values_checked(folder / "preprocessor_config.json"):
        preprocess = PreprocessConfig.from_hf(_preprocessor(folder), model_type=model_type)
    tokenizer = _tokenizer(folder)
    _check_parts_agree(folder, config, preprocess, tokenizer, network.image_token)
    return Checkpoint(
        folder=folder,
        config=config,
        preprocess=preprocess,
        tokenizer=tokenizer,
        chat_template=_chat_template(folder, tokenizer),
        eos_token_ids=_eos_token_ids(folder, raw, tokenizer),
        stored_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def is_text_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a decoder alone, in one of the forms that our decoder runs.

    Raises:
        ConfigError: its config.json is missing or broken.
    """
    return _read_json(folder, "config.json").get("model_type") in TEXT_MODELS


def read_text_checkpoint(folder: Path) -> tuple[TextConfig, Any]:
    """Configuration and tokenizer of a decoder alone.

    Raises:
        ConfigError: a file is missing, broken or incomplete.
    """
    raw = _read_json(folder, "config.json")
    if raw.get("quantization_config"):
        raise ConfigError(f"{folder}: quantized checkpoints are not supported; use the original weights")
    with _values_checked(folder / "config.json"):
        whole = _with_defaults(folder, raw)
        config = TextConfig.from_hf(whole, tie_embeddings=bool(whole.get("tie_word_embeddings", False)))
    return config, _tokenizer(folder)


def supported_model_types() -> tuple[str, ...]:
    """The `model_type` values that load."""
    return tuple(sorted(FAMILIES))


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"model '{name}' is gated: accept its terms on its hub page and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"model '{name}' has no revision '{revision}'") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"model '{name}': no such folder, and no public hub repository of this name (log in if it is private)"
        ) from error
    except Exception as error:  # the hub's HTTP library differs between versions (httpx, httpx2), so do its errors
        raise ModelNotFoundError(
            f"model '{name}': no such folder, it is not in the local hub cache, and the hub can not be reached "
            f"({type(error).__name__}); connect, or give the path of a downloaded folder"
        ) from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    if not file.is_file():
        raise ConfigError(f"{folder} has no {name}; it is not a Hugging Face checkpoint folder")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    except OSError as error:
        raise ConfigError(f"{file} can not be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return value


def _with_defaults(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the defaults that its class in transformers fills in."""
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict())
    except Exception as error:  # its validation raises errors of its own, which differ between versions
        raise ConfigError(f"{folder / 'config.json'} (model_type '{raw.get('model_type')}'): {error}") from error


def _check_parts_agree(
    folder: Path, config: ModelConfig, preprocess: PreprocessConfig, tokenizer: Any, image_token: str
) -> None:
    """Raises ConfigError where files of different checkpoints lie in one folder."""
    if preprocess.tile_size != config.vision.image_size:
        raise ConfigError(
            f"{folder}: the preprocessor cuts tiles of {preprocess.tile_size} pixels, the vision tower takes "
            f"{config.vision.image_size}"
        )
    if preprocess.pinpoints != config.pinpoints:
        raise ConfigError(f"{folder}: image_grid_pinpoints of the preprocessor and of config.json differ")
    token_id = tokenizer.get_added_vocab().get(image_token)
    if token_id != config.image_token_id:
        raise ConfigError(
            f"{folder}: image_token_id is {config.image_token_id}, the tokenizer's '{image_token}' is {token_id}"
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= config.text.vocab_size:
        raise ConfigError(
            f"{folder}: the tokenizer has token {largest}, the model a vocabulary of {config.text.vocab_size}"
        )


@contextmanager
def _values_checked(file: Path) -> Iterator[None]:
    """Turns what a value of a wrong type or size raises while it is read into a ConfigError that names the file."""
    try:
        yield
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, ArithmeticError) as error:
        raise ConfigError(f"{file}: a value is of the wrong type or out of range ({error})") from error


def _preprocessor(folder: Path) -> dict[str, Any]:
    """The image processor's settings: a file of their own, or a part of the processor's file (transformers 5)."""
    if not (folder / "preprocessor_config.json").is_file() and (folder / "processor_config.json").is_file():
        nested = _read_json(folder, "processor_config.json").get("image_processor")
        if isinstance(nested, dict):
            return nested
    return _read_json(folder, "preprocessor_config.json")


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            names = ", ".join(_TOKENIZER_FILES)
            raise ConfigError(f"{folder} has no tokenizer ({names}); copy it from the checkpoint") from error
        raise ConfigError(f"{folder}: the tokenizer can not be loaded: {error}") from error


def _chat_template(folder: Path, tokenizer: Any) -> str:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if (folder / "chat_template.json").is_file():
        return str(_read_json(folder, "chat_template.json").get("chat_template", ""))
    template = tokenizer.chat_template
    if (folder / "processor_config.json").is_file():
        template = _read_json(folder, "processor_config.json").get("chat_template") or template
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise ConfigError(f"{folder} has no chat template (chat_template.jinja, or in tokenizer_config.json)")
    return template


def _eos_token_ids(folder: Path, raw: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: generation_config.json decides, then config.json, then the tokenizer."""
    generation = folder / "generation_config.json"
    candidates = [
        _read_json(folder, generation.name).get("eos_token_id") if generation.is_file() else None,
        raw.get("eos_token_id"),
        (raw.get("text_config") or {}).get("eos_token_id"),
        tokenizer.eos_token_id,
    ]
    for value in candidates:
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) for token in ids):
                raise ConfigError(f"{folder}: eos_token_id must be a token id or a list of them, got {value!r}")
            return frozenset(ids)
    return frozenset()

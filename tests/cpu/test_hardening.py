"""What a hostile tester found: code in checkpoints, interrupts between pass and bookkeeping, odd numbers, odd files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import check_idle, noise
from safetensors.torch import load_file, save_file

from vlmfast import VLM, Answer, Sampling
from vlmfast.checkpoint import read_checkpoint
from vlmfast.errors import ConfigError, InputError, ModelError, ModelNotFoundError, WeightsError
from vlmfast.kv import total_memory, within_memory
from vlmfast.testing import random_checkpoint

_PICTURE = noise(40, 30)
_QUESTION = "What is in the picture?"
_GREEDY = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("hardening"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def _edit(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text())
    for name, value in values.items():
        target = content
        *parents, last = name.split("__")
        for parent in parents:
            target = target[parent]
        target[last] = value
    file.write_text(json.dumps(content))


def test_code_in_a_checkpoint_never_runs(copy: Path, tmp_path: Path) -> None:
    """Guards against a tokenizer that brings a Python file: refused without asking, and the file is not imported."""
    ran = tmp_path / "ran"
    (copy / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    _edit(
        copy / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "evil.Evil"]},
        tokenizer_class="Evil",
    )
    script = "import pathlib, sys, vlmfast.checkpoint as c; c.read_checkpoint(pathlib.Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(copy)], input="y\n", capture_output=True, text=True, check=False
    )
    assert "[y/N]" not in done.stdout
    assert not ran.exists()


def test_an_interrupt_between_pass_and_bookkeeping(idle_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards neighbours of an interrupted request: a step that was computed but not applied is computed again."""
    expected = idle_engine.describe(_PICTURE, _QUESTION, sampling=_GREEDY).token_ids
    engine = idle_engine._engine
    neighbour = idle_engine.stream(_PICTURE, _QUESTION, sampling=_GREEDY)
    driver = idle_engine.stream(noise(20, 50), "Which colour?", sampling=_GREEDY)
    next(driver)
    apply = engine._apply

    def interrupted(*arguments: Any) -> None:
        monkeypatch.setattr(engine, "_apply", apply)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in driver:
            pass
    answer = [chunk.answer for chunk in neighbour][-1]
    assert answer.token_ids == expected
    check_idle(idle_engine)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-45},
        {"temperature": 5e-324},
        {"temperature": 1.0, "top_p": 5e-324},
        {"temperature": Fraction(1, 3)},
        {"temperature": 1.0, "seed": np.int64(3)},
        {"temperature": 1e-9, "repetition_penalty": 1e-3},
    ],
)
def test_odd_numbers_are_answered(idle_engine: Any, options: dict[str, Any]) -> None:
    """Guards drawing at the ends of the ranges, and numbers that are not Python's own."""
    answer = idle_engine.describe(_PICTURE, _QUESTION, sampling=Sampling(max_new_tokens=4, **options))
    assert answer.usage.completion_tokens == 4


def test_tiny_temperature_is_greedy(idle_engine: Any) -> None:
    greedy = idle_engine.describe(_PICTURE, _QUESTION, sampling=_GREEDY).token_ids
    cold = idle_engine.describe(_PICTURE, _QUESTION, sampling=Sampling(max_new_tokens=12, temperature=1e-9)).token_ids
    assert cold == greedy


def test_a_failed_draw_fails_alone(idle_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards invariant 7 at the sampler: an error in one request's choice does not reach its neighbour."""
    import vlmfast.sample as sample

    expected = idle_engine.describe(_PICTURE, _QUESTION, sampling=_GREEDY).token_ids
    neighbour = idle_engine.stream(_PICTURE, _QUESTION, sampling=_GREEDY)
    broken = idle_engine.stream(_PICTURE, _QUESTION, sampling=Sampling(max_new_tokens=12, temperature=1.0))

    def no_distribution(*arguments: Any) -> None:
        raise RuntimeError("no distribution")

    monkeypatch.setattr(sample, "probabilities", no_distribution)
    with pytest.raises(RuntimeError, match="no distribution"):
        list(broken)
    assert [chunk.answer for chunk in neighbour][-1].token_ids == expected


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff", None, 5, b"hi"])
def test_prompts_that_are_no_text(idle_engine: Any, text: Any) -> None:
    with pytest.raises(InputError, match="prompt"):
        idle_engine.describe(_PICTURE, text)
    check_idle(idle_engine)


def test_one_picture_to_caption_is_one_row(idle_engine: Any, tmp_path: Path) -> None:
    """Guards against captioning the letters of a path or the rows of an array."""
    from PIL import Image

    path = tmp_path / "one.png"
    Image.fromarray(_PICTURE).save(path)
    for source in (str(path), path, path.read_bytes(), _PICTURE, Image.fromarray(_PICTURE)):
        rows = list(idle_engine.caption(source, _QUESTION, sampling=_GREEDY))
        assert len(rows) == 1 and isinstance(rows[0], Answer)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"text_config": None}),
        ("config.json", {"vision_config__num_attention_heads": 0}),
        ("config.json", {"vision_config__patch_size": 0}),
        ("config.json", {"vision_config__image_size": 34}),
        ("config.json", {"text_config__hidden_size": -64}),
        ("config.json", {"text_config__num_hidden_layers": 2**40}),
        ("config.json", {"scale_factor": 0}),
        ("config.json", {"quantization_config": {"quant_method": "awq"}}),
        ("config.json", {"text_config__vocab_size": 200}),
        ("generation_config.json", {"eos_token_id": {}}),
        ("generation_config.json", {"eos_token_id": [[1]]}),
        ("processor_config.json", {"image_processor__size": 64}),
        ("processor_config.json", {"image_processor__size": {"longest_edge": -32}}),
        ("processor_config.json", {"image_processor__image_mean": [0.5]}),
        ("processor_config.json", {"image_processor__image_std": [0.5, 0.5, 0]}),
        ("processor_config.json", {"image_processor__image_mean": None}),
        ("processor_config.json", {"image_processor__resample": 99}),
        ("processor_config.json", {"image_processor__resample": "lanczos"}),
        ("processor_config.json", {"image_processor__do_normalize": 0}),
    ],
)
def test_broken_configurations_are_named(copy: Path, file: str, values: dict[str, Any]) -> None:
    """Guards against tracebacks, and answers of garbage, from values that no checkpoint can have."""
    _edit(copy / file, **values)
    with pytest.raises(ConfigError, match=r"\w+"):
        read_checkpoint(copy)


@pytest.mark.parametrize("name", ["", "x" * 5000, "~nosuchuser/x"])
def test_unusable_model_names(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        VLM.from_pretrained(name)


def test_a_context_beyond_memory_is_cut(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards loading: a billion claimed positions lay out no tables and no pages that the machine has no memory for."""
    config = read_checkpoint(copy).config
    text = config.text
    monkeypatch.setattr("vlmfast.kv.total_memory", lambda _: 2**30)
    assert within_memory(config, torch.device("cpu"), torch.float32) is config
    _edit(copy / "config.json", text_config__max_position_embeddings=10**9)
    vlm = VLM.from_pretrained(copy, device="cpu", dtype="float32", caching=False)
    page = 4 * 2 * text.num_layers * text.num_kv_heads * text.head_dim
    assert 10_000 < vlm.max_context < 10**7
    assert vlm.max_context * page <= 2**30 and vlm.max_context * 8 * text.head_dim <= 2**30 // 64
    assert vlm.model.decoder.config.max_positions == vlm.max_context
    assert len(vlm.describe(_PICTURE, _QUESTION, sampling=_GREEDY).token_ids) > 0


def test_memory_is_known_or_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards systems without sysconf."""
    assert 2**28 < total_memory(torch.device("cpu")) < 2**50
    monkeypatch.delattr("os.sysconf")
    assert total_memory(torch.device("cpu")) == 16 * 2**30


def test_quantized_weights_are_refused(copy: Path) -> None:
    """Guards against integers that are cast to numbers they do not mean."""
    tensors = load_file(copy / "model.safetensors")
    tensors["model.text_model.norm.weight"] = tensors["model.text_model.norm.weight"].to(torch.int8)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.text_model\.norm\.weight is stored as torch\.int8"):
        VLM.from_pretrained(copy)


def test_a_stray_weight_file_is_not_merged(folder: Path, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, copy / "zz.safetensors")
    expected, got = (
        VLM.from_pretrained(path).describe(_PICTURE, _QUESTION, sampling=_GREEDY).token_ids for path in (folder, copy)
    )
    assert got == expected


def test_scores_that_are_no_numbers_are_an_error(copy: Path) -> None:
    """Guards against '!!!!' with exit code 0 from damaged weights."""
    tensors = load_file(copy / "model.safetensors")
    tensors["model.text_model.norm.weight"][0] = float("nan")
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ModelError, match="not numbers"):
        VLM.from_pretrained(copy).describe(_PICTURE, _QUESTION)


def test_the_command_with_its_output_closed() -> None:
    """Guards `vlmfast ... >&-`: no traceback."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c 'from vlmfast.cli.main import main; main([\"models\"])' >&-"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr

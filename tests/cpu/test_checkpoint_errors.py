"""Folders and names that are no usable checkpoint: each a clear error of ours, without network."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vlmfast import VLM
from vlmfast.checkpoint import resolve_folder
from vlmfast.device import resolve_device, resolve_dtype
from vlmfast.errors import ConfigError, DeviceError, ModelError, ModelNotFoundError, UnsupportedModelError


@pytest.fixture
def folder(checkpoint_of: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_of(), tmp_path / "copy"))


def _edit(file: Path, **changes: Any) -> None:
    """Changes values of a JSON file; `...` removes one, a dictionary is merged into what is there."""
    raw = json.loads(file.read_text())
    for key, value in changes.items():
        if value is ...:
            del raw[key]
        elif isinstance(value, dict):
            raw[key] = {**raw.get(key, {}), **value}
        else:
            raw[key] = value
    file.write_text(json.dumps(raw))


def test_an_empty_folder(tmp_path: Path) -> None:
    """Guards a folder that holds no checkpoint: the missing file is named."""
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        VLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", "\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "processor_config.json", "generation_config.json"])
def test_files_that_are_no_json_objects(folder: Path, text: str, name: str) -> None:
    """Guards broken files: the file is named."""
    (folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=name):
        VLM.from_pretrained(folder)


def test_unsupported_architectures_name_the_supported(folder: Path) -> None:
    """Guards another model's folder: the error says what is supported, before anything is loaded."""
    for model_type in ("paligemma", "no such thing"):
        _edit(folder / "config.json", model_type=model_type)
        with pytest.raises(UnsupportedModelError, match=rf"'{model_type}' is not supported; supported: .*idefics3"):
            VLM.from_pretrained(folder)
    _edit(folder / "config.json", model_type=...)
    with pytest.raises(UnsupportedModelError, match="none given"):
        VLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"text_config": {"model_type": "gemma"}},
            "decoder type 'gemma' is not supported; supported: llama, mistral, qwen2",
        ),
        ({"text_config": {"hidden_act": "gelu"}}, "activation 'gelu' is not supported; supported: silu"),
        (
            {"text_config": {"rope_parameters": {"rope_type": "proportional", "factor": 2.0, "rope_theta": 1e4}}},
            "rope scaling",
        ),
        ({"text_config": {"hidden_size": "wide"}}, "hidden_size"),
        ({"text_config": "llama"}, "text_config"),
        ({"vision_config": {"hidden_act": "relu"}}, "activation 'relu'"),
        ({"vision_config": {"num_attention_heads": 7}}, "not a multiple of 7"),
        ({"scale_factor": 3}, "scale_factor 3"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_configurations_that_do_not_run(folder: Path, changes: dict[str, Any], message: str) -> None:
    """Guards values that we do not run, and values of a wrong type: refused when loading, not when asked."""
    _edit(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        VLM.from_pretrained(folder)


def test_tiles_of_another_size_than_the_tower(folder: Path) -> None:
    """Guards a preprocessor that does not belong to the tower: token counts could not agree."""
    _edit(folder / "processor_config.json", image_processor={"max_image_size": {"longest_edge": 64}})
    with pytest.raises(ConfigError, match=r"64.*32"):
        VLM.from_pretrained(folder)


def test_an_image_token_of_another_tokenizer(folder: Path) -> None:
    """Guards a tokenizer whose image token is not the one of the configuration."""
    _edit(folder / "config.json", image_token_id=5)
    with pytest.raises(ConfigError, match=r"image_token_id.*5"):
        VLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["processor_config.json", "tokenizer.json", "chat_template.jinja"])
def test_missing_parts_are_named(folder: Path, name: str) -> None:
    """Guards half a checkpoint."""
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config|tokenizer|chat template"):
        VLM.from_pretrained(folder)


def test_a_broken_tokenizer(folder: Path) -> None:
    """Guards a tokenizer file that is cut."""
    file = folder / "tokenizer.json"
    file.write_text(file.read_text()[:500])
    with pytest.raises(ConfigError, match="tokenizer can not be loaded"):
        VLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "name", ["no-such-folder", "./none/here", "/none/here", "~/none/here", "a/b/c", "", ".", "..", "config.json"]
)
def test_names_that_can_only_be_folders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards typing errors in paths: no look-up on the hub, and the form of hub names is told."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        VLM.from_pretrained(name)


def test_hub_names_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the offline case: one clear error that says what to do (the network is blocked in tests)."""
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    with pytest.raises(ModelNotFoundError, match=r"'someone/some-model'.*can not be reached"):
        resolve_folder("someone/some-model")


def test_the_network_is_blocked() -> None:
    """Guards the guard: a test that reaches out fails."""
    with pytest.raises(OSError, match="blocked in tests"):
        socket.create_connection(("93.184.216.34", 80), timeout=1)
    with pytest.raises(OSError, match="blocked in tests"):
        socket.create_connection(("example.com", 80), timeout=1)


@pytest.mark.parametrize("name", ["tpu", "gpu", "", "cuda:99", "meta", "mps:0", "cpu:x"])
def test_unknown_devices(name: str) -> None:
    """Guards device names: ours to refuse, with what is possible."""
    with pytest.raises(DeviceError, match=f"device '{name}'"):
        resolve_device(name)


def test_known_devices_and_formats() -> None:
    """Guards the choice of device and dtype, and that float16 on a CPU is refused by name."""
    cpu = torch.device("cpu")
    assert resolve_device("cpu") == cpu
    assert resolve_device("auto").type in ("cpu", "cuda")
    assert resolve_dtype("auto", "float32", cpu) is torch.float32
    assert resolve_dtype("auto", "bfloat16", cpu) in (torch.bfloat16, torch.float32)
    assert resolve_dtype("auto", "float16", cpu) is resolve_dtype("auto", "bfloat16", cpu)
    assert resolve_dtype("bfloat16", "float32", cpu) is torch.bfloat16
    assert resolve_dtype("auto", "float16", torch.device("cuda")) is torch.float16
    with pytest.raises(DeviceError, match="float16"):
        resolve_dtype("float16", "float16", cpu)
    with pytest.raises(DeviceError, match="int3"):
        resolve_dtype("int3", "float32", cpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_cuda_device(checkpoint_of: Callable[..., Path]) -> None:
    """Guards `device="cuda"` on a machine without one."""
    with pytest.raises(DeviceError, match="no CUDA device"):
        VLM.from_pretrained(checkpoint_of(), device="cuda")


def test_explain_names_every_operation(vlm: Any) -> None:
    """Guards `VLM.explain`: device, dtype, and one chosen implementation for each operation."""
    from vlmfast_kernels.op import all_ops

    text = vlm.explain()
    assert text.startswith(f"device {vlm.device}, dtype torch.float32")
    for name in ("linear", *all_ops()):
        lines = [line for line in text.splitlines() if line.startswith(f"{name}: ")]
        assert sum(line.endswith(": chosen") for line in lines) == 1, name

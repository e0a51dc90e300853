"""`vision_dtype="int8"`: what it quantises, that it says so, and that features keep apart and stay a tile's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import noise

from vlmfast import Sampling, Vision
from vlmfast.errors import DeviceError
from vlmfast.options import Caching
from vlmfast.testing import TINY_SHAPES

_PICTURE, _QUESTION = noise(64, 61), "What is in the picture?"
_GREEDY = Sampling(max_new_tokens=6)


def _tiles(vlm: Any, count: int) -> torch.Tensor:
    side = vlm.checkpoint.config.vision.image_size
    pixels = torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(3))
    return (pixels * torch.tensor([0.1, 1.0, 30.0])[torch.arange(count) % 3][:, None, None, None]).to(vlm.dtype)


@pytest.mark.parametrize("family", sorted(TINY_SHAPES))
def test_a_tile_is_the_same_alone_and_among_others(
    family: str, load_vlm: Callable[..., Any], checkpoint_of: Callable[..., Path]
) -> None:
    """Bit for bit through the quantised blocks, beside tiles of other brightness; close to float32 and not the same.

    (The parts in float32 are a library's, whose sums may depend on the number of rows: they are computed once.)
    """
    folder = checkpoint_of(TINY_SHAPES[family])
    vlm = load_vlm(folder, vision_dtype="int8", caching=False)
    pixels, tower = _tiles(vlm, 3), vlm.model.vision
    with torch.inference_mode():
        embedded = tower.embed(pixels)

        def through(x: torch.Tensor) -> torch.Tensor:
            for block in tower.layers[:-1]:
                x, _ = block(x)
            return x

        together = through(embedded)
        for index in range(3):
            assert torch.equal(through(embedded[index : index + 1])[0], together[index])
        features, plain = vlm.model.encode(pixels), load_vlm(folder, caching=False).model.encode(pixels)
    assert 1e-5 < float((features - plain).norm() / plain.norm()) < 0.05


def test_which_layers_are_quantised(load_vlm: Callable[..., Any]) -> None:
    """All linear layers of all blocks but the last; patch embedding, last block and connector keep their dtype."""
    model = load_vlm(vision_dtype="int8", caching=False).model
    kept = {name for name, parameter in model.vision.named_parameters() if parameter.numel() > 0}
    linears = {f"{name}.weight" for name in ("qkv", "out", "fc1", "fc2")}
    assert {name for name in kept if name.startswith("layers.0.")}.isdisjoint(f"layers.0.{name}" for name in linears)
    assert {f"layers.1.{name}" for name in linears} <= kept
    assert "patch_embed.weight" in kept and model.connector.proj.weight.numel() > 0


def test_answers_and_explain_say_so(load_vlm: Callable[..., Any]) -> None:
    ask = {"prompt": _QUESTION, "sampling": _GREEDY}
    quantised = load_vlm(vision_dtype="int8", caching=False)
    usage = quantised.describe(_PICTURE, **ask).usage
    assert (usage.weights, usage.vision_weights) == ("float32", "int8")
    assert "int8 tower: " in quantised.explain()
    both = load_vlm(dtype="int8", vision_dtype="int8", caching=False).describe(_PICTURE, **ask).usage
    assert (both.weights, both.vision_weights) == ("int8", "int8")
    plain = load_vlm(dtype="int8", caching=False)
    assert plain.describe(_PICTURE, **ask).usage.vision_weights in ("bfloat16", "float32")
    assert "int8 tower" not in plain.explain()


def test_features_of_one_format_are_not_found_by_the_other(load_vlm: Callable[..., Any], tmp_path: Path) -> None:
    """Through the disk that both share; each finds its own."""
    caching = Caching(folder=tmp_path, features_ram_bytes=0)

    def source(**options: Any) -> tuple[int, int]:
        usage = load_vlm(caching=caching, **options).describe(_PICTURE, _QUESTION, sampling=_GREEDY).usage
        return usage.images_encoded, usage.images_from_disk

    assert source() == (1, 0)
    assert source(vision_dtype="int8") == (1, 0)
    assert source(vision_dtype="int8") == source() == (0, 1)


def test_refused_by_name(load_vlm: Callable[..., Any]) -> None:
    with pytest.raises(DeviceError, match="vision_dtype 'int4' is not supported; use auto"):
        load_vlm(vision_dtype="int4")


def test_runs_where_the_cpu_has_no_int8(load_vlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same codes by float32 products: features agree to rounding, and `explain` says that nothing is gained."""
    fast = load_vlm(vision_dtype="int8", caching=False)
    monkeypatch.setattr("vlmfast_kernels.cpu.w8a8.why_not_w8a8", lambda *_: "this CPU has no AVX512-VNNI")
    slow = load_vlm(vision_dtype="int8", caching=False)
    assert "without gain: chosen" in slow.explain()
    pixels = _tiles(fast, 2)
    with torch.inference_mode():
        one, other = fast.model.encode(pixels), slow.model.encode(pixels)
    assert float((one - other).norm() / one.norm()) < 5e-3  # a code may fall to the other side of a tie
    answer = slow.describe(_PICTURE, _QUESTION, sampling=_GREEDY, vision=Vision(resolution="low"))
    assert answer.usage.vision_weights == "int8"

"""The feature cache: hits are bit for bit what the encoder gives, and keys tell apart all that must be told apart."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import naive_answer, noise
from pictures import data_url, encode
from PIL import Image

from vlmfast import Caching, Sampling
from vlmfast.cache.disk import DiskStore
from vlmfast.cache.key import weights_digest
from vlmfast.cache.pictures import PictureMemory
from vlmfast.image.load import load_image
from vlmfast.metrics import Counters
from vlmfast.types import FeatureSource
from vlmfast.vision import VisionEncoder

PROMPT = "What is in the picture?"
SHORT = Sampling(max_new_tokens=8)
Load = Callable[..., Any]


@pytest.fixture
def load(load_vlm: Load, tmp_path: Path) -> Load:
    """load(checkpoint=None, **caching) -> the tiny model with a feature cache of its own and no prefix cache."""

    def make(checkpoint: Path | None = None, dtype: str = "float32", **options: Any) -> Any:
        caching = Caching(**{"folder": tmp_path / "cache", "prefix_ram_bytes": 0, **options})
        return load_vlm(checkpoint, dtype=dtype, caching=caching)

    return make


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each decoding of an encoded picture."""
    import vlmfast.image.load as module

    seen: list[str] = []
    original = module.decode_bytes

    def counted(data: bytes, name: str, *args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return original(data, name, *args, **kwargs)

    monkeypatch.setattr(module, "decode_bytes", counted)
    return seen


def sources(answer: Any) -> tuple[int, int, int]:
    """Pictures from (encoder, memory, disk)."""
    return answer.usage.images_encoded, answer.usage.images_from_ram, answer.usage.images_from_disk


def _with_changed_tensor(folder: Path, target: Path, part: str) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    name = next(name for name in sorted(tensors) if part in name and name.endswith("weight"))
    tensors[name].view(-1)[0] += 0.5
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_only_the_weights_that_matter_are_in_the_digest(
    checkpoint_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other vision or connector weights are another key; a decoder trained further shares the features."""

    def wanted(name: str) -> bool:
        return "text_model" not in name and "lm_head" not in name

    disk = DiskStore(tmp_path / "features", max_bytes=2**21, counters=Counters(), name="disk")
    folder = checkpoint_of()
    digest = weights_digest(folder, wanted)
    for part, differs in (("vision_model", True), ("connector", True), ("text_model", False)):
        changed = _with_changed_tensor(folder, tmp_path / part, part)
        assert (weights_digest(changed, wanted, disk) != digest) == differs, part
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    assert weights_digest(copied, wanted, disk) == digest

    # A file is read once; a file that was written again is read again.
    import vlmfast.cache.key as module

    with monkeypatch.context() as patch:
        patch.setattr(module, "_tensors_digest", lambda *_: pytest.fail("read again"))
        assert weights_digest(copied, wanted, disk) == digest
    os.utime(copied / "model.safetensors", ns=(1, 1))
    _with_changed_tensor(folder, tmp_path / "again", "connector")
    with (tmp_path / "again" / "model.safetensors").open("rb") as stream:
        (copied / "model.safetensors").write_bytes(stream.read())
    assert weights_digest(copied, wanted, disk) != digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hits_answer_as_the_encoder_does(load: Load, load_vlm: Load, dtype: str) -> None:
    """Exact: without a cache, miss, memory, disk, restarted, and the naive loop; features equal to the last bit."""
    images = [noise(40, 30), noise(90, 60)]
    plain = load_vlm(dtype=dtype, caching=False)
    vlm, restarted = load(dtype=dtype), load(dtype=dtype)
    expected = plain.describe(images, PROMPT, sampling=SHORT)
    runs = {(2, 0, 0): vlm, (0, 2, 0): vlm, (0, 0, 2): restarted}
    for where, model in runs.items():
        answer = model.describe(images, PROMPT, sampling=SHORT)
        assert answer.token_ids == expected.token_ids, where
        assert sources(answer) == where
    assert sources(expected) == (2, 0, 0)
    if dtype == "float32":
        assert expected.token_ids == naive_answer(plain, images, PROMPT, 8)
    for image in map(load_image, images):
        plan = plain._vision.plan(image)
        truth = plain._vision.encode(image, plan).tokens
        for model in (vlm, load(dtype=dtype, features_ram_bytes=0)):
            found = model._vision.features(image, plan)
            assert found.source is not FeatureSource.ENCODER
            assert torch.equal(found.features.tokens, truth) and found.features.tokens.dtype == truth.dtype


def test_off_means_absent(load_vlm: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decodes: list[str]) -> None:
    """No folder, no look-up, no saliency, nothing put off."""
    monkeypatch.setenv("VLMFAST_CACHE_DIR", str(tmp_path / "cache"))
    vlm = load_vlm(caching=False)
    data = encode(Image.fromarray(noise(40, 30)))
    for count in (1, 2):
        assert sources(vlm.describe(data, PROMPT, sampling=SHORT)) == (1, 0, 0)
        assert len(decodes) == count
    image = load_image(data)
    assert vlm._vision.features(image, vlm._vision.plan(image)).features.saliency is None
    assert vlm.counters.snapshot() == {}
    assert not (tmp_path / "cache").exists()


def test_a_known_file_is_not_decoded(load: Load, decodes: list[str], tmp_path: Path) -> None:
    """Neither in this process nor after a restart; by any door that leads to the same bytes."""
    data = encode(Image.fromarray(noise(70, 45)))
    (tmp_path / "a.png").write_bytes(data)
    vlm = load()
    answer = vlm.describe(data, PROMPT, sampling=SHORT)
    assert len(decodes) == 1
    for model in (vlm, load()):
        for source in (data, tmp_path / "a.png", io.BytesIO(data), data_url(data)):
            again = model.describe(source, PROMPT, sampling=SHORT)
            assert again.token_ids == answer.token_ids
            assert again.usage.images_encoded == 0
    assert len(decodes) == 1
    image = load_image(data, known=vlm._pictures)
    assert (image.width, image.height, len(decodes)) == (70, 45, 1)
    assert np.array_equal(image.pixels, noise(70, 45))
    assert np.array_equal(image.pixels, noise(70, 45)) and len(decodes) == 2


def test_a_known_file_whose_features_are_gone_is_decoded(load: Load, decodes: list[str]) -> None:
    data = encode(Image.fromarray(noise(70, 45)))
    first = load().describe(data, PROMPT, sampling=SHORT)
    vlm = load(salt="another tenant")
    again = vlm.describe(data, PROMPT, sampling=SHORT)
    assert sources(again) == (1, 0, 0)
    assert again.token_ids == first.token_ids
    assert len(decodes) == 2


def test_limits_hold_for_known_files(load: Load) -> None:
    """A picture that one process took may be too large for another."""
    from vlmfast import Limits
    from vlmfast.errors import ImageLimitError

    data = encode(Image.fromarray(noise(70, 45)))
    vlm = load()
    vlm.describe(data, PROMPT, sampling=SHORT)
    with pytest.raises(ImageLimitError):
        load_image(data, limits=Limits(max_image_pixels=3000), known=vlm._pictures)


def test_file_options_are_part_of_what_is_known() -> None:
    """Case 2: the same RGBA bytes on two backgrounds."""
    known = PictureMemory(None)
    data = encode(Image.new("RGBA", (8, 8), (10, 20, 30, 0)))
    white, black = (load_image(data, background=colour, known=known) for colour in ((255,) * 3, (0,) * 3))
    again = load_image(data, background=(255,) * 3, known=known)
    assert white.digest == again.digest != black.digest
    assert int(again.pixels.min()) == 255


@pytest.mark.parametrize("change", ["weights", "preprocessing", "dtype", "salt", "group size"])
def test_what_changes_features_changes_the_key(
    load: Load, load_vlm: Load, checkpoint_of: Callable[..., Path], tmp_path: Path, change: str
) -> None:
    image = load_image(noise(40, 30))
    vlm = load()
    plan = vlm._vision.plan(image)
    vlm._vision.features(image, plan)
    folder = checkpoint_of()
    if change == "weights":
        other = load(_with_changed_tensor(folder, tmp_path / "other", "connector"))
    elif change == "preprocessing":
        shutil.copytree(folder, tmp_path / "other")
        for name in ("preprocessor_config.json", "processor_config.json"):
            file = tmp_path / "other" / name
            if file.is_file():
                values = json.loads(file.read_text())
                values.get("image_processor", values)["image_mean"] = [0.5, 0.5, 0.4]
                file.write_text(json.dumps(values))
        other = load(tmp_path / "other")
    elif change == "dtype":
        other = load(dtype="bfloat16")
    elif change == "salt":
        other = load(salt="b")
    else:
        from vlmfast import Batching

        other = load_vlm(
            caching=Caching(folder=tmp_path / "cache", prefix_ram_bytes=0), batching=Batching(max_encode_tiles=1)
        )
    found = other._vision.features(image, other._vision.plan(image))
    assert found.source is FeatureSource.ENCODER
    assert other._vision.key(image, plan) != vlm._vision.key(image, plan)
    if change not in ("salt", "group size"):  # the control: the features do differ
        assert not torch.equal(found.features.tokens, vlm._vision.encode(image, plan).tokens)


def test_wrong_pictures_are_not_reused(load: Load, tmp_path: Path) -> None:
    """Cases 1, 3, 4, 6 and 7: equal bytes in another shape, equal beginnings, a path written anew, palettes."""
    vlm = load()
    raw = np.random.default_rng(0).integers(0, 256, 30 * 150 * 3, dtype=np.uint8)
    late = noise(64, 64).copy()
    late[-1, -1] ^= 255
    indices = Image.new("P", (24, 24))
    indices.putdata([index % 2 for index in range(24 * 24)])
    palettes = []
    for palette in ([255, 0, 0, 0, 255, 0], [0, 0, 255, 255, 255, 0]):
        indices.putpalette(palette)
        palettes.append(encode(indices))
    pictures: list[Any] = [raw.reshape(30, 150, 3), raw.reshape(150, 30, 3), noise(64, 64), late, *palettes]
    for picture in pictures:
        assert sources(vlm.describe(picture, PROMPT, sampling=SHORT)) == (1, 0, 0)
    for picture in pictures:
        assert sources(vlm.describe(picture, PROMPT, sampling=SHORT)) == (0, 1, 0)
    path = tmp_path / "turn.png"
    path.write_bytes(encode(Image.fromarray(noise(50, 50, seed=1))))
    vlm.describe(path, PROMPT, sampling=SHORT)
    stamp = path.stat()
    path.write_bytes(encode(Image.fromarray(noise(50, 50, seed=2))))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert sources(vlm.describe(path, PROMPT, sampling=SHORT)) == (1, 0, 0)


@pytest.mark.parametrize("ram_bytes", [0, 2**20])
def test_the_same_picture_twice_is_encoded_once(
    load: Load, load_vlm: Load, ram_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 10, also where nothing can be kept."""
    vlm = load(features_ram_bytes=ram_bytes, features_disk_bytes=0)
    calls: list[str] = []
    original = VisionEncoder.encode

    def counted(self: VisionEncoder, image: Any, plan: Any, **options: Any) -> Any:
        calls.append(image.digest)
        return original(self, image, plan, **options)

    monkeypatch.setattr(VisionEncoder, "encode", counted)
    picture, other = noise(40, 30), noise(30, 40)
    answer = vlm.describe([picture, other, picture], PROMPT, sampling=SHORT)
    assert len(calls) == 2
    assert sources(answer) == (2, 1, 0)
    plain = load_vlm(caching=False)
    assert answer.token_ids == plain.describe([picture, other, picture], PROMPT, sampling=SHORT).token_ids


def test_a_bad_entry_is_encoded_anew(load: Load, load_vlm: Load, tmp_path: Path) -> None:
    """Case 18."""
    picture = noise(90, 60)
    expected = load_vlm(caching=False).describe(picture, PROMPT, sampling=SHORT)
    vlm = load(features_ram_bytes=0)
    vlm.describe(picture, PROMPT, sampling=SHORT)
    store = vlm._vision._cache._disk
    image = load_image(picture)
    key = b"f" + bytes.fromhex(vlm._vision.key(image, vlm._vision.plan(image)))
    for change in (lambda value: value[:-8], lambda value: value[:200] + bytes(8) + value[208:]):

        def tamper(tables: Any, change: Any = change) -> None:
            tables.txn.put(key, change(bytes(tables.txn.get(key, db=tables.entries))), db=tables.entries)

        store._environment.write(tamper, None)
        answer = vlm.describe(picture, PROMPT, sampling=SHORT)
        assert sources(answer) == (1, 0, 0)
        assert answer.token_ids == expected.token_ids
        assert sources(vlm.describe(picture, PROMPT, sampling=SHORT)) == (0, 0, 1)
    assert vlm.counters["features_disk.dropped"] == 2


def test_a_useless_folder_costs_one_warning(load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    vlm = load(folder=tmp_path / "file" / "cache", features_ram_bytes=0)
    for seed in range(3):
        assert sources(vlm.describe(noise(40, 30, seed), PROMPT, sampling=SHORT)) == (1, 0, 0)
    assert len([record for record in caplog.records if "can not be used" in record.getMessage()]) == 1


def test_a_restarted_process_knows_the_picture(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    """The next process answers the same without the encoder."""
    (tmp_path / "a.png").write_bytes(encode(Image.fromarray(noise(90, 60))))
    code = (
        "import sys, json, vlmfast\n"
        "vlm = vlmfast.VLM.from_pretrained(sys.argv[1], device='cpu', dtype='float32')\n"
        "answer = vlm.describe(sys.argv[2], 'What?', sampling=vlmfast.Sampling(max_new_tokens=8))\n"
        "print(json.dumps([answer.usage.images_encoded, answer.usage.images_from_disk, answer.token_ids]))\n"
    )
    environment = {**os.environ, "VLMFAST_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, str(checkpoint_of()), str(tmp_path / "a.png")]
    first, second = (
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
        for _ in range(2)
    )
    assert first[:2] == [1, 0]
    assert second == [0, 1, first[2]]


def test_saliency_is_stored_beside_the_features(load: Load) -> None:
    image = load_image(noise(90, 60))
    first, second = load(), load()
    plan = first._vision.plan(image)
    encoded, read = first._vision.features(image, plan), second._vision.features(image, plan)
    assert (encoded.source, read.source) == (FeatureSource.ENCODER, FeatureSource.DISK)
    assert encoded.features.saliency is not None and read.features.saliency is not None
    assert torch.equal(encoded.features.saliency, read.features.saliency)


def test_many_requests_and_hardly_any_cache(load: Load, load_vlm: Load) -> None:
    """Case 9: all finish, with the answers of a run without caches."""
    pictures = [noise(40 + seed % 3, 30, seed) for seed in range(12)]
    vlm = load(features_ram_bytes=1, features_disk_bytes=1)
    plain = load_vlm(caching=False)
    rows, expected = (
        [row.token_ids for row in model.caption(pictures, PROMPT, sampling=SHORT)] for model in (vlm, plain)
    )
    assert rows == expected
    vlm._vision._cache.check_integrity()

"""The parts of the feature cache: records, keys, and the two tiers, on made-up features."""

from __future__ import annotations

import dataclasses
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from vlmfast.cache.disk import BadEntryError, DiskStore
from vlmfast.cache.features import FeatureCache
from vlmfast.cache.key import image_key, vision_fingerprint
from vlmfast.cache.record import pack_features, unpack_features
from vlmfast.metrics import Counters
from vlmfast.types import FeatureSource
from vlmfast_models.batch import VisionFeatures
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.geometry import TilePlan

PLAN = TilePlan(
    source=(9, 9), resized=(16, 16), canvas=(16, 16), rows=0, cols=0, tile_size=16, tokens_per_tile=6
)  # [N = 6]


def features(seed: int = 0, dtype: torch.dtype = torch.float32, plan: TilePlan = PLAN) -> VisionFeatures:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(plan.n_tokens, 8, generator=generator).to(dtype)
    return VisionFeatures(tokens=tokens, plan=plan, saliency=torch.rand(plan.n_tokens, generator=generator))


def same(one: VisionFeatures, other: VisionFeatures) -> bool:
    assert one.saliency is not None and other.saliency is not None
    equal = torch.equal(one.tokens, other.tokens) and torch.equal(one.saliency, other.saliency)
    return equal and one.tokens.dtype == other.tokens.dtype and one.plan == other.plan


@pytest.fixture
def disk(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "features", max_bytes=2**21, counters=Counters(), name="disk")


# The record


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scored", [True, False])
def test_a_record_is_the_features(dtype: torch.dtype, scored: bool) -> None:
    before = features(dtype=dtype)
    before = before if scored else dataclasses.replace(before, saliency=None)
    value = bytearray(b"".join(pack_features(before)))
    after = unpack_features(memoryview(value), PLAN)
    value[:] = bytes(len(value))  # the store's memory goes away
    assert torch.equal(after.tokens, before.tokens)
    assert after.tokens.dtype == dtype
    assert (after.saliency is None) == (not scored)
    assert after.saliency is None or torch.equal(after.saliency, before.saliency)  # type: ignore[arg-type]


def test_a_record_of_something_else_is_refused() -> None:
    """Case 18: another version, another plan, another length, a dtype from the future."""
    good = b"".join(pack_features(features()))
    other = dataclasses.replace(PLAN, tokens_per_tile=7)
    for value, plan in (
        (struct.pack("<H", 2) + good[2:], PLAN),
        (good[:2] + bytes([9]) + good[3:], PLAN),
        (good[:-4], PLAN),
        (good + b"x", PLAN),
        (good[:5], PLAN),
        (b"", PLAN),
        (good, other),
    ):
        with pytest.raises(BadEntryError):
            unpack_features(memoryview(value), plan)


# Keys


def test_every_part_of_a_key_counts() -> None:
    preprocess = PreprocessConfig(
        longest_edge=64, tile_size=32, split=True, resample=1, rescale_factor=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    parts: dict[str, Any] = {
        "weights": "w",
        "network": "n",
        "preprocess": preprocess,
        "arithmetic": ("float32", "cpu"),
        "salt": "",
    }
    plan = dataclasses.replace(PLAN, rows=2, cols=3)
    changes: list[dict[str, Any]] = [
        {"weights": "x"},
        {"network": "x"},
        *({"preprocess": dataclasses.replace(preprocess, mean=(0.5, 0.5, value))} for value in (0.4, 0.6)),
        {"preprocess": dataclasses.replace(preprocess, resample=3)},
        {"arithmetic": ("bfloat16", "cpu")},
        {"arithmetic": ("float32cpu",)},
        {"salt": "a"},
        {"weights": "", "network": "wn"},
    ]
    fingerprints = [vision_fingerprint(**parts), *(vision_fingerprint(**{**parts, **change}) for change in changes)]
    keys = [image_key(fingerprint, plan, "d") for fingerprint in fingerprints]
    keys += [
        image_key(fingerprints[0], dataclasses.replace(plan, rows=3, cols=2), "d"),
        image_key(fingerprints[0], dataclasses.replace(plan, source=(8, 9)), "d"),
        image_key(fingerprints[0], plan, "e"),
        image_key(fingerprints[0], plan, "d", merges=(4, 4)),
        image_key(fingerprints[0], plan, "d", merges=(44,)),
    ]
    assert len(set(keys)) == len(keys) == len(changes) + 6
    assert image_key(vision_fingerprint(**parts), plan, "d") == keys[0]


# Tiers


def test_memory_over_disk(disk: DiskStore) -> None:
    counters = Counters()
    cache = FeatureCache(ram_bytes=2**20, disk=disk, counters=counters)
    first, source = cache.get_or_encode("aa", PLAN, features)
    assert source is FeatureSource.ENCODER
    again, source = cache.get_or_encode("aa", PLAN, pytest.fail)
    assert source is FeatureSource.RAM and again is first
    restarted = FeatureCache(ram_bytes=2**20, disk=disk, counters=counters)
    read, source = restarted.get_or_encode("aa", PLAN, pytest.fail)
    assert source is FeatureSource.DISK and same(read, first)
    assert restarted.get_or_encode("aa", PLAN, pytest.fail)[1] is FeatureSource.RAM
    assert counters.snapshot() == {"features.disk_hits": 1, "features.misses": 1, "features.ram_hits": 2}
    totals = disk.totals()
    assert (totals["hits"], totals["misses"]) == (3, 1)


def test_memory_keeps_the_last_used() -> None:
    size = features().tokens.nbytes + features().saliency.nbytes  # type: ignore[union-attr]
    counters = Counters()
    cache = FeatureCache(ram_bytes=2 * size, disk=None, counters=counters)
    for key in ("aa", "bb", "aa", "cc"):
        cache.get_or_encode(key, PLAN, features)
        cache.check_integrity()
    assert counters["features.ram_evictions"] == 1
    assert [cache.get_or_encode(key, PLAN, features)[1].value for key in ("aa", "cc", "bb")] == [
        "ram",
        "ram",
        "encoder",
    ]


def test_features_larger_than_the_memory_are_not_kept() -> None:
    """Case 8; what is there stays."""
    cache = FeatureCache(ram_bytes=features().tokens.nbytes * 2, disk=None, counters=Counters())
    cache.get_or_encode("aa", PLAN, features)
    large = dataclasses.replace(PLAN, tokens_per_tile=60)
    for _ in range(3):
        found, source = cache.get_or_encode("bb", large, lambda: features(plan=large))
        assert source is FeatureSource.ENCODER and same(found, features(plan=large))
    assert cache.get_or_encode("aa", PLAN, pytest.fail)[1] is FeatureSource.RAM
    cache.check_integrity()


def test_a_view_does_not_keep_what_it_was_cut_from() -> None:
    """Guards flat memory: a row of a large batch is kept without the batch."""
    large = torch.randn(1000, 8)
    cut = VisionFeatures(tokens=large[:6], plan=PLAN)
    kept, _ = FeatureCache(ram_bytes=2**20, disk=None, counters=Counters()).get_or_encode("aa", PLAN, lambda: cut)
    assert kept.tokens.untyped_storage().nbytes() == kept.tokens.nbytes


def test_one_thread_encodes_for_all() -> None:
    """Single flight, and the others get the very same features."""
    cache = FeatureCache(ram_bytes=2**20, disk=None, counters=Counters())
    entered, release = threading.Event(), threading.Event()
    calls: list[int] = []
    found: list[VisionFeatures] = []

    def encode_slowly() -> VisionFeatures:
        calls.append(1)
        entered.set()
        assert release.wait(30)
        return features()

    def ask() -> None:
        found.append(cache.get_or_encode("aa", PLAN, encode_slowly)[0])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert entered.wait(30)
    other, source = cache.get_or_encode("bb", PLAN, lambda: features(1))  # another picture does not wait
    assert source is FeatureSource.ENCODER and same(other, features(1))
    release.set()
    for thread in threads:
        thread.join(30)
    assert len(calls) == 1
    assert len(found) == 8 and all(item is found[0] for item in found)
    cache.check_integrity()


def test_when_the_encoder_fails_the_next_one_tries() -> None:
    cache = FeatureCache(ram_bytes=2**20, disk=None, counters=Counters())
    entered, release = threading.Event(), threading.Event()
    outcomes: list[str] = []

    def fail() -> VisionFeatures:
        entered.set()
        assert release.wait(30)
        raise KeyboardInterrupt

    def lead() -> None:
        with pytest.raises(KeyboardInterrupt):
            cache.get_or_encode("aa", PLAN, fail)

    def follow() -> None:
        outcomes.append(cache.get_or_encode("aa", PLAN, features)[1].value)

    leader = threading.Thread(target=lead)
    leader.start()
    assert entered.wait(30)
    follower = threading.Thread(target=follow)
    follower.start()
    time.sleep(0.05)
    release.set()
    leader.join(30)
    follower.join(30)
    assert outcomes == ["encoder"]
    cache.check_integrity()


def test_500_pictures_stay_within_the_limits(tmp_path: Path) -> None:
    """Case 16, on both tiers, with features of 200 KB."""
    plan = dataclasses.replace(PLAN, tokens_per_tile=6250)
    disk = DiskStore(tmp_path / "features", max_bytes=4 * 2**20, counters=Counters(), name="disk")
    cache = FeatureCache(ram_bytes=2**20, disk=disk, counters=Counters())
    for number in range(500):
        found, source = cache.get_or_encode(f"{number:04x}", plan, lambda: features(plan=plan))
        assert source is FeatureSource.ENCODER
    del found
    assert cache.num_ram_bytes <= 2**20
    assert disk.file_bytes <= 4 * 2**20
    assert disk.totals()["entries"] >= 8
    cache.check_integrity()
    disk.check_integrity()

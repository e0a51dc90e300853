"""Merging inside the vision tower, against a tower that is written out patch by patch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmfast.testing import TINY_SHAPES
from vlmfast_models.vit import VisionBlock, VisionTransformer

_SCHEDULES = [(5,), (9, 3), (0, 7), (16, 16, 8)]


@pytest.fixture(scope="module", params=["idefics3", "llava", "llava_onevision"])
def tower(request: pytest.FixtureRequest, load_vlm: Callable[..., Any], checkpoint_of: Callable[..., Path]) -> Any:
    """Without and with a class token; the last state, and hidden states of earlier layers."""
    return load_vlm(checkpoint_of(TINY_SHAPES[request.param]), caching=False).model.vision


def _pixels(tower: Any, tiles: int = 2) -> Tensor:
    side = tower.config.image_size
    return torch.randn(tiles, 3, side, side, generator=torch.Generator().manual_seed(0))


def _schedule(tower: Any, merges: tuple[int, ...]) -> tuple[int, ...]:
    return merges[: tower.config.num_run_layers]


def _block(block: VisionBlock, x: Tensor, groups: list[list[int]], num_merged: int, class_token: bool) -> Any:
    """One block over the tokens x [M, E] of a tile, each standing for a group of patches."""
    heads = block.num_heads
    query, key, value = block.qkv(block.norm1(x)).view(len(x), 3, heads, -1).permute(1, 2, 0, 3)
    copies = [token for token, group in enumerate(groups) for _ in group]
    weights = (query @ key[:, copies].transpose(1, 2) / query.shape[-1] ** 0.5).softmax(-1)
    x = x + block.out((weights @ value[:, copies]).transpose(0, 1).reshape(x.shape))
    metric = torch.nn.functional.normalize(key.mean(0), dim=-1)
    pairs = []
    for even in range(2 if class_token else 0, len(x), 2):
        alike = [float(metric[even] @ metric[odd]) for odd in range(1, len(x), 2)]
        pairs.append((-max(alike), even, 2 * alike.index(max(alike)) + 1))
    into = {even: odd for _, even, odd in sorted(pairs)[:num_merged]}
    rows, left = [], []
    for token in range(len(x)):
        if token in into:
            continue
        members = [token, *(even for even, odd in into.items() if odd == token)]
        total = sum(len(groups[member]) for member in members)
        rows.append(sum(x[member] * len(groups[member]) for member in members) / total)
        left.append(sorted(patch for member in members for patch in groups[member]))
    x = torch.stack(rows)
    return x + block.fc2(block.fc1(block.norm2(x))), left


@torch.inference_mode()
def _written_out(tower: VisionTransformer, pixels: Tensor, merges: tuple[int, ...]) -> Tensor:
    tiles = []
    for embedded in tower.embed(pixels):
        x, groups = embedded, [[patch] for patch in range(len(embedded))]
        states = [x]
        for index, block in enumerate(tower.layers):
            assert isinstance(block, VisionBlock)
            num_merged = merges[index] if index < len(merges) else 0
            x, groups = _block(block, x, groups, num_merged, tower.config.class_token)
            whole = torch.empty(len(embedded), x.shape[1])
            for row, group in zip(x, groups, strict=True):
                whole[group] = row
            states.append(whole)
        if tower.norm is not None:
            tiles.append(tower.norm(states[-1]))
        else:
            wanted = [states[index][int(tower.config.drop_first) :] for index in tower.config.feature_layers]
            tiles.append(torch.cat(wanted, -1))
    return torch.stack(tiles)


@pytest.mark.parametrize("merges", _SCHEDULES, ids=str)
@torch.inference_mode()
def test_the_tower_equals_one_written_out(tower: Any, merges: tuple[int, ...]) -> None:
    """Guards proportional attention, the metric, the weighted mean and the way back to the grid, layer by layer."""
    pixels, merges = _pixels(tower), _schedule(tower, merges)
    features, _ = tower.run(pixels, merges=merges)
    torch.testing.assert_close(features, _written_out(tower, pixels, merges), rtol=1e-4, atol=1e-4)
    plain = tower(pixels)
    assert features.shape == plain.shape
    assert not torch.allclose(features, plain, atol=1e-3) or not any(merges)


@pytest.mark.parametrize("merges", [(), (0,), (0, 0)])
@torch.inference_mode()
def test_nothing_merged_is_the_plain_tower(tower: Any, merges: tuple[int, ...]) -> None:
    """Guards case 46, bit for bit."""
    pixels = _pixels(tower)
    for scored in (False, True):
        one, two = tower.run(pixels, scored=scored), tower.run(pixels, scored=scored, merges=merges)
        assert torch.equal(one[0], two[0])
        assert (one[1] is None) == (two[1] is None) == (not scored)
        assert one[1] is None or torch.equal(one[1], two[1])


@torch.inference_mode()
def test_scores_of_merged_patches_are_shares(tower: Any) -> None:
    """Guards saliency under ToMe: still one a patch, what a token received split among its patches, and features as
    without scores."""
    pixels = _pixels(tower)
    plain = tower.run(pixels, scored=True)[1]
    features, received = tower.run(pixels, scored=True, merges=(8, 4))
    assert received.shape == plain.shape and received.dtype == torch.float32
    whole = 1.0 if not tower.config.drop_first else plain.sum(1)
    torch.testing.assert_close(
        received.sum(1), torch.ones(2) * whole, rtol=0.2 if tower.config.drop_first else 1e-4, atol=0
    )
    assert torch.equal(features, tower.run(pixels, merges=(8, 4))[0])


@torch.inference_mode()
def test_tiles_do_not_mix(tower: Any) -> None:
    """Guards batches of tiles: each is merged by its own matching, as if it were alone."""
    pixels = _pixels(tower, tiles=3)
    together, _ = tower.run(pixels, merges=(8, 4))
    for tile in range(3):
        alone, _ = tower.run(pixels[tile : tile + 1], merges=(8, 4))
        torch.testing.assert_close(together[tile], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("merges", [(), (0, 7), (9, 3), (16, 16, 8)], ids=str)
@torch.inference_mode()
def test_groups_are_those_of_the_run(tower: Any, merges: tuple[int, ...]) -> None:
    """Guards the drawing: patches of a group leave the tower as one row, of two groups as two; as many as are left."""
    pixels, merges = _pixels(tower), _schedule(tower, merges)
    groups = tower.merge_groups(pixels, merges)
    num_patches = tower.config.num_positions - tower.config.class_token
    assert groups.shape == (2, num_patches)
    for tile in range(2):
        assert len(groups[tile].unique()) == num_patches - sum(merges)
    if tower.norm is None:  # features of earlier layers are merged less
        return
    features, _ = tower.run(pixels, merges=merges)
    for tile in range(2):
        rows = [features[tile][groups[tile] == group] for group in groups[tile].unique()]
        assert all(torch.equal(one, one[:1].expand_as(one)) for one in rows)
        assert len(torch.stack([one[0] for one in rows]).unique(dim=0)) == len(rows)

"""Saliency in every family: scored features are the plain ones, and each visual token has the attention it received."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Twin
from oracle import model_of, noise
from torch import Tensor

from vlmfast.image.load import load_image
from vlmfast.image.preprocess import preprocess


@pytest.fixture(params=[(40, 30), (90, 60), (61, 200)], ids=str)
def size(request: pytest.FixtureRequest) -> Any:
    return request.param


def _attention(tower: Any, pixels: Tensor) -> Tensor:
    """float64 [P, Q, N]: attention of the layer before the checkpoint's last, mean over heads, of the scoring rows."""
    x = tower.embed(pixels)
    index = max(tower.config.num_layers - 2, 0)
    for layer in tower.layers[:index]:
        x, _ = layer(x)
    block = tower.layers[index]
    tiles, patches, width = x.shape
    qkv = block.qkv(block.norm1(x)).double().view(tiles, patches, 3, block.num_heads, width // block.num_heads)
    query, key, _ = qkv.unbind(2)  # each [P, N, H, D]
    rows = [0] if tower.config.class_token else tower._scoring_queries(x).tolist()
    assert len(set(rows)) == len(rows)
    if not tower.config.class_token:
        assert min(64, patches) <= len(rows) <= min(127, patches)
    scores = torch.einsum("pqhd,pkhd->phqk", query[:, rows], key) / query.shape[-1] ** 0.5
    return scores.softmax(-1).mean(1)


@torch.inference_mode()
def test_saliency_is_the_attention_received(twin: Twin, size: tuple[int, int]) -> None:
    """Against plain attention in float64, patch by patch; where a token is several patches, it has their sum.

    Line breaks of LLaVA-NeXT receive none. Its pooled grids have pooled scores, which are not checked here.
    """
    vlm = twin.ours
    model = model_of(vlm)
    image = load_image(noise(*size))
    plan = vlm._vision.plan(image)
    found = vlm._vision.encode(image, plan, scored=True)
    assert torch.equal(found.tokens, vlm._vision.encode(image, plan).tokens)
    assert found.saliency is not None
    assert found.saliency.dtype == torch.float32
    assert found.saliency.shape == (plan.n_tokens,)
    assert found.saliency.std() > 0

    received = _attention(model.vision, preprocess(image, plan, vlm.checkpoint.preprocess).pixels).mean(1)
    received = received[:, int(model.config.vision.drop_first) :]  # [P, N]
    scale = model.config.connector.scale_factor
    side = model.config.vision.patches_per_side
    if scale > 1:
        blocks = received.view(len(received), side // scale, scale, side // scale, scale)
        received = blocks.sum((2, 4)).flatten(1)
    if plan.grid is None:
        torch.testing.assert_close(found.saliency.double(), received.flatten(), atol=1e-6, rtol=1e-4)
        return
    frame = received[-1]
    torch.testing.assert_close(found.saliency[: len(frame)].double(), frame, atol=1e-6, rtol=1e-4)
    cols, rows = plan.grid
    lines = found.saliency[len(frame) :].view(rows, cols + 1) if rows else found.saliency[len(frame) :]
    assert (lines[..., -1] == 0).all()
    if plan.kept is None:
        return
    left, top, right, bottom = plan.kept
    if (right - left, bottom - top) == plan.grid:
        tiles = received[:-1].view(plan.rows, plan.cols, side, side).transpose(1, 2)
        grid = tiles.reshape(plan.rows * side, plan.cols * side)[top:bottom, left:right]
        torch.testing.assert_close(lines[:, :-1].double(), grid, atol=1e-6, rtol=1e-4)

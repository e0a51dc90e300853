"""The compiled step by AMX tiles and without them: both are tested where the processor has tiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vlmfast_kernels.cpu.library import instructions, why_not_compiled
from vlmfast_kernels.cpu.packed import PackedWeight

_REASON = why_not_compiled(torch.device("cpu"), torch.bfloat16)
needs_step = pytest.mark.skipif(bool(_REASON), reason=_REASON or "compiled here")
needs_tiles = pytest.mark.skipif(
    bool(_REASON) or not torch.cpu._init_amx(), reason=_REASON or "no AMX here, or no leave to use it"
)


@needs_tiles
def test_tiles_are_used_where_there_are_any() -> None:
    """Guards speed: a processor with AMX is noticed."""
    assert instructions() == ("AVX-512" if os.environ.get("VLMFAST_TILES") == "0" else "AMX tiles")


@needs_tiles
@pytest.mark.skipif(os.environ.get("VLMFAST_TILES") == "0", reason="this is the run without")
def test_all_of_it_holds_without_tiles_too() -> None:
    """Guards processors with AVX-512 alone: the tests of the step and of its products pass with tiles switched off."""
    here = Path(__file__).parent
    files = [str(here / name) for name in ("test_tiles.py", "test_step.py", "test_packed.py")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
        env=os.environ | {"VLMFAST_TILES": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]


@needs_step
@pytest.mark.parametrize("scale", [1.0, 1e-18, 3e-20, 1e18])
def test_few_rows_give_the_numbers_of_many(scale: float) -> None:
    """Guards the order of the sums, and numbers near the ends of the range: 1 to 40 rows, bit for bit."""
    generator = torch.Generator().manual_seed(2)
    weight = (torch.randn(100, 330, generator=generator) * scale).bfloat16()
    rows = (torch.randn(40, 330, generator=generator) * scale).bfloat16()
    layer = PackedWeight(weight, None)
    whole = layer.apply(rows)
    exact = rows.double() @ weight.double().T
    assert float((whole - exact).norm()) <= 1e-5 * float(exact.norm()) + 1e-38 * whole.numel()
    for count in (1, 2, 3, 5, 15, 16, 17, 31):
        for start in range(0, 40 - count, 7):
            assert torch.equal(layer.apply(rows[start : start + count]), whole[start : start + count]), count

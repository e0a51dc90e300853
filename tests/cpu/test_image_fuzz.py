"""Damaged files of every format: a few hundred of the 10,000 that `python tests/fuzz_images.py` runs."""

from __future__ import annotations

import pytest
from fuzz_images import LIMITS, mutated, peak_bytes, run
from pictures import samples

from vlmfast import Limits, load_image
from vlmfast.options import IMAGE_FORMATS


def test_every_format_has_a_sample_that_loads() -> None:
    """Guards the fuzzing itself: what does not load whole tests nothing."""
    assert {name.split()[0] for name in samples()} == {*IMAGE_FORMATS} - {"HEIF"}  # needs a package that is optional
    for name, data in samples().items():
        image = load_image(data, limits=Limits(formats=(name.split()[0],)))
        assert image.pixels.std() > 1, name


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_give_a_picture_or_an_error_of_ours(truncated: bool) -> None:
    """Guards against crashes, hangs, foreign exceptions and memory. Seeds are fixed: no false alarm but by memory,
    which other tests of the same process may only lower (the peak is the process's)."""
    run(range(20), LIMITS)
    before = peak_bytes()
    limits = Limits(**{**{name: getattr(LIMITS, name) for name in LIMITS.__slots__}, "allow_truncated": truncated})
    report = run(range(1000, 1400), limits)
    assert not report.failures
    assert peak_bytes() - before < 200 * 2**20
    outcomes = {outcome.rpartition(" ")[2] for outcome in report.outcomes}
    assert outcomes == {"picture", "refused", "damaged"}


def test_mutations_are_repeatable() -> None:
    assert mutated(7) == mutated(7)
    assert len({mutated(seed) for seed in range(50)}) == 50

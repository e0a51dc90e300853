"""The photographs in assets/: each loads, is small, and says who made it under which free licence."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmfast import load_image

PHOTOS = Path(__file__).resolve().parents[2] / "assets" / "photos"
FREE = ("public domain", "CC0", "CC BY ")


def _attributions() -> dict[str, list[str]]:
    """Rows of the table in ATTRIBUTION.md by file name: what, author, source, licence."""
    rows: dict[str, list[str]] = {}
    for line in (PHOTOS / "ATTRIBUTION.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            rows[cells[0].strip("`")] = cells[1:]
    return rows


FILES = sorted(path.name for path in PHOTOS.iterdir() if path.suffix != ".md")


def test_enough_photographs_and_no_stray_attribution() -> None:
    assert len(FILES) >= 6
    assert sorted(_attributions()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_photograph_loads_and_is_attributed(name: str) -> None:
    image = load_image(PHOTOS / name)
    assert min(image.width, image.height) >= 200 and max(image.width, image.height) <= 1024
    assert image.pixels.std() > 10, "not a flat picture"
    assert (PHOTOS / name).stat().st_size < 300_000
    _, author, source, licence = _attributions()[name]
    assert author and source
    assert licence.startswith(FREE)

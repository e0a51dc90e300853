"""Properties of tile plans that hold for every size; exact grids are compared with transformers in tests/parity."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vlmfast_models.config import PreprocessConfig
from vlmfast_models.errors import GeometryError
from vlmfast_models.families.idefics3 import Idefics3
from vlmfast_models.geometry import TilePlan, idefics3_plan

_SIDES = st.integers(1, 20_000)


def _config(longest: int = 2048, tile: int = 512, split: bool = True) -> PreprocessConfig:
    return PreprocessConfig.from_hf(
        {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}, "do_image_splitting": split}
    )


_CONFIGS = st.builds(
    _config, longest=st.integers(16, 4096), tile=st.sampled_from([32, 50, 364, 384, 512]), split=st.booleans()
)


@given(width=_SIDES, height=_SIDES, config=_CONFIGS, tokens=st.integers(1, 200))
def test_plans_hold_what_they_promise(width: int, height: int, config: PreprocessConfig, tokens: int) -> None:
    """Guards the one count of visual tokens, whole tiles, and the bound that the longest edge sets."""
    plan = idefics3_plan(width, height, config, tokens)
    tile = config.tile_size
    assert plan.source == (width, height)
    assert plan.n_tokens == plan.num_tiles * tokens
    assert plan.num_tiles == plan.rows * plan.cols + 1
    assert min(*plan.resized, *plan.canvas) >= 1
    assert plan.canvas[0] % tile == plan.canvas[1] % tile == 0
    longest = max(plan.resized)
    assert config.longest_edge <= longest <= config.longest_edge + config.longest_edge % 2  # the other side is even
    if plan.rows == 0:
        assert plan.cols == 0 and plan.canvas == (tile, tile)
    else:
        assert config.split and plan.canvas == (plan.cols * tile, plan.rows * tile)
        assert plan.num_tiles >= 3
    most = math.ceil(longest / tile)
    assert max(plan.rows, plan.cols) <= most
    if not config.split:
        assert plan.num_tiles == 1


@given(width=_SIDES, height=_SIDES, config=_CONFIGS)
def test_turning_a_picture_turns_its_plan(width: int, height: int, config: PreprocessConfig) -> None:
    """Guards portrait and landscape being treated alike, up to the pixel that float rounding costs."""
    plan, turned = (idefics3_plan(*size, config, 1) for size in ((width, height), (height, width)))
    for one, two in zip(plan.resized, turned.resized[::-1], strict=True):
        assert abs(one - two) <= 2
    assert abs(plan.rows - turned.cols) <= 1 and abs(plan.cols - turned.rows) <= 1


@given(height=st.integers(1, 4000), widths=st.tuples(st.integers(1, 4000), st.integers(1, 4000)), config=_CONFIGS)
def test_wider_pictures_have_no_more_rows_and_no_fewer_columns(
    height: int, widths: tuple[int, int], config: PreprocessConfig
) -> None:
    """Guards monotony in the aspect ratio, wherever rounding to even sides leaves room for it."""
    narrow, wide = sorted(widths)
    assume(wide >= narrow * 1.1 + 4)
    one, two = (idefics3_plan(width, height, config, 1) for width in (narrow, wide))
    rows = [plan.canvas[1] for plan in (one, two)]
    cols = [plan.canvas[0] for plan in (one, two)]
    assert rows[1] <= rows[0] and cols[1] >= cols[0]


@pytest.mark.parametrize(("width", "height"), [(0, 1), (1, 0), (-1, 5), (0, 0)])
def test_sides_below_one_are_refused(width: int, height: int) -> None:
    """Guards sizes that no picture has."""
    with pytest.raises(GeometryError, match=f"{width}x{height}"):
        idefics3_plan(width, height, _config(), 64)


@pytest.mark.parametrize(
    ("size", "rows", "cols"),
    [((512, 512), 4, 4), ((2048, 1536), 3, 4), ((100, 100), 4, 4), ((3000, 1), 1, 4), ((1, 3000), 4, 1)],
)
def test_known_grids_of_smolvlm(size: tuple[int, int], rows: int, cols: int) -> None:
    """Guards the default of SmolVLM: 2048 pixels, tiles of 512, small pictures scaled up."""
    plan = idefics3_plan(*size, _config(), 64)
    assert (plan.rows, plan.cols, plan.n_tokens) == (rows, cols, (rows * cols + 1) * 64)


@given(rows=st.integers(0, 6), cols=st.integers(0, 6), tokens=st.integers(1, 9))
def test_placeholder_counts_agree_with_the_plan(rows: int, cols: int, tokens: int) -> None:
    """Guards one function per decision: the prompt's text has the plan's tokens, marks and rows."""
    assume((rows == 0) == (cols == 0))
    plan = TilePlan(
        source=(1, 1), resized=(1, 1), canvas=(1, 1), rows=rows, cols=cols, tile_size=1, tokens_per_tile=tokens
    )
    text = Idefics3.placeholder(plan)
    assert text.count("<image>") == plan.n_tokens
    assert text.count("<fake_token_around_image>") == plan.num_tiles + 1
    assert text.count("<global-img>") == 1
    assert text.count("\n") == (rows + 1 if rows else 0)
    places = [f"<row_{row}_col_{col}>" for row in range(1, rows + 1) for col in range(1, cols + 1)]
    assert [text.index(place) for place in places] == sorted(text.index(place) for place in places)

"""The pictures of a recipe, drawn into the work folder when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vlmfast.train import shape
from vlmfast.train.frames import Frames, open_frames
from vlmfast.train.recipe import Portion, Recipe, Workplace
from vlmfast.train.scenes import CROWDED, LARGE_PRINT, PAGES, POCKET, Split, Style
from vlmfast.train.sources import EasySource, SceneSource, Source
from vlmfast_models.config import PreprocessConfig

_SCENES = replace(POCKET, page_share=0.0, sign_share=0.4)
"""The scored scenes without pages, which are a lesson of their own, and with more signs, which are learnt slowly."""


class Pictures:
    """The pictures of a recipe as frames."""

    def __init__(self, recipe: Recipe, place: Workplace) -> None:
        self.recipe, self.place = recipe, place
        self.preprocessing = PreprocessConfig.from_hf(shape.preprocessor_config(shape.POCKET_SIZE))

    def draw(self) -> None:
        """Draws all of them."""
        for frames in (self.crowded, self.held_out_crowded, self.held_out):
            frames()
        self.lessons()

    def crowded(self) -> Frames:
        count = self.recipe.num_dense_frames
        return self._open("crowded", SceneSource(split=Split.TRAIN, seed=1, count=count, style=CROWDED, step=2))

    def held_out_crowded(self) -> Frames:
        count = self.recipe.num_held_out_frames
        source = SceneSource(split=Split.HELD_OUT, seed=1, count=count, style=CROWDED, step=2)
        return self._open("held-out-crowded", source)

    def held_out(self) -> Frames:
        count = self.recipe.num_held_out_frames
        return self._open("held-out-pocket", SceneSource(split=Split.HELD_OUT, seed=2, count=count, style=POCKET))

    def lessons(self) -> list[tuple[Portion, Frames]]:
        """Every kind that has a share in the lessons."""
        recipe = self.recipe
        kinds: dict[str, tuple[Portion, Callable[[int], Source]]] = {
            "scenes": (recipe.scenes, lambda count: _scenes(2, count, _SCENES)),
            "pages": (recipe.pages, lambda count: _scenes(3, count, PAGES)),
            "large-print": (recipe.large_print, lambda count: _scenes(4, count, LARGE_PRINT)),
            "easy": (recipe.easy, lambda count: EasySource(split=Split.TRAIN, count=count)),
        }
        return [
            (portion, self._open(name, source(portion.count)))
            for name, (portion, source) in kinds.items()
            if portion.share > 0
        ]

    def _open(self, name: str, source: Source) -> Frames:
        folder = self.place.folder / "frames" / name
        return open_frames(folder, source, self.preprocessing, shape.PATCH_SIZE, workers=self.place.num_workers)


def _scenes(seed: int, count: int, style: Style) -> SceneSource:
    return SceneSource(split=Split.TRAIN, seed=seed, count=count, style=style)

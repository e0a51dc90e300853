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

_SCENES = replace(POCKET, page_share=0.0, sign_share=0.45, repeat_share=0.3)
"""The scored scenes without pages, which are a lesson of their own, and with more of what is learnt slowly: signs, and
things that occur more than once."""


class Pictures:
    """The pictures of a recipe as frames."""

    def __init__(self, recipe: Recipe, place: Workplace) -> None:
        self.recipe, self.place = recipe, place
        self.preprocessing = PreprocessConfig.from_hf(shape.preprocessor_config(shape.POCKET_SIZE))

    def draw(self) -> None:
        """Draws all of them."""
        if self.recipe.dense is not None:
            self.crowded()
            self.held_out_crowded()
        self.held_out()
        self.lessons()

    def crowded(self) -> Frames:
        count = self.recipe.crowded.count
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
        kinds: list[tuple[Portion, Callable[[], Frames]]] = [
            (recipe.crowded, self.crowded),
            (recipe.scenes, lambda: self._scenes("scenes", 2, recipe.scenes.count, _SCENES)),
            (recipe.pages, lambda: self._scenes("pages", 3, recipe.pages.count, PAGES)),
            (recipe.large_print, lambda: self._scenes("large-print", 4, recipe.large_print.count, LARGE_PRINT)),
            (recipe.easy, lambda: self._open("easy", EasySource(split=Split.TRAIN, count=recipe.easy.count))),
        ]
        return [(portion, frames()) for portion, frames in kinds if portion.share > 0]

    def _scenes(self, name: str, seed: int, count: int, style: Style) -> Frames:
        return self._open(name, SceneSource(split=Split.TRAIN, seed=seed, count=count, style=style))

    def _open(self, name: str, source: Source) -> Frames:
        folder = self.place.folder / "frames" / name
        return open_frames(folder, source, self.preprocessing, shape.PATCH_SIZE, workers=self.place.num_workers)

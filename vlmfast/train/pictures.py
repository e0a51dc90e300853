"""The pictures of a recipe, drawn into the work folder when first asked for."""

from __future__ import annotations

from dataclasses import replace

from vlmfast.train import shape
from vlmfast.train.dense import DensePart
from vlmfast.train.frames import Frames, open_frames
from vlmfast.train.recipe import Portion, Recipe, Workplace
from vlmfast.train.scenes import CROWDED, LARGE_PRINT, PAGES, POCKET, Split
from vlmfast.train.sources import EasySource, SceneSource, Source
from vlmfast_models.config import PreprocessConfig

_SCENES = replace(POCKET, page_share=0.0, sign_share=0.45, repeat_share=0.3)
"""The scored scenes without pages, which are a lesson of their own, and with more of what is learnt slowly: signs, and
things that occur more than once."""


_STYLES = {
    "crowded": (1, CROWDED, 2),
    "scenes": (2, _SCENES, 1),
    "pages": (3, PAGES, 1),
    "large-print": (4, LARGE_PRINT, 1),
}
"""Of each kind of scenes its seed, its style, and the step from one to the next: 2 leaves every second twin out."""


class Pictures:
    """The pictures of a recipe as frames."""

    def __init__(self, recipe: Recipe, place: Workplace) -> None:
        self.recipe, self.place = recipe, place
        self.preprocessing = PreprocessConfig.from_hf(shape.preprocessor_config(shape.POCKET_SIZE))

    def draw(self) -> None:
        """Draws all of them."""
        if self.recipe.dense is not None:
            self.dense_parts()
            self.held_out_crowded()
        self.held_out()
        self.lessons()

    def dense_parts(self) -> list[DensePart]:
        """What dense pretraining looks at."""
        parts = []
        for name, portion in self._portions.items():
            if portion.dense_share > 0:
                make = DensePart.whole if name == "crowded" else DensePart.lettered
                parts.append(make(self._frames(name), portion.dense_share))
        return [part for part in parts if len(part.numbers)]

    def held_out_crowded(self) -> Frames:
        count = self.recipe.num_held_out_frames
        source = SceneSource(split=Split.HELD_OUT, seed=1, count=count, style=CROWDED, step=2)
        return self._open("held-out-crowded", source)

    def held_out(self) -> Frames:
        count = self.recipe.num_held_out_frames
        return self._open("held-out-pocket", SceneSource(split=Split.HELD_OUT, seed=2, count=count, style=POCKET))

    def lessons(self) -> list[tuple[Portion, Frames]]:
        """Every kind that has a share in the lessons."""
        return [(portion, self._frames(name)) for name, portion in self._portions.items() if portion.share > 0]

    @property
    def _portions(self) -> dict[str, Portion]:
        recipe = self.recipe
        return {
            "crowded": recipe.crowded,
            "scenes": recipe.scenes,
            "pages": recipe.pages,
            "large-print": recipe.large_print,
            "easy": recipe.easy,
        }

    def _frames(self, name: str) -> Frames:
        count = self._portions[name].count
        if name == "easy":
            return self._open(name, EasySource(split=Split.TRAIN, count=count))
        seed, style, step = _STYLES[name]
        return self._open(name, SceneSource(split=Split.TRAIN, seed=seed, count=count, style=style, step=step))

    def _open(self, name: str, source: Source) -> Frames:
        folder = self.place.folder / "frames" / name
        return open_frames(folder, source, self.preprocessing, shape.PATCH_SIZE, workers=self.place.num_workers)

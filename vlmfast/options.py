"""Every option with its default, as frozen values that check themselves. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields
from enum import StrEnum
from itertools import pairwise
from numbers import Integral, Real
from typing import Literal, TypeAlias

from vlmfast.checks import plain, require, require_counts, require_kind, settle


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen and when to stop.

    Raises:
        OptionError: a value is out of its range.
    """

    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token (greedy); larger values draw from a flatter distribution."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens whose probabilities reach this sum; 1 is off."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides the positive, multiplies the negative scores of tokens seen before, prompt included; 1 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the text itself is not returned."""
    seed: int | None = None
    """Makes drawing repeatable; without it every run draws differently."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            require_kind(Iterable, "stop", self.stop, "a text or several")
            object.__setattr__(self, "stop", tuple(self.stop))
        require_counts(self, "max_new_tokens")
        for name in ("top_k", *(("seed",) if self.seed is not None else ())):
            require_kind(Integral, name, getattr(self, name), "a whole number")
        for name in ("temperature", "top_p", "repetition_penalty"):
            require_kind(Real, name, getattr(self, name), "a number")
        require(0.0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 or a positive number")
        require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        penalty = self.repetition_penalty
        require(1e-3 <= penalty <= 1e3, "repetition_penalty", penalty, "between 0.001 and 1000")
        require(
            all(isinstance(text, str) and text for text in self.stop), "stop", self.stop, "texts that are not empty"
        )
        require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2**63 - 1")
        settle(self, int, "top_k", "seed")
        settle(self, float, "temperature", "top_p", "repetition_penalty")


IMAGE_FORMATS = (
    "JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "AVIF", "HEIF", "TIFF", "JPEG2000",
    "ICO", "PSD", "QOI", "DDS", "SGI", "PCX", "TGA",
)  # fmt: skip
"""Every file format that may be read, by Pillow's names, the common ones first. Not among them: EPS, which starts
another program, and those whose header does not tell the size of what is inside (ICNS)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a single request may cost and from where pictures may come. Sizes are checked before decoding.

    Raises:
        OptionError: a limit is below 1, a switch is no truth value, or a format is not one of `IMAGE_FORMATS`.
    """

    max_image_pixels: int = 178_956_970
    """Width times height of one picture (Pillow's own error threshold). One whose file is far too small for its
    size, as only blank pictures and decompression bombs are, may have half as many."""
    max_image_bytes: int = 256 * 2**20
    """Encoded size of one picture."""
    max_images: int = 64
    """Pictures in one request."""
    max_decoded_bytes: int = 2 * 2**30
    """All pictures of one request, decoded: 3 bytes a pixel."""
    formats: tuple[str, ...] = IMAGE_FORMATS
    """File formats to read, some of `IMAGE_FORMATS`. HEIF needs the package pillow-heif."""
    allow_truncated: bool = False
    """Take what can be decoded of a file that is cut short, instead of refusing it."""
    allow_paths: bool = True
    """Read files named by a path or a file:// URL."""
    allow_urls: bool = True
    """Fetch http:// and https:// URLs, from public addresses only."""
    fetch_timeout_s: float = 30.0
    """Longest time a URL may take, redirects included."""

    def __post_init__(self) -> None:
        require_counts(self, "max_image_pixels", "max_image_bytes", "max_images", "max_decoded_bytes")
        for name in ("allow_truncated", "allow_paths", "allow_urls"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        require_kind(Real, "fetch_timeout_s", self.fetch_timeout_s, "a number of seconds")
        require(0 < self.fetch_timeout_s < float("inf"), "fetch_timeout_s", self.fetch_timeout_s, "above 0")
        require(
            isinstance(self.formats, (tuple, list)) and len(self.formats) > 0, "formats", self.formats, "some formats"
        )
        for name in self.formats:
            require(name in IMAGE_FORMATS, "each of formats", name, f"one of {', '.join(IMAGE_FORMATS)}")
        object.__setattr__(self, "formats", tuple(self.formats))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How much one engine step takes on.

    Raises:
        OptionError: a value is below 1.
    """

    max_sequences: int = 8
    """Sequences computed at the same time; the others wait."""
    max_step_tokens: int = 4096
    """Tokens in one decoder pass; longer prompts are computed in chunks."""
    max_encode_tiles: int = 4
    """Tiles in one pass of the vision tower; bounds its memory."""

    def __post_init__(self) -> None:
        require_counts(self, "max_sequences", "max_step_tokens", "max_encode_tiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caching:
    """What is kept of earlier work. A cache never changes an answer, it only makes it come sooner.

    Every size is a limit, not a reservation; 0 switches that cache off.

    Raises:
        OptionError: a size is negative or no whole number, or the salt is no text.
    """

    features_ram_bytes: int = 256 * 2**20
    """Encoded pictures kept in memory."""
    features_disk_bytes: int = 2 * 2**30
    """Encoded pictures kept on disk, for the next process too."""
    prefix_ram_bytes: int = 512 * 2**20
    """Keys and values of prompts kept in memory."""
    prefix_disk: bool = False
    """Also keep the keys and values of whole picture prefixes on disk."""
    prefix_disk_bytes: int = 2 * 2**30
    """Keys and values kept on disk, with `prefix_disk`."""
    weights_disk_bytes: int = 8 * 2**30
    """Quantised weights kept on disk, so that they are quantised once."""
    folder: str | os.PathLike[str] | None = None
    """Where the disk caches live; processes may share it. None: VLMFAST_CACHE_DIR, else the user's cache directory."""
    salt: str = ""
    """Work done under one salt is never found under another: one salt for each tenant."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name.endswith("_bytes")):
            require_kind(Integral, name, getattr(self, name), "a whole number of bytes")
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 (off) or more bytes")
            settle(self, int, name)
        require(isinstance(self.prefix_disk, bool), "prefix_disk", self.prefix_disk, "True or False")
        require(isinstance(self.salt, str), "salt", self.salt, "a text")
        if self.folder is not None:
            require_kind((str, os.PathLike), "folder", self.folder, "a path")
            path = os.fspath(self.folder)
            require(isinstance(path, str) and path != "" and "\0" not in path, "folder", self.folder, "a path")

    @classmethod
    def off(cls) -> Caching:
        """Nothing is kept."""
        return cls(**{size.name: 0 for size in fields(cls) if size.name.endswith("_bytes")})  # type: ignore[arg-type]


class Overflow(StrEnum):
    """What a chat does when it no longer fits the model's context."""

    ERROR = "error"
    """Refuses the question and stays as it is."""
    DROP = "drop"
    """Drops whole turns, the oldest without pictures first, until the question and an answer fit."""

    @classmethod
    def of(cls, value: Overflow | str) -> Overflow:
        """The option by name.

        Raises:
            OptionError: there is none of this name.
        """
        require(value in {one.value for one in cls}, "overflow", value, f"one of {', '.join(cls)}")
        return cls(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How closely `vlmfast verify` compares with transformers.

    Raises:
        OptionError: a value is out of its range.
    """

    max_new_tokens: int = 64
    """Greedy tokens to compare."""
    tolerance: float | None = None
    """Largest difference of an activation from transformers', relative to the RMS of its row (one token, one patch).
    The default depends on the dtype: 0.001 in float32, 0.5 in bfloat16, 0.1 in float16."""
    grey_levels: float = 1.0
    """Largest difference of a pixel, in grey levels of 255."""

    def __post_init__(self) -> None:
        require_counts(self, "max_new_tokens")
        for name in ("grey_levels", *(("tolerance",) if self.tolerance is not None else ())):
            value = getattr(self, name)
            require_kind(Real, name, value, "a number")
            require(0.0 <= value < float("inf"), name, value, "0 or a positive number")

    def tolerance_in(self, dtype: str) -> float:
        """The tolerance of a run in "float32", "bfloat16" or "float16"."""
        return _TOLERANCES[dtype] if self.tolerance is None else self.tolerance


_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Rounding leaves up to 2e-5 in float32; in bfloat16 0.1 on the bundled model, 0.26 on random weights of wide range."""


Keep: TypeAlias = float | int
"""How many visual tokens to keep: a share above 0 and up to 1 (all), or a number from 2 on."""


def _require_keep(name: str, keep: Keep) -> None:
    rule = "a share above 0 and up to 1, or a whole number of tokens from 2 on"
    require_kind(Real, name, keep, rule)
    require(0 < keep <= 1 or (isinstance(keep, Integral) and keep >= 2), name, keep, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class FastV:
    """Drops visual tokens inside the decoder that the question hardly looks at. Lossy.

    The tokens of all pictures of a turn are ranked together, by the attention that the turn's last prompt token pays
    them one layer before; those kept stay at their positions (Chen et al., arXiv 2403.06764).

    Raises:
        OptionError: a value is out of its range.
    """

    layer: int = 2
    """The first layer, counted from 0, that runs on fewer tokens. The number of layers drops nothing."""
    keep: Keep = 0.5
    """What is kept: a share of a turn's visual tokens above 0 and up to 1 (all), or a number of them from 2 on."""
    then: tuple[tuple[int, Keep], ...] = ()
    """Further steps, each (layer, keep): at later layers, with fewer of the turn's tokens."""
    rank: Literal["attention", "random"] = "attention"
    """What decides. "random" is the control that a ranking must beat."""

    def __post_init__(self) -> None:
        require(isinstance(self.then, (tuple, list)), "then", self.then, "pairs of (layer, keep)")
        for one in self.then:
            require(isinstance(one, (tuple, list)) and len(one) == 2, "each of then", one, "a pair (layer, keep)")
        object.__setattr__(self, "then", tuple((layer, keep) for layer, keep in self.then))
        for layer, keep in self.steps:
            require_kind(Integral, "layer", layer, "a whole number")
            require(layer >= 1, "layer", layer, "at least 1: the layer before it ranks the tokens")
            _require_keep("keep", keep)
        layers = [layer for layer, _ in self.steps]
        require(layers == sorted(set(layers)), "then", self.then, f"at layers above {self.layer}, in rising order")
        for (_, more), (_, fewer) in pairwise(self.steps):
            like = (more <= 1) == (fewer <= 1)
            require(not like or fewer <= more, "then", self.then, "of keeps that do not grow")
        require(self.rank in ("attention", "random"), "rank", self.rank, "'attention' or 'random'")
        settle(self, plain, "layer", "keep", "then")

    @property
    def steps(self) -> tuple[tuple[int, Keep], ...]:
        """Every (layer, keep), the first one included."""
        return ((self.layer, self.keep), *self.then)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToMe:
    """Merges similar patches inside the vision tower, which then computes fewer. Lossy.

    The connector needs the whole grid, so its rows are written out again before it: the tower gets faster, the prompt
    does not get shorter (Bolya et al., arXiv 2210.09461).

    Raises:
        OptionError: a value is out of its range.
    """

    r: int | float | tuple[int | float, ...] = 0.08
    """Patches merged in every layer: a number, or a share up to 0.5 of those that are left. Several: layer by layer,
    none in the layers after. A layer merges at most half of its patches: more is refused in the first layer, and
    cut to half in those after it."""

    def __post_init__(self) -> None:
        values = self.r if isinstance(self.r, (tuple, list)) else (self.r,)
        rule = "a whole number from 0 on or a share up to 0.5, or a tuple of these"
        for value in values:
            require_kind(Real, "r", value, rule)
            require(0 <= value <= 0.5 or (isinstance(value, Integral) and value > 0), "r", value, rule)
        object.__setattr__(self, "r", plain(tuple(self.r) if isinstance(self.r, list) else self.r))


REDUCERS = ("saliency", "diversity", "scope", "merge", "pool", "random")
"""Ways to make fewer visual tokens of a picture before the decoder sees them; see `vlmfast.prune.reducers`."""


_FLOOR = 0.25


@dataclass(frozen=True, slots=True)
class Reduce:
    """Cuts a picture's visual tokens before the decoder sees them, the same ones whatever is asked. Lossy.

    Those that are left keep their positions, so the model still knows where in the picture they lie.

    Raises:
        OptionError: no such method, or a value out of its range.
    """

    method: str
    """saliency: what the tower looks at, the rest merged into a few (VisionZip); diversity: tokens far from each other
    (DivPrune); scope: tokens that stand for many others and are looked at (SCOPE); merge: similar ones merged (ToMe);
    pool: means over squares of the grid; random: the control that a method must beat."""
    _: KW_ONLY
    keep: Keep | Literal["auto"] = 0.25
    """What is kept of a picture: a share above 0 and up to 1 (all), a number of tokens from 2 on, at least one for each
    of its frames; or "auto": as many as it takes until each token left out is much like one that is kept."""
    floor: float = _FLOOR
    """The smallest share that keep="auto" keeps; refused with another `keep`, as it would be without effect."""
    seed: int = 0
    """Of "random"; refused with another method."""

    def __post_init__(self) -> None:
        require(self.method in REDUCERS, "method", self.method, f"one of {', '.join(REDUCERS)}")
        if isinstance(self.keep, str):
            require(self.keep == "auto", "keep", self.keep, "a share, a number of tokens, or 'auto'")
            require(self.method != "pool", "keep", self.keep, "a share or a number with 'pool', which has no ranking")
        else:
            _require_keep("keep", self.keep)
        require_kind(Real, "floor", self.floor, "a share")
        require(0 < self.floor <= 1, "floor", self.floor, "above 0 and at most 1")
        require_kind(Integral, "seed", self.seed, "a whole number")
        require(0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2**63 - 1")
        require(
            self.floor == _FLOOR or isinstance(self.keep, str), "floor", self.floor, "left out unless keep is 'auto'"
        )
        require(self.seed == 0 or self.method == "random", "seed", self.seed, "left out unless the method is 'random'")
        settle(self, plain, "keep", "floor", "seed")


Resolution: TypeAlias = Literal["low", "high", "auto"] | int
_RESOLUTION_RULE = "'low', 'high', 'auto' or a number of tiles from 1 on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """How many visual tokens are computed on. Every part is lossy, and off unless it is given."""

    resolution: Resolution = "high"
    """Size at which pictures are seen. "high": the checkpoint's own; "low": its lowest; "auto": the lowest at which a
    picture loses little detail, so text keeps its tiles; a number: at most so many tiles, the global frame included."""
    max_pixels: int | None = None
    """Most pixels, width times height, at which a picture is cut into tiles; none by default."""
    tome: ToMe | None = None
    """Merging inside the vision tower."""
    reduce: Reduce | None = None
    """Fewer tokens of each picture, before the decoder."""
    fastv: FastV | None = None
    """Fewer tokens of each question, inside the decoder."""

    def __post_init__(self) -> None:
        for name, kind in (("tome", ToMe), ("reduce", Reduce), ("fastv", FastV)):
            value = getattr(self, name)
            require(value is None or isinstance(value, kind), name, value, f"a {kind.__name__} or None")
        if isinstance(self.resolution, str):
            require(self.resolution in ("low", "high", "auto"), "resolution", self.resolution, _RESOLUTION_RULE)
        else:
            require_kind(Integral, "resolution", self.resolution, _RESOLUTION_RULE)
            require(self.resolution > 0, "resolution", self.resolution, _RESOLUTION_RULE)
            settle(self, int, "resolution")
        if self.max_pixels is not None:
            require_counts(self, "max_pixels")

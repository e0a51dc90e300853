"""One loader for every kind of picture a caller may hold. There is one decoder (Pillow), so the same file has the
same digest by every door.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlmfast.errors import ImageError, ImageLimitError, InputError
from vlmfast.image.convert import WHITE, Colour, Pixels, rgb_of_array
from vlmfast.image.decode import decode_bytes, decode_picture
from vlmfast.image.guard import check_size
from vlmfast.image.identity import pixel_digest
from vlmfast.image.known import KnownPictures, PictureFacts, encoded_key, undecoded
from vlmfast.image.sources import Encoded, EncodedSource, is_encoded_source, read_source, source_label
from vlmfast.options import Limits
from vlmfast.types import ImageInput

ImageSource: TypeAlias = "EncodedSource | Image.Image | npt.NDArray[Any] | ImageInput | Any"
"""What `load_image` takes. `Any` stands for torch tensors: their type is not imported here."""

_CHANNELS = (1, 3, 4)


def load_image(
    source: ImageSource,
    *,
    limits: Limits | None = None,
    background: Colour = WHITE,
    known: KnownPictures | None = None,
) -> ImageInput:
    """A picture as upright RGB: EXIF orientation applied, alpha flattened, first frame of animations.

    Args:
        source: a path (text or `Path`), encoded bytes, a file object, a data URL, base64 text, a file://, http:// or
            https:// URL; a PIL picture; a numpy array or torch tensor [H, W], [H, W, C] or [C, H, W] with C of 1, 3 or
            4 (the last counts where both fit), uint8, uint16 or floats; or a loaded picture, which is returned as is.
            Wide greys and floats become 8 bits by their range, see `vlmfast.image.convert.byte_values`.
        limits: what it may cost and from where it may come.
        background: what shows through transparent parts; white by default.
        known: remembers encoded pictures; one that it knows is decoded only when the pixels are asked for.

    Raises:
        ImageError: the source is missing, no picture, damaged, or of a type that is not supported; it is named.
        ImageFetchError: a URL that is not allowed or can not be fetched.
        ImageLimitError: it is beyond `limits`, checked from the header before decoding.
        InputError: `background` is no colour.
    """
    return _load(source, limits or Limits(), _checked_colour(background), known)


def load_images(
    sources: Sequence[ImageSource],
    *,
    limits: Limits | None = None,
    background: Colour = WHITE,
    known: KnownPictures | None = None,
) -> tuple[ImageInput, ...]:
    """The pictures of one request, in order; together they keep to `max_images` and `max_decoded_bytes`.

    Raises:
        ImageError: as `load_image`, for the first that can not be used.
        ImageLimitError: too many, or too large together; no picture beyond the limit is decoded.
    """
    limits = limits or Limits()
    background = _checked_colour(background)
    if len(sources) > limits.max_images:
        raise ImageLimitError(
            f"{len(sources)} pictures in one request, the limit is {limits.max_images}; raise Limits(max_images=...)"
        )
    loaded: list[ImageInput] = []
    decoded_bytes = 0
    for source in sources:
        loaded.append(_load(source, limits, background, known, decoded_bytes))
        decoded_bytes += loaded[-1].width * loaded[-1].height * 3
    return tuple(loaded)


def is_image_source(value: object) -> bool:
    """Whether a value is one picture (of any kind that `load_image` takes) rather than several."""
    return isinstance(value, (ImageInput, Image.Image, np.ndarray)) or is_encoded_source(value) or _is_tensor(value)


def source_name(source: object, index: int) -> str:
    """How messages and result rows call a source that may not have loaded."""
    if isinstance(source, ImageInput):
        return source.name
    return source_label(source) or f"{type(source).__name__} #{index}"


def _load(
    source: ImageSource, limits: Limits, background: Colour, known: KnownPictures | None, decoded_bytes: int = 0
) -> ImageInput:
    if isinstance(source, ImageInput):
        check_size(source.width, source.height, source.name, limits, decoded_bytes=decoded_bytes)
        return source
    if isinstance(source, Image.Image):
        name = "PIL image"
        return _image(decode_picture(source, name, limits, background=background, decoded_bytes=decoded_bytes), name)
    if is_encoded_source(source):
        return _from_encoded(read_source(source, limits), limits, background, known, decoded_bytes)
    if isinstance(source, np.ndarray):
        return _from_array(source, "array", limits, background, decoded_bytes)
    if _is_tensor(source):
        return _from_array(_array_of_tensor(source), "tensor", limits, background, decoded_bytes)
    raise ImageError(
        "a picture can be a path, URL, bytes, file object, base64 text, PIL image, numpy array or torch tensor, "
        f"not {type(source).__name__}"
    )


def _from_encoded(
    encoded: Encoded, limits: Limits, background: Colour, known: KnownPictures | None, decoded_bytes: int
) -> ImageInput:
    data, name = encoded.data, encoded.name

    def decode() -> ImageInput:
        pixels = decode_bytes(data, name, limits, background=background, decoded_bytes=decoded_bytes)
        return _image(pixels, name)

    if known is None:
        return decode()
    key = encoded_key(data, *background, limits.allow_truncated, *limits.formats)
    facts = known.recall(key)
    if facts is not None:
        check_size(facts.width, facts.height, name, limits, decoded_bytes=decoded_bytes)
        return undecoded(facts, name, decode)
    image = decode()
    known.remember(key, PictureFacts(digest=image.digest, width=image.width, height=image.height))
    return image


def _from_array(
    array: npt.NDArray[Any], kind: str, limits: Limits, background: Colour, decoded_bytes: int
) -> ImageInput:
    name = f"{kind} {list(array.shape)}"
    if array.dtype.kind != "f" and array.dtype not in (np.uint8, np.uint16):
        raise ImageError(
            f"{name}: dtype must be uint8 (0-255), uint16 (0-65535) or a float type, got {array.dtype}; convert it"
        )
    if array.ndim == 2:
        array = array[:, :, None]
    elif array.ndim == 3 and array.shape[2] not in _CHANNELS and array.shape[0] in _CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in _CHANNELS:
        raise ImageError(f"{name}: shape must be [H, W], [H, W, C] or [C, H, W] with C of 1, 3 or 4")
    check_size(array.shape[1], array.shape[0], name, limits, decoded_bytes=decoded_bytes)
    return _image(rgb_of_array(array, background), name)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # nobody holds a tensor of a torch that is not loaded
    return torch is not None and isinstance(value, torch.Tensor)


def _array_of_tensor(tensor: Any) -> npt.NDArray[Any]:
    name = f"tensor {list(tensor.shape)}"
    try:
        tensor = tensor.detach().cpu()
        return np.asarray((tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy())
    except Exception as error:  # sparse, meta and quantised tensors, each by another error
        raise ImageError(f"{name}: can not become an array ({error})") from error


def _image(pixels: Pixels, name: str) -> ImageInput:
    pixels.flags.writeable = False
    height, width, _ = pixels.shape
    return ImageInput(width=width, height=height, digest=pixel_digest(pixels), name=name, source=pixels)


def _checked_colour(colour: Iterable[int]) -> Colour:
    try:
        red, green, blue = (int(value) for value in colour)
        if all(0 <= value <= 255 for value in (red, green, blue)):
            return red, green, blue
    except (TypeError, ValueError):
        pass
    raise InputError(f"background must be three numbers from 0 to 255 (red, green, blue), got {colour!r}")

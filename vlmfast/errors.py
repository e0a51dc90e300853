"""Every error that vlmfast raises on purpose. No torch.

VLMFastError
├── InputError                 what the caller gave can not be used
│   ├── ImageError             a picture: missing, not a picture, damaged, of a wrong type
│   │   ├── ImageFetchError    a URL that is not allowed, or could not be fetched
│   │   └── ImageLimitError    a picture beyond the configured limits
│   ├── OptionError            an option out of its range
│   └── ContextLengthError     the prompt does not fit the model's context
├── ModelError                 a checkpoint can not be used
│   ├── ConfigError            its configuration is incomplete or holds what we do not run
│   ├── UnsupportedModelError  its architecture is not one of ours
│   ├── WeightsError           tensors missing, left over or damaged
│   └── ModelNotFoundError     no such folder or hub name, or the hub can not be reached
├── GeometryError              a picture's size breaks the family's rules
├── InterruptedAnswerError     Ctrl-C, meant for another answer, hit this one in the middle of a token
└── DeviceError                the device or dtype asked for is not there
"""

from __future__ import annotations

from vlmfast_models.errors import (
    ConfigError,
    GeometryError,
    ModelError,
    UnsupportedModelError,
    VLMFastError,
    WeightsError,
)

__all__ = [
    "ConfigError",
    "ContextLengthError",
    "DeviceError",
    "GeometryError",
    "ImageError",
    "ImageFetchError",
    "ImageLimitError",
    "InputError",
    "InterruptedAnswerError",
    "ModelError",
    "ModelNotFoundError",
    "OptionError",
    "UnsupportedModelError",
    "VLMFastError",
    "WeightsError",
]


class InputError(VLMFastError):
    """What the caller gave can not be used."""

    code = "bad_input"


class ImageError(InputError):
    """A picture is missing, damaged, or not a picture; the message names it."""

    code = "bad_image"


class ImageFetchError(ImageError):
    """A URL is not allowed, or did not give a file; the message says which and why."""

    code = "image_fetch"


class ImageLimitError(ImageError):
    """A picture is beyond `Limits`; the message names the limit to raise."""

    code = "image_too_large"


class OptionError(InputError):
    """An option is out of its range."""

    code = "bad_option"


class ContextLengthError(InputError):
    """The prompt leaves no room in the model's context."""

    code = "context_length"


class ModelNotFoundError(ModelError):
    """No folder or hub repository by this name, or no way to reach it now."""

    code = "model_not_found"


class DeviceError(VLMFastError):
    """The device or dtype asked for is not available here."""

    code = "bad_device"


class InterruptedAnswerError(VLMFastError):
    """An interrupt came while a token was added to this answer, which can not go on; asking again is safe."""

    code = "interrupted"

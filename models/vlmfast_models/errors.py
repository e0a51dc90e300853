"""The root of the exception tree and the errors a checkpoint can cause. `vlmfast.errors` draws the whole tree."""

from __future__ import annotations


class VLMFastError(Exception):
    """Base of every error that vlmfast raises on purpose.

    Each class carries a stable `code`, which the command and the server report beside the message.
    """

    code = "error"


class ModelError(VLMFastError):
    """A checkpoint can not be used as it is."""

    code = "model_error"


class ConfigError(ModelError):
    """A checkpoint's configuration lacks a field, or holds a value that vlmfast does not run."""

    code = "bad_config"


class UnsupportedModelError(ModelError):
    """The architecture is not one of vlmfast's families."""

    code = "unsupported_model"


class WeightsError(ModelError):
    """Tensors are missing, left over, or of another shape than the configuration says."""

    code = "bad_weights"


class GeometryError(VLMFastError):
    """A picture's size does not fit the family's rules (for example a side of zero pixels)."""

    code = "bad_image_size"

"""The exception tree: one root, a stable code for each class, nothing left out of `__all__`."""

from __future__ import annotations

import pytest

import vlmfast.errors as errors
import vlmfast_models.errors as model_errors
from vlmfast.errors import VLMFastError


def _all_errors() -> list[type[VLMFastError]]:
    found, todo = [], [VLMFastError]
    while todo:
        found.append(todo.pop())
        todo += found[-1].__subclasses__()
    return found


def test_every_class_has_a_code_of_its_own() -> None:
    """Guards the codes that the command and the server report: distinct, stated in the class, of one form."""
    found = _all_errors()
    codes = [error.__dict__.get("code") for error in found]
    assert None not in codes, "a class inherits its parent's code"
    assert len(set(codes)) == len(codes)
    assert all(code.replace("_", "a").isalpha() and code.islower() for code in codes)


def test_all_lists_the_whole_tree() -> None:
    """Guards `vlmfast.errors`: every class of the tree can be caught by its public name, and the drawing shows it."""
    found = {error.__name__: error for error in _all_errors() if error.__module__.startswith("vlmfast")}
    assert sorted(errors.__all__) == errors.__all__
    assert set(errors.__all__) == set(found)
    for name, error in found.items():
        assert getattr(errors, name) is error
        assert name in (errors.__doc__ or ""), f"{name} is not in the drawing"
        assert error.__doc__


def test_model_errors_are_the_same_classes() -> None:
    """Guards catching across packages: what the networks raise is what `vlmfast.errors` exports."""
    for name in ("VLMFastError", "ModelError", "ConfigError", "WeightsError", "UnsupportedModelError", "GeometryError"):
        assert getattr(errors, name) is getattr(model_errors, name)


# What existed once stays: scripts match on these.
@pytest.mark.parametrize(
    ("name", "code", "parent"),
    [
        ("InputError", "bad_input", "VLMFastError"),
        ("ImageError", "bad_image", "InputError"),
        ("ImageFetchError", "image_fetch", "ImageError"),
        ("ImageLimitError", "image_too_large", "ImageError"),
        ("OptionError", "bad_option", "InputError"),
        ("InterruptedAnswerError", "interrupted", "VLMFastError"),
        ("ContextLengthError", "context_length", "InputError"),
        ("ModelError", "model_error", "VLMFastError"),
        ("ConfigError", "bad_config", "ModelError"),
        ("UnsupportedModelError", "unsupported_model", "ModelError"),
        ("WeightsError", "bad_weights", "ModelError"),
        ("ModelNotFoundError", "model_not_found", "ModelError"),
        ("DeviceError", "bad_device", "VLMFastError"),
        ("GeometryError", "bad_image_size", "VLMFastError"),
    ],
)
def test_codes_stay(name: str, code: str, parent: str) -> None:
    """Guards the codes themselves and the parents that callers catch."""
    error = getattr(errors, name)
    assert error.code == code
    assert issubclass(error, getattr(errors, parent))

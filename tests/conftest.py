"""What every test gets: one thread, no network, user directories in a temporary folder, tiny random checkpoints.

Runs before any test module is imported and imports no torch itself, so that the tests of pure modules stay pure.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_HOME = Path(tempfile.mkdtemp(prefix="vlmfast-tests-"))
# Set before anything reads them: huggingface_hub and torch look at these at import. One thread keeps sums in one
# order, and the sizes of these tests gain nothing from more.
for _name, _folder in {
    "HOME": "home",
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "XDG_DATA_HOME": "data",
    "HF_HOME": "huggingface",
    "VLMFAST_CACHE_DIR": "vlmfast",
    "HYPOTHESIS_STORAGE_DIRECTORY": "hypothesis",
}.items():
    (_HOME / _folder).mkdir()
    os.environ[_name] = str(_HOME / _folder)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
for _name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.pop(_name, None)

from hypothesis import settings  # noqa: E402  (reads its folder from the environment)

settings.register_profile("vlmfast", deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("VLMFAST_HYPOTHESIS", "vlmfast"))


def pytest_unconfigure() -> None:
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches out fails: only addresses of this machine can be connected to or looked up."""
    local = ("127.0.0.1", "::1", "localhost")
    connect, connect_ex, look_up = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def host_of(address: Any) -> str:
        return str(address[0]) if isinstance(address, tuple) else "localhost"  # a path is a unix socket

    def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: socket.socket, address: Any) -> Any:
            if host_of(address) not in local:
                raise OSError(f"network is blocked in tests: {address!r}")
            return original(self, address)

        return call

    def guarded_look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in (None, "", *local):
            raise socket.gaierror(f"network is blocked in tests: {host!r}")
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded(connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guarded(connect_ex))
    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint_of(shape, seed=0, ...) -> folder of a random checkpoint, tiny by default.

    Made once a session: do not write to it.
    """
    made: dict[str, Path] = {}

    def make(shape: Any = None, **options: Any) -> Path:
        from vlmfast.testing import Shape, random_checkpoint

        shape = shape or Shape(initializer_range=0.2)  # wide enough that answers vary from token to token
        key = repr((shape, sorted(options.items())))
        if key not in made:
            made[key] = random_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def load_vlm(checkpoint_of: Callable[..., Path]) -> Callable[..., Any]:
    """load_vlm(folder=..., **options) -> a float32 VLM on the CPU; the default tiny checkpoint without a folder."""

    def load(folder: Path | None = None, **options: Any) -> Any:
        from vlmfast import VLM

        options = {"device": "cpu", "dtype": "float32", **options}
        return VLM.from_pretrained(folder or checkpoint_of(), **options)

    return load


@pytest.fixture(scope="session")
def vlm(load_vlm: Callable[..., Any]) -> Any:
    """The tiny model that tests share. They leave it idle: see `idle_engine`."""
    return load_vlm()


@pytest.fixture
def idle_engine(vlm: Any) -> Iterator[Any]:
    """The shared model, checked after the test to hold no page, no state and no request."""
    yield vlm
    from oracle import check_idle

    check_idle(vlm)

"""The wheel holds three packages and the bundled model, and nothing hides Hugging Face's `kernels`."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import vlmfast

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "vlmfast", "kernels", "models", "assets")
TOP_LEVEL = ("vlmfast", "vlmfast_models", "vlmfast_kernels", "vlmfast_pocket")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the sources (an old build/ folder would leak into it), without network."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, source / name)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(target), str(source)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = target.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def unpacked(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    wheel.extractall(folder)
    return folder


def _metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def _python(code: str, folder: Path, cwd: Path) -> str:
    """Runs code that sees `folder` and the installed dependencies, but not this checkout, editable or otherwise."""
    prelude = (
        "import sys\n"
        "sys.meta_path = [finder for finder in sys.meta_path if '__editable__' not in repr(finder) + "
        "getattr(finder, '__module__', '')]\n"
        f"sys.path = [{str(folder)!r}, *(entry for entry in sys.path if not entry.startswith({str(ROOT)!r}) "
        "or 'site-packages' in entry)]\n"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-c", prelude + code], capture_output=True, text=True, cwd=cwd, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_holds_all_modules(wheel: zipfile.ZipFile) -> None:
    """Every source file of the three packages, and no test, benchmark or other top-level folder."""
    names = set(wheel.namelist())
    for package, folder in zip(TOP_LEVEL, (".", "models", "kernels", "assets"), strict=True):
        sources = (ROOT / folder / package).rglob("*.py")
        missing = {str(file.relative_to(ROOT / folder)) for file in sources} - names
        assert not missing
        assert f"{package}/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(TOP_LEVEL)


def test_the_wheel_holds_the_data(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for kind, fewest in {"stickers": 50, "fonts": 12, "photos": 8, "unseen": 24}.items():
        kept = {f"vlmfast/train/{kind}/{file.name}" for file in (ROOT / "vlmfast" / "train" / kind).iterdir()}
        assert len(kept) > fewest
        assert kept <= names
    pocket = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"}
    missing = {f"vlmfast_pocket/{name}" for name in pocket} - names
    assert not missing, f"{missing}: the bundled model belongs in assets/vlmfast_pocket; make it with `vlmfast train`"
    assert wheel.getinfo("vlmfast_pocket/model.safetensors").file_size > 1_000_000


def test_metadata(wheel: zipfile.ZipFile) -> None:
    metadata = _metadata(wheel)
    assert metadata["Version"] == vlmfast.__version__ == importlib.metadata.version("vlmfast")
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = {"test", "train", "gpu", "openclip", "serve", "bench"}
    assert extras <= set(metadata.get_all("Provides-Extra") or ())
    names = wheel.namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (entries,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "vlmfast = vlmfast.cli.main:main" in wheel.read(entries).decode()


def test_the_changelog_knows_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert project["version"] == vlmfast.__version__
    assert f"## [{vlmfast.__version__}]" in changelog or "## [Unreleased]" in changelog


def test_imports_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    """All packages come from the wheel, each with its modules; the bundled model is found in it."""
    code = (
        "import pkgutil, importlib\n"
        f"for top in {TOP_LEVEL!r}:\n"
        "    package = importlib.import_module(top)\n"
        f"    assert package.__file__.startswith({str(unpacked)!r}), package.__file__\n"
        "    for module in pkgutil.walk_packages(package.__path__, top + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "        print(module.name)\n"
        "from vlmfast.checkpoint import bundled_model\n"
        f"assert str(bundled_model()).startswith({str(unpacked)!r})\n"
    )
    modules = _python(code, unpacked, tmp_path).split()
    assert {"vlmfast.vlm", "vlmfast.cli.describe", "vlmfast_models.decoder", "vlmfast_kernels.ops.norm"} <= set(modules)


def test_the_command_runs_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    """The whole way, with nothing of the checkout: a sticker of the wheel, answered by the model of the wheel."""
    picture = unpacked / "vlmfast" / "train" / "stickers" / "dog.png"
    args = ["describe", str(picture), "-p", "What is in the picture?", "--max-new-tokens", "8"]
    assert _python(f"from vlmfast.cli.main import main\nmain({args!r})", unpacked, tmp_path).strip()


def test_this_environment_resolves_all_packages(tmp_path: Path) -> None:
    """As installed here (editable, most likely), from a folder that is not the checkout."""
    code = f"import {', '.join(TOP_LEVEL)}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, f"{result.stderr}\nrun pip install -e . again"


def _get_kernel(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """`from kernels import get_kernel` from `root`, where an installed `kernels` lies in `site`."""
    code = "from kernels import get_kernel; print(get_kernel())"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=environment, check=False
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A stand-in for Hugging Face's `kernels`, which transformers imports by this name."""
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def get_kernel():\n    return 'theirs'\n")
    return package.parent


def test_our_kernels_folder_does_not_hide_hugging_faces(site: Path) -> None:
    """A folder without `__init__.py` loses against an installed package, even from the repository root."""
    result = _get_kernel(ROOT, site)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "theirs"


def test_with_an_init_file_it_would(site: Path, tmp_path: Path) -> None:
    """The control for the test above, and the reason why kernels/ and models/ have no `__init__.py`."""
    root = tmp_path / "root"
    (root / "kernels").mkdir(parents=True)
    assert _get_kernel(root, site).returncode == 0
    (root / "kernels" / "__init__.py").touch()
    assert "cannot import name 'get_kernel'" in _get_kernel(root, site).stderr
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "models" / "__init__.py").exists()

"""The house rules of docs/architecture.md: imports go down only, light modules stay light, files stay short.

To place a new module, add its name to `LAYERS`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import vlmfast

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "vlmfast": ROOT / "vlmfast",
    "vlmfast_models": ROOT / "models" / "vlmfast_models",
    "vlmfast_kernels": ROOT / "kernels" / "vlmfast_kernels",
}

LAYERS = (
    {"cli"},
    {"verify"},
    {"server", "caption", "train", "testing"},
    {"default"},
    {"vlm"},
    {"draft_model"},
    {"chat", "captions", "caches", "quantized"},
    {"engine", "chat_file"},
    {"runner"},
    {"scheduler"},
    {"sequence"},
    {"planner"},
    {"vision", "prompt", "text", "spec"},
    {"prune", "cache", "sample", "kv", "tower"},
    {"image"},
    {"checkpoint", "device", "compose"},
    {"options"},
    {"checks"},
    {"types", "errors", "metrics"},
)
"""Modules and sub-packages of vlmfast, top to bottom. Those of one layer do not import each other."""

MAY_IMPORT = {
    "vlmfast": {"vlmfast", "vlmfast_models", "vlmfast_kernels"},
    "vlmfast_models": {"vlmfast_models", "vlmfast_kernels"},
    "vlmfast_kernels": {"vlmfast_kernels"},
}
THIRD_PARTY = {"vlmfast_models": {"torch", "safetensors"}, "vlmfast_kernels": {"torch", "triton"}}
LAZY_ONLY = {"lmdb", "transformers", "huggingface_hub", "httpx", "jinja2", "triton", "xformers"}
"""Slow or optional: imported where they are used, never at module level (but triton in `vlmfast_kernels.triton`)."""

WITHOUT_TORCH = (
    "vlmfast",
    "vlmfast.types",
    "vlmfast.errors",
    "vlmfast.options",
    "vlmfast.metrics",
    "vlmfast.cache.disk",
    "vlmfast.cache.pictures",
    "vlmfast.compose",
    "vlmfast.prompt",
    "vlmfast.prune.counts",
    "vlmfast.prune.plan",
    "vlmfast.sequence",
    "vlmfast.scheduler",
    "vlmfast.cache.pages",
    "vlmfast.cache.prefix",
    "vlmfast.checkpoint",
    "vlmfast.image.load",
    "vlmfast.cli.main",
    "vlmfast_models.config",
    "vlmfast_models.errors",
    "vlmfast_models.families",
    "vlmfast_models.geometry",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module name; `lazy` says that it stands inside a function."""

    name: str
    line: int
    lazy: bool


def module_files() -> dict[str, Path]:
    """Every module of the three packages by its dotted name."""
    files = {}
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def imports_of(source: str, module: str, known: set[str], *, is_package: bool = False) -> list[Import]:
    """All imports of a module, those under `if TYPE_CHECKING:` left out."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name=alias.name, line=node.lineno, lazy=lazy)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(name=inner if inner in known else base, line=node.lineno, lazy=lazy)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for statement in node.orelse:
                yield from visit(statement, lazy)
        else:
            inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inside)

    return list(visit(ast.parse(source), False))


def layer_of(module: str) -> int:
    """Index in `LAYERS`; the package itself stands where `VLM` does, which it hands out."""
    unit = module.split(".")[1] if "." in module else "vlm"
    for index, layer in enumerate(LAYERS):
        if unit in layer:
            return index
    raise AssertionError(f"{module}: '{unit}' is in no layer; place it in LAYERS")


def violations(module: str, imports: list[Import]) -> list[str]:
    """What a module imports against the rules, one line each."""
    package = module.split(".")[0]
    found = []
    for item in imports:
        top = item.name.split(".")[0]
        where = f"{module}:{item.line} imports {item.name}"
        if top in PACKAGES:
            if top not in MAY_IMPORT[package]:
                found.append(f"{where}: {top} is above {package}")
            elif top == package == "vlmfast" and module != "vlmfast":
                same_unit = module.split(".")[1:2] == item.name.split(".")[1:2]
                if not same_unit and layer_of(item.name) <= layer_of(module):
                    found.append(f"{where}: not in a layer below")
        elif top not in sys.stdlib_module_names:
            if package in THIRD_PARTY and top not in THIRD_PARTY[package]:
                found.append(f"{where}: {package} may use {sorted(THIRD_PARTY[package])} only")
            if top in LAZY_ONLY and not item.lazy and not module.startswith(f"vlmfast_kernels.{top}"):
                found.append(f"{where}: import it inside the function that needs it")
    return found


def test_imports_go_down_only() -> None:
    files = module_files()
    found = []
    for module, file in files.items():
        source = file.read_text(encoding="utf-8")
        imports = imports_of(source, module, set(files), is_package=file.name == "__init__.py")
        found += violations(module, imports)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vlmfast.scheduler", "from vlmfast.engine import Engine"),
        ("vlmfast.scheduler", "from vlmfast import runner"),
        ("vlmfast.scheduler", "from .runner import Runner"),
        ("vlmfast.scheduler", "def f():\n    import vlmfast.vlm"),
        ("vlmfast.cache.pages", "from vlmfast.sample import Sampler"),
        ("vlmfast.cache.pages", "from ..sample import Sampler"),
        ("vlmfast.options", "from vlmfast import VLM"),
        ("vlmfast_models.vit", "import vlmfast.options"),
        ("vlmfast_models.vit", "import transformers"),
        ("vlmfast_kernels.op", "from vlmfast_models.config import TextConfig"),
        ("vlmfast_kernels.op", "import numpy"),
        ("vlmfast_kernels.ops.norm", "import triton"),
        ("vlmfast.checkpoint", "from transformers import AutoConfig"),
    ],
)
def test_the_rules_catch(module: str, source: str) -> None:
    assert violations(module, imports_of(source, module, set(module_files())))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vlmfast.engine", "from vlmfast.scheduler import Scheduler\nimport torch, os"),
        ("vlmfast.chat", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vlmfast.vlm import VLM"),
        ("vlmfast.image.load", "from vlmfast.image.guard import check_size\nfrom .identity import pixel_digest"),
        ("vlmfast.cli.main", "import vlmfast"),
        ("vlmfast.checkpoint", "def f():\n    from transformers import AutoConfig"),
        ("vlmfast_kernels.ops.norm", "def f():\n    import triton"),
        ("vlmfast_kernels.triton.norm", "import triton"),
    ],
)
def test_the_rules_allow(module: str, source: str) -> None:
    assert not violations(module, imports_of(source, module, set(module_files())))


def _loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_loads_no_torch(module: str) -> None:
    assert not {"torch", "transformers"} & _loaded_after(f"import {module}")


def test_import_vlmfast_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "PIL", "numpy", "safetensors", "huggingface_hub", "typer", "rich"}
    assert not heavy & _loaded_after("import vlmfast; vlmfast.Sampling; dir(vlmfast)")
    assert "torch" in _loaded_after("import vlmfast; vlmfast.VLM")  # the check can fail


def test_every_module_imports() -> None:
    loaded = _loaded_after("\n".join(f"import {module}" for module in module_files()))
    assert set(PACKAGES) <= loaded


def test_public_names_resolve() -> None:
    assert sorted(vlmfast.__all__) == sorted(vlmfast._HOME)
    for name in vlmfast.__all__:
        value = getattr(vlmfast, name)
        assert value.__name__ == name
        assert value.__doc__, f"{name} has no docstring"
    assert set(vlmfast.__all__) <= set(dir(vlmfast))
    with pytest.raises(AttributeError, match="no attribute 'VLMM'"):
        _ = vlmfast.VLMM


def test_files_are_short() -> None:
    folders = [*PACKAGES.values(), ROOT / "tests", ROOT / "benchmarks"]
    lengths = {
        file: len(file.read_text(encoding="utf-8").splitlines()) for top in folders for file in top.rglob("*.py")
    }
    too_long = [f"{file.relative_to(ROOT)}: {length} lines" for file, length in lengths.items() if length > 400]
    assert not too_long, f"over 400 lines, split by noun: {too_long}"

"""The optional compiled step of the CPU decoder; everything else about the package is in pyproject.toml.

Without a compiler, or on another processor than x86-64, the package installs without it and runs on torch alone.
"""

from glob import glob

from setuptools import Extension, setup

_CSRC = "kernels/vlmfast_kernels/csrc"
_INSTRUCTIONS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16", "fma")

setup(
    ext_modules=[
        Extension(
            "vlmfast_kernels.csrc.step",  # no Python module: ctypes opens it (vlmfast_kernels/cpu/library.py)
            sources=[f"{_CSRC}/step.cpp"],
            depends=sorted(glob(f"{_CSRC}/*.h")),
            language="c++",
            # The library asks the processor before it uses them. GCC warns of its own intrinsics' placeholders.
            extra_compile_args=["-std=c++17", "-O3", *(f"-m{name}" for name in _INSTRUCTIONS), "-Wno-uninitialized"],
            optional=True,
        )
    ]
)

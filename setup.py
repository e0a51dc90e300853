"""The optional compiled parts; everything else about the package is in pyproject.toml.

Without a compiler the package installs without them and runs on torch and Pillow alone; the decoder's step takes an
x86-64 processor as well.
"""

from glob import glob

from setuptools import Extension, setup

_CSRC = "kernels/vlmfast_kernels/csrc"
_INSTRUCTIONS = (
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16", "fma"),
    *("amx-tile", "amx-bf16"),
)

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
        ),
        Extension(
            "vlmfast_kernels.csrc.resize",  # likewise (vlmfast_kernels/cpu/resize.py)
            sources=[f"{_CSRC}/resize.cpp"],
            language="c++",
            extra_compile_args=["-std=c++17", "-O3"],
            optional=True,
        ),
    ]
)

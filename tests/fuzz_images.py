"""Damaged pictures of every format for the loader, which must give a picture or an ImageError: never another exception,
a crash, a hang or much memory. A small count runs in the suite; `python tests/fuzz_images.py --count 10000` runs more.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from pictures import samples

from vlmfast import Limits, load_image
from vlmfast.errors import ImageError, ImageLimitError

LIMITS = Limits(max_image_pixels=1_000_000, max_image_bytes=4_000_000)
_SLOW_S = 60
_EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF)

Mutation = Callable[[bytearray, np.random.Generator], bytearray]


def _flip(data: bytearray, random: np.random.Generator) -> bytearray:
    for at in random.integers(0, len(data), random.integers(1, 12)):
        data[at] ^= 1 << int(random.integers(0, 8))
    return data


def _head(data: bytearray, random: np.random.Generator) -> bytearray:
    for at in random.integers(0, min(len(data), 128), random.integers(1, 6)):
        data[at] = int(random.integers(0, 256))
    return data


def _number(data: bytearray, random: np.random.Generator) -> bytearray:
    """A number in the file, of 2 or 4 bytes in either order, becomes an extreme one: sizes, counts, offsets."""
    kind = ("<H", ">H", "<I", ">I")[int(random.integers(0, 4))]
    width = struct.calcsize(kind)
    at = int(random.integers(0, max(min(len(data), 600) - width, 1)))
    value = _EXTREMES[int(random.integers(0, len(_EXTREMES)))] % 256**width
    data[at : at + width] = struct.pack(kind, value)
    return data


def _cut(data: bytearray, random: np.random.Generator) -> bytearray:
    return data[: int(random.integers(0, len(data)))]


def _hole(data: bytearray, random: np.random.Generator) -> bytearray:
    at, length = int(random.integers(0, len(data))), int(random.integers(1, 64))
    return data[:at] + data[at + length :]


def _repeat(data: bytearray, random: np.random.Generator) -> bytearray:
    start, at = (int(value) for value in random.integers(0, len(data), 2))
    piece = data[start : start + int(random.integers(1, 200))]
    return data[:at] + piece * int(random.integers(1, 20)) + data[at:]


def _noise(data: bytearray, random: np.random.Generator) -> bytearray:
    at = int(random.integers(0, len(data)))
    piece = random.integers(0, 256, int(random.integers(1, 100)), dtype=np.uint8).tobytes()
    data[at : at + len(piece)] = piece
    return data


_MUTATIONS: tuple[Mutation, ...] = (_flip, _head, _number, _number, _cut, _hole, _repeat, _noise)


def _right_sums(data: bytearray) -> bytearray:
    """Corrects a PNG's checksums, so that what was changed reaches the reader behind them."""
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        end = at + 8 + length
        if end + 4 > len(data):
            break
        data[end : end + 4] = struct.pack(">I", zlib.crc32(data[at + 4 : end]))
        at = end + 4
    return data


def mutated(seed: int) -> tuple[str, bytes]:
    """The name of a sample, and a damaged version of it: one to three mutations, all drawn from the seed."""
    random = np.random.default_rng(seed)
    files = samples()
    name = sorted(files)[int(random.integers(0, len(files)))]
    data = bytearray(files[name])
    for _ in range(int(random.integers(1, 4))):
        if data:
            data = _MUTATIONS[int(random.integers(0, len(_MUTATIONS)))](data, random)
    if data[:4] == b"\x89PNG" and random.random() < 0.7:
        data = _right_sums(data)
    return name, bytes(data)


@dataclass(slots=True, kw_only=True)
class Report:
    """What became of the files."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """"picture", "refused" (by a limit), "damaged", by sample, as "name: outcome"."""
    slowest_s: float = 0.0
    slowest_seed: int = 0
    failures: list[str] = field(default_factory=list)
    """Seeds on which anything but an ImageError was raised."""


def run(seeds: range, limits: Limits = LIMITS) -> Report:
    """Loads the damaged file of each seed. A file that takes a minute ends the process with a traceback."""
    report = Report()
    for seed in seeds:
        name, data = mutated(seed)
        faulthandler.dump_traceback_later(_SLOW_S, exit=True)
        started = time.perf_counter()
        try:
            image = load_image(data, limits=limits)
            outcome = "picture"
            if image.width * image.height > limits.max_image_pixels:
                report.failures.append(f"seed {seed} ({name}): {image.width}x{image.height} pixels passed the limit")
        except ImageLimitError:
            outcome = "refused"
        except ImageError as error:
            outcome = "damaged"
            if not str(error).startswith("image bytes: "):
                report.failures.append(f"seed {seed} ({name}): the item is not named: {error}")
        except Exception as error:
            outcome = "failure"
            report.failures.append(f"seed {seed} ({name}): {error!r}")
        seconds = time.perf_counter() - started
        if seconds > report.slowest_s:
            report.slowest_s, report.slowest_seed = seconds, seed
        report.outcomes[f"{name}: {outcome}"] += 1
    faulthandler.cancel_dump_traceback_later()
    return report


def peak_bytes() -> int:
    """The most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first; each file has its own")
    parser.add_argument("--truncated", action="store_true", help="with allow_truncated")
    arguments = parser.parse_args()
    limits = Limits(
        max_image_pixels=LIMITS.max_image_pixels,
        max_image_bytes=LIMITS.max_image_bytes,
        allow_truncated=arguments.truncated,
    )
    for data in samples().values():
        load_image(data, limits=limits)
    before = peak_bytes()
    report = run(range(arguments.seed, arguments.seed + arguments.count), limits)
    lines = [f"{count:6} {outcome}" for outcome, count in sorted(report.outcomes.items())]
    lines += [
        f"slowest {report.slowest_s * 1e3:.0f} ms (seed {report.slowest_seed}), "
        f"memory grew by {(peak_bytes() - before) / 2**20:.0f} MiB",
        *report.failures,
        f"{len(report.failures)} failures in {arguments.count} files",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())

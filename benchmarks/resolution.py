"""Resolution by need: visual tokens and accuracy of `resolution="auto"` and "low" beside full resolution.

    python benchmarks/resolution.py [--quick] [--json]

Every question about held-out scenes is asked at all resolutions of the bundled model; differences are paired. The full
run (about 2,000 questions) writes assets/results/resolution.json.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from rich.console import Console
from rich.table import Table
from side_by_side import parse_options, prepare

_RESULTS = Path(__file__).resolve().parents[1] / "assets" / "results" / "resolution.json"
_QUICK_SCENES, _FULL_SCENES = 40, 300


def main() -> None:
    """Runs the command line."""
    options = parse_options("Resolution by need: tokens saved and accuracy.")
    prepare(options)
    import token_quality

    from vlmfast import VLM, Vision
    from vlmfast.checkpoint import bundled_model
    from vlmfast.options import Caching

    folder = options.pocket or bundled_model()
    vlm = VLM.from_pretrained(folder, device="cpu", caching=Caching(features_disk_bytes=0, prefix_ram_bytes=0))
    chosen = [
        token_quality.Method(name=name, keep=math.nan, vision=Vision(resolution=name))
        for name in ("high", "auto", "low")
    ]
    scenes = _QUICK_SCENES if options.quick else _FULL_SCENES
    rows = token_quality.measure(vlm, chosen, scenes)
    table = Table(title=f"{scenes} scenes")
    for name in ("asked about", "asked", *(method.name for method in chosen)):
        table.add_column(name)
    table.add_row("visual tokens", "", *(f"{row['visual_tokens']:.0f}" for row in rows))
    for kind in [name for name, value in rows[0].items() if isinstance(value, dict)]:
        cells = [
            f"{row[kind]['accuracy']:.1%} ({-row[kind]['points_lost']:+.1f} ± {row[kind]['half_width']:.1f})"
            for row in rows
        ]
        table.add_row(kind, str(rows[0][kind]["asked"]), *cells)
    Console(stderr=options.json).print(table)
    result = {**token_quality.stamp(folder), "scenes": scenes, "rows": rows}
    if not options.quick:
        _RESULTS.parent.mkdir(exist_ok=True)
        _RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()

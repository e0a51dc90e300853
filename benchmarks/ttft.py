"""Time to first token against transformers: from PIL picture and prompt to the first token, batch 1, bfloat16.

    python benchmarks/ttft.py [--quick] [--json] [--threads N]

The clock covers preprocessing, vision tower, prefill and one token, on both sides the whole call. Ratios: `ttft_x`
(SmolVLM-256M's shape, one tile), `ttft_5_tiles_x` (not with --quick), `pocket_ttft_x`.
"""

from __future__ import annotations

from side_by_side import parse_options, prepare


def main() -> None:
    """Runs the command line."""
    options = parse_options("Time to first token against transformers.")
    prepare(options)
    from cases import five_tiles, one_tile, pocket, run_cases

    cases = [one_tile(21, 7), five_tiles(7, 0), pocket(41, 15)]
    run_cases(cases, "ttft", lambda side, picture: side.run(picture, 1).total_ms, options)


if __name__ == "__main__":
    main()

"""Decode speed against transformers: time per token after the first, batch 1, greedy, bfloat16.

    python benchmarks/decode.py [--quick] [--json] [--threads N]

Ratios: `decode_x` (SmolVLM-256M's shape, one tile), `decode_5_tiles_x` (not with --quick), `pocket_decode_x`.
"""

from __future__ import annotations

from side_by_side import parse_options, prepare


def main() -> None:
    """Runs the command line."""
    options = parse_options("Decode speed against transformers.")
    prepare(options)
    from cases import five_tiles, one_tile, pocket, run_cases

    num_tokens = 32 if options.quick else 64
    cases = [one_tile(15, 5), five_tiles(5, 0), pocket(25, 9)]
    run_cases(cases, "decode", lambda side, picture: side.run(picture, num_tokens).ms_per_token, options)


if __name__ == "__main__":
    main()

"""docs/tokens.md from assets/results/tokens.json: what fewer visual tokens cost and save, and which method when.

    python benchmarks/token_table.py        writes docs/tokens.md and assets/results/tokens.svg

The advice follows from the figures by the rules in `advice`; nothing of it is written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plot_tokens

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tokens.md"
_ALLOWED = 1.0
"""Points that a method may lose and still be advised."""
_AS_FAST = 0.95
"""Of methods that save about the same, the one that harms text least is advised."""
_SHAPES = {"shape256m": "SmolVLM-256M's shape, nine tiles", "llava": "a LLaVA shape, 24 x 24 patches"}
Row = Mapping[str, Any]


def main() -> None:
    """Writes the page and the plot."""
    results = json.loads(plot_tokens.RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(markdown(results), encoding="utf-8")
    plot_tokens.main()


def markdown(results: Mapping[str, Any]) -> str:
    """The page: advice, quality, speed."""
    quality, speed = results["quality"], results.get("speed", {})
    lines = [
        "# Fewer visual tokens: what they save and what they cost",
        "",
        "Made by `python benchmarks/token_table.py` from `assets/results/tokens.json`; a test compares.",
        f"{quality['questions']} questions about held-out scenes, the bundled model (weights "
        f"`{quality['weights_sha256'][:12]}`, commit `{quality['commit'][:12]}`); losses are paired with the "
        "whole run, with 95 % intervals. Text (signs and pages) stands apart: it is what fewer tokens harm first.",
        "",
        "![Quality against arithmetic](../assets/results/tokens.svg)",
        "",
        "## Which method when",
        "",
        *(f"- {line}" for line in advice(quality, speed)),
        "",
        "## Quality",
        "",
        *_quality(quality["rows"]),
        *_kinds(quality["rows"]),
    ]
    for shape, title in _SHAPES.items():
        if speed.get(shape):
            lines += ["", f"## Speed: {title}", "", *_speed(speed[shape])]
    if speed:
        machine = speed["machine"]
        lines += [
            "",
            f"{machine['cpu']}, {machine['threads']} threads, bfloat16, medians of {speed['rounds']} rounds in turns, "
            f"commit `{speed['commit'][:12]}`. FLOP: per decoder layer 2 (4 n d² + 2 n² d + 3 n d m) over n "
            "tokens, with the real widths of shared keys.",
            "The encoder does the same work in all ways but ToMe, and three rounds are few: those columns show how "
            "restless the machine is.",
            f"ToMe on one tile of 1,024 patches, 12 layers, the encoder, {speed['tome_encoder'][0]['rounds']} rounds: "
            + ", ".join(f"{one['encoder_x']:.2f}x with r={one['r']}" for one in speed["tome_encoder"])
            + f". FastV's ranking takes {speed['score']['score_share']:.2%} of the prefill.",
        ]
    return "\n".join([*lines, ""])


def advice(quality: Mapping[str, Any], speed: Mapping[str, Any]) -> list[str]:
    """A sentence for each situation. Advised is what saves most of what loses at most a point off text."""
    rows: Sequence[Row] = quality["rows"]
    fastv = [row for row in rows if row["method"].startswith("fastv@")]
    reducers = [row for row in rows if not row["method"].startswith(("fastv", "tome", "whole", "random"))]
    found = [
        _best("One question about a picture, a heavy decoder", fastv, "prefill_flops_x", "prefill"),
        _best("Several questions about a picture (a reduced prompt is reused, a FastV prompt is not)", reducers,
              "prefill_flops_x", "prefill"),
        _best("New pictures, a heavy encoder", [row for row in rows if row["method"] == "tome"],
              "encoder_flops_x", "encoder"),
    ]  # fmt: skip
    safe = [row for row in rows if row["method"] != "whole" and _holds(row, "text") and _holds(row, "off_text")]
    names = ", ".join(_named(row) for row in safe if "random" not in row["method"])
    found.append(
        f"**Text to be read**: at most {_ALLOWED:g} point lost on and off text by {names}."
        if names
        else f"**Text to be read**: none of these; every one loses more than {_ALLOWED:g} point of it. Ask whole."
    )
    found += _layers(rows, quality["fastv_layers"])
    found += [line for layer in quality["fastv_layers"] for line in _controls(rows, layer)]
    for shape, title in _SHAPES.items():
        whole, half = (
            next((one for one in speed.get(shape, ()) if one["way"] == way), None) for way in ("whole", "fastv 0.5")
        )
        if whole and half and "new_first_token_ms" in whole:
            saved, before = whole["prefill_ms"] - half["prefill_ms"], whole["new_first_token_ms"]
            found.append(
                f"**New pictures on {title}**: FastV at 50 % makes the prefill {half['prefill_x']:.2f}x as fast, which "
                f"is {saved:.0f} of the {before:.0f} ms to the first token: {before / (before - saved):.2f}x. The "
                f"encoder takes {whole['encoder_ms'] / before:.0%} of them."
            )
    return found


def _best(situation: str, rows: Sequence[Row], speed: str, part: str) -> str:
    held = [row for row in rows if _holds(row, "off_text")]
    if not held:
        return f"**{situation}**: none loses at most {_ALLOWED:g} point off text; ask whole."
    fastest = max(float(row[speed]) for row in held)
    alike = [row for row in held if row[speed] >= _AS_FAST * fastest]
    best = min(alike, key=lambda row: float(row["text"]["points_lost"]))
    text = best["text"]["points_lost"]
    return (
        f"**{situation}**: {_named(best)}; {_points(best['off_text'])} points lost off text, {_points(best['text'])} "
        f"on text, {best[speed]:.2f}x less arithmetic in the {part}" + ("." if text <= _ALLOWED else "; not for text.")
    )


def _layers(rows: Sequence[Row], layers: Sequence[int]) -> list[str]:
    """What FastV at half the tokens loses at each layer, and the first where it holds."""
    halves = {layer: row for layer in layers if (row := _find(rows, f"fastv@{layer}", 0.5))}
    if len(halves) < 2:
        return []
    lost = ", ".join(f"{_points(row['off_text'])} at layer {layer}" for layer, row in halves.items())
    holds = next((layer for layer, row in halves.items() if _holds(row, "off_text")), None)
    said = "it holds at none of these" if holds is None else f"the first of these where it holds is {holds}"
    return [f"**FastV at 50 %** loses {lost} (points off text): {said}."]


def _controls(rows: Sequence[Row], layer: int) -> list[str]:
    """Whether FastV beats chance, share by share: its loss and the control's, apart by more than both half widths."""
    said = []
    for keep in (0.5, 0.25, 0.1):
        own, control = (_find(rows, f"{name}@{layer}", keep) for name in ("fastv", "fastv random"))
        if own and control:
            gap = control["off_text"]["points_lost"] - own["off_text"]["points_lost"]
            clear = abs(gap) > own["off_text"]["half_width"] + control["off_text"]["half_width"]
            word = "clearly better than" if clear and gap > 0 else "clearly worse than" if clear else "no better than"
            said.append(f"at {keep:.0%} {word} random ({gap:+.1f} points)")
    return [f"**FastV at layer {layer} against chance**, off text: {'; '.join(said)}."] if said else []


def _find(rows: Sequence[Row], method: str, keep: float) -> Row | None:
    return next((row for row in rows if row["method"] == method and row["keep"] == keep), None)


def _holds(row: Row, group: str) -> bool:
    return float(row[group]["points_lost"]) <= _ALLOWED


def _named(row: Row) -> str:
    return f"`{row['method']}`" + (f" at {row['keep']:.0%}" if row["keep"] is not None else "")


def _points(loss: Mapping[str, float]) -> str:
    return f"{loss['points_lost']:.1f} ± {loss['half_width']:.1f}"


def _quality(rows: Sequence[Row]) -> list[str]:
    lines = [
        "`decoder` is the mean share of the visual tokens over the decoder's layers; `words`: of the text's words read "
        "right.",
        "",
        "| method | keep | tokens at the end | decoder | FLOP of the prefill | less | encoder less | KV MB "
        "| lost off text | lost on text | words |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        keep = "" if row["keep"] is None else f"{row['keep']:.0%}"
        lines.append(
            f"| {row['method']} | {keep} | {row['visual_tokens_after']:.0f} | {row['decoder_share']:.0%} "
            f"| {row['prefill_gflop']:.2f} G | {row['prefill_flops_x']:.2f}x | {row['encoder_flops_x']:.2f}x "
            f"| {row['kv_bytes'] / 1e6:.2f} | {_points(row['off_text'])} | {_points(row['text'])} "
            f"| {row['text_words']['share']:.1%} |"
        )
    return lines


def _kinds(rows: Sequence[Row]) -> list[str]:
    kinds = [
        name
        for name, value in rows[0].items()
        if isinstance(value, Mapping) and "accuracy" in value and name not in ("text", "off_text")
    ]
    asked = [f"{kind} ({rows[0][kind]['asked']})" for kind in kinds]
    lines = ["", "Accuracy by kind of question (how many were asked):", ""]
    lines += ["| method | keep | " + " | ".join(asked) + " |", "|---" * (2 + len(kinds)) + "|"]
    for row in rows:
        keep = "" if row["keep"] is None else f"{row['keep']:.0%}"
        cells = " | ".join(f"{row[kind]['accuracy']:.1%}" for kind in kinds)
        lines.append(f"| {row['method']} | {keep} | {cells} |")
    return lines


def _speed(rows: Sequence[Row]) -> list[str]:
    clocks = [
        name for name in ("prefill", "known_first_token", "encoder", "new_first_token") if f"{name}_ms" in rows[0]
    ]
    titles = [name.replace("_", " ") for name in clocks]
    lines = [
        "Milliseconds, and how many times as fast as the whole run; a known picture has its features, a new one is "
        "encoded.",
        "",
        f"| | {' | '.join(titles)} | FLOP | less | KV MB | peak MB |",
        "|---" * (5 + len(clocks)) + "|",
    ]
    for row in rows:
        cells = [f"{row[name + '_ms']:.0f} ({row[name + '_x']:.2f}x)" for name in clocks]
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
        lines.append(
            f"| {row['way']} | {' | '.join(cells)} | {row['prefill_gflop']:.0f} G | {row['prefill_flops_x']:.2f}x "
            f"| {row['kv_bytes'] / 1e6:.1f} | {peak} |"
        )
    return lines


if __name__ == "__main__":
    main()

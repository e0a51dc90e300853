"""Benchmarks of fewer visual tokens: what they count, that they go on where they stopped, what they conclude."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from oracle import noise

from vlmfast import FastV, Reduce, Sampling, Vision
from vlmfast.prompt import Message
from vlmfast.sequence import Request
from vlmfast.train.asking import conversation
from vlmfast.train.wording import Question

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import held_out
import plot_tokens
import token_costs
import token_quality
import token_table
import tokens


@pytest.fixture(scope="module")
def plain(load_vlm: Callable[..., Any]) -> Any:
    return load_vlm(caching=False)


@pytest.mark.parametrize(
    "fastv",
    [FastV(layer=1, keep=0.25), FastV(layer=2, keep=0.5), FastV(layer=1, keep=0.5, then=((2, 0.1),))],
    ids=str,
)
def test_counted_keys_and_values_are_those_held(plain: Any, fastv: FastV) -> None:
    """Guards the length of each layer group, and the bytes that are told of it."""
    vision = Vision(fastv=fastv)
    messages = [Message(role="user", text="What is it?", images=plain.load_images(noise(64, 64)))]
    prompt = plain.build_prompt(messages, vision)
    request = Request(
        prompt=prompt,
        images=messages[0].images,
        sampling=Sampling(max_new_tokens=4),
        vision=vision,
        pruning=plain._planner.pruning(messages, vision, prompt),
    )
    engine = plain._engine
    seq_id = engine.submit(request, started=0.0, image_ms=0.0)
    stream = engine.stream(seq_id)
    engine.step()
    kv = engine._runner._states[seq_id].kv
    kept = [(layer, float(round(80 * keep))) for layer, keep in fastv.steps]
    lengths = token_costs.layer_lengths(3, len(prompt.ids), 80, kept)
    assert kv.lengths == lengths and len(set(lengths)) == 1 + len(fastv.steps)
    config = plain.checkpoint.config.text
    held = sum(2 * kv.keys(layer).nbytes for layer in range(3))
    assert token_costs.kv_bytes(config, lengths, plain.dtype.itemsize) == held
    stream.close()


def test_arithmetic_is_that_of_the_formula(plain: Any) -> None:
    """Guards the FLOP count: 2 (4 n d^2 + 2 n^2 d + 3 n d m) a layer where heads share no keys and fill the width."""
    from dataclasses import replace

    config = replace(plain.checkpoint.config.text, num_kv_heads=4)
    d, m = config.hidden_size, config.intermediate_size
    assert config.num_heads * config.head_dim == d
    expected = sum(2 * (4 * n * d**2 + 2 * n**2 * d + 3 * n * d * m) for n in (100, 100, 40))
    assert token_costs.decoder_flops(config, token_costs.layer_lengths(3, 100, 80, [(2, 20)])) == expected
    tower = plain.checkpoint.config.vision
    assert token_costs.tower_flops(tower, (16, 16)) < token_costs.tower_flops(tower)
    assert token_costs.tower_flops(tower, (0, 0)) == token_costs.tower_flops(tower)


def test_batches_answer_as_single_questions_do(load_vlm: Callable[..., Any]) -> None:
    """Guards the speed-up: order within a block, shared features and prefixes change no answer."""
    from vlmfast import Batching, Caching

    batched = load_vlm(caching=Caching(features_disk_bytes=0), batching=Batching(max_sequences=4, max_step_tokens=8192))
    questions = held_out.HeldOut(batched, 8, block_pictures=3)
    assert len(questions.kinds) >= 8
    block = questions.blocks[0]
    assert len({asked.image.digest for asked in block[:3]}) == 3, "first questions come first"
    alone = load_vlm(caching=False)
    for vision in (None, Vision(reduce=Reduce("scope", keep=0.25)), Vision(fastv=FastV(layer=1, keep=0.5))):
        answers = list(held_out.answer_all(batched, block, vision))
        for asked, answer in zip(block, answers, strict=True):
            talk = conversation((asked.image,), asked.question.before, asked.question.prompt)
            sampling = Sampling(max_new_tokens=held_out.ANSWER_TOKENS)
            *_, last = alone.answer_messages(talk, sampling=sampling, vision=vision)
            single = last.answer
            assert answer.token_ids == single.token_ids


def test_a_run_goes_on_where_it_stopped(load_vlm: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    """Guards resuming: no block is answered twice, a line cut short is, and other weights find nothing."""
    from vlmfast import Caching

    vlm = load_vlm(caching=Caching(features_disk_bytes=0))
    questions = held_out.HeldOut(vlm, 3, block_pictures=1)
    chosen = [token_quality.fastv(1, 0.5)]
    monkeypatch.setattr(held_out, "ANSWER_TOKENS", 4)
    calls: list[int] = []
    real = held_out.marks

    def counted(*arguments: Any) -> held_out.Marks:
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr(token_quality, "marks", counted)
    file = tmp_path / "work" / "answers.jsonl"

    def rows(weights: str) -> list[dict[str, Any]]:
        calls.clear()
        return token_quality.measure(vlm, chosen, questions, held_out.WorkFile(file), weights)

    whole_run = rows("a")
    assert len(calls) == 2 * len(questions.blocks)
    assert rows("a") == whole_run and not calls
    file.write_text(file.read_text()[:-20])
    assert rows("a") == whole_run and len(calls) == 1
    assert rows("a") == whole_run and not calls, "the line after the one cut short is found"
    rows("b")
    assert len(calls) == 2 * len(questions.blocks)
    whole, half = whole_run
    assert whole["method"] == "whole" and whole["off_text"]["points_lost"] == 0
    assert half["visual_tokens_after"] == round(half["visual_tokens"] / 2, 1)
    assert half["prefill_flops_x"] > 1 and half["kv_bytes"] < whole["kv_bytes"]
    assert half["decoder_share"] == pytest.approx((1 + 0.5 + 0.5) / 3, abs=0.01)


def _row(method: str, keep: float | None, lost: float, text: float, speed: float) -> dict[str, Any]:
    def loss(points: float) -> dict[str, float]:
        return {"points_lost": points, "half_width": 0.5, "accuracy": 0.9 - points / 100, "asked": 100}

    return {
        "method": method, "keep": keep, "visual_tokens": 10, "visual_tokens_after": 5, "decoder_share": 0.5,
        "prefill_gflop": 1.0, "prefill_flops_x": 1.0 if method == "tome" else speed,
        "encoder_flops_x": speed if method == "tome" else 1.0, "kv_bytes": 10, "text_words": {"share": 0.5, "lost": 0},
        "off_text": loss(lost), "text": loss(text), "what": loss(lost),
    }  # fmt: skip


def _results(*rows: dict[str, Any]) -> dict[str, Any]:
    quality = {
        "commit": "c" * 40, "weights_sha256": "w" * 64, "questions": 100, "fastv_layers": [2],
        "rows": [_row("whole", 1.0, 0, 0, 1.0), *rows],
    }  # fmt: skip
    return {"quality": quality}


def test_advice_follows_the_figures() -> None:
    """Guards the rules: the fastest that holds, never one that does not, chance beside it, text by itself."""
    said = "\n".join(
        token_table.advice(
            _results(
                _row("fastv@2", 0.5, 0.4, 6.0, 1.6),
                _row("fastv@2", 0.25, 3.0, 20.0, 2.4),
                _row("fastv@4", 0.25, 0.9, 9.0, 1.7),
                _row("fastv random@2", 0.25, 9.0, 30.0, 2.4),
                _row("tome", 0.5, 2.0, 3.0, 1.4),
                _row("scope", 0.5, 0.2, 0.5, 1.9),
            )["quality"],
            {},
        )
    )
    assert "heavy decoder**: `fastv@4` at 25%; 0.9" in said and "not for text" in said
    assert "heavy encoder**: none loses" in said
    assert "Several questions about a picture (a reduced prompt is reused, a FastV prompt is not)**: `scope`" in said
    assert "on and off text by `scope` at 50%" in said
    assert "at 25% clearly better than random (+6.0 points)" in said
    later = _results(*(_row(f"fastv@{at}", 0.5, lost, 3.0, 1.5) for at, lost in ((2, 3.0), (4, 5.0), (6, 0.1))))
    later["quality"]["fastv_layers"] = [2, 4, 6]
    said = "".join(token_table.advice(later["quality"], {}))
    assert "5.0 ± 0.5 at layer 4, 0.1 ± 0.5 at layer 6" in said and "where it holds is 6" in said
    assert "every one loses more" in "".join(token_table.advice(_results(_row("tome", 0.5, 2, 9, 2))["quality"], {}))


def test_the_plot_is_drawn_from_the_table() -> None:
    quality = _results(_row("fastv@2", 0.5, 0.4, 6.0, 1.6), _row("fastv random@2", 0.5, 4.0, 6.0, 1.6))["quality"]
    drawn = ElementTree.fromstring(plot_tokens.svg(quality))
    texts = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"fastv@2", "fastv random@2"} <= set(texts)
    points = [float(one.attrib["cy"]) for one in drawn.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(points) == 2 and points[0] < points[1], "more right answers are higher up"


def test_committed_page_and_plot_are_those_of_the_committed_figures() -> None:
    if not plot_tokens.RESULTS.is_file() or "quality" not in json.loads(plot_tokens.RESULTS.read_text()):
        pytest.skip("no full run is committed; python benchmarks/tokens.py --full makes one")
    results = json.loads(plot_tokens.RESULTS.read_text(encoding="utf-8"))
    remedy = "run python benchmarks/token_table.py"
    assert token_table.PAGE.read_text(encoding="utf-8") == token_table.markdown(results), remedy
    assert plot_tokens.PLOT.read_text(encoding="utf-8") == plot_tokens.svg(results["quality"]), remedy
    kinds = [row for row in results["quality"]["rows"] if row["method"] == "whole"]
    assert len(kinds) == 1 and results["quality"]["questions"] >= 5000


def test_headlines_are_null_with_a_note_where_other_weights_made_the_table() -> None:
    found = tokens.lost({})
    assert found["fastv50_points_lost"] is None and "no full run" in found["note"]
    found = tokens.lost(_results(_row("fastv@2", 0.5, 0.4, 6.0, 1.6))["quality"])
    assert found["fastv50_points_lost"] == 0.4 and "note" not in found


def test_a_second_turn_is_asked_after_the_first(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards questions such as "What colour is it?", which mean nothing alone."""
    heard: list[list[Message]] = []
    answer = plain.answer_messages

    def listening(messages: list[Message], **options: Any) -> Any:
        heard.append(messages)
        return answer(messages, **options)

    monkeypatch.setattr(plain, "answer_messages", listening)
    (image,) = plain.load_images(noise(64, 64))
    before = (("Is there a star?", "Yes, there is one star."),)
    question = Question(kind="follow", prompt="Where is it?", answer="", expect={"asks": "where"}, before=before)
    asked = held_out.Asked(image=image, kind="follow", question=question)
    assert len([*held_out.answer_all(plain, [asked], None)]) == 1
    assert [(message.role, message.text) for message in heard[0]] == [
        ("user", "Is there a star?"),
        ("assistant", "Yes, there is one star."),
        ("user", "Where is it?"),
    ]
    assert [len(message.images) for message in heard[0]] == [1, 0, 0]

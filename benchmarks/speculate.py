"""Decoding with drafts against our own plain decoding: the bundled model, one process, the same pictures.

    python benchmarks/speculate.py [--quick] [--json] [--threads N] [--pocket FOLDER] [--draft-model FOLDER]

A ratio is plain over drafting, of the milliseconds a token after the first of an answer, taken in each round and then
the median; above 1, drafting is faster. Captions and chats are the model's own answers, to new scenes every round.
Pages are given texts: the decoder computes every pass, and then the token of the text is taken, since the bundled
model writes no long texts.

    suffix_x      captions, "auto"                       suffix_chat_x   the same asked again in a chat
    lookup_x      a receipt: lines that repeat parts     worst_case_x    random words: nothing can be drafted
    *_batch_4/8   captions, so many at a time            *_drawn         temperature 1
    *_known       pictures that were asked about before  *_total_x       whole answers, not tokens after the first
    chain_x, tree_x    suffix drafts of the job alone, as one chain or with a branch for every source that goes on
    draft_model_x      captions, drafts of `--draft-model` (null without one), draft_model_worst_x random words

Look-ahead decoding has a script of its own, lookahead.py.

Before anything is timed, plain and drafting must give the same tokens: in float32, on captions, chats and pages, and
drawn ones with a seed. `identical` says so. In bfloat16 wider passes round otherwise: `bf16_differing` counts answers.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from rich.console import Console
from rich.table import Table
from side_by_side import Options, Summary, alternate, environment, parse_options, prepare

if TYPE_CHECKING:
    from vlmfast.options import Sampling
    from vlmfast.types import Answer
    from vlmfast.vlm import VLM

_PROMPT = "Describe the picture."
_PAGE_TOKENS = 192
_JOB_ROUNDS = 40
"""Batches of captions: what trying costs shows over a job, and one batch is too short to be exact."""
_APART = 1000
"""Rounds of one row that no other row reaches: what is new must not be known from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row."""

    key: str
    title: str
    drafting: Summary
    plain: Summary
    ratio: float
    """Median of the rounds' ratios: a slow spell of the machine meets both sides of a round."""
    answers: list[Answer] = field(repr=False)
    """Those of the drafting side."""

    @property
    def tokens_per_pass(self) -> float:
        """Tokens after the first over decoder passes: 1 without drafts."""
        decoded = sum(max(len(answer.token_ids) - 1, 0) for answer in self.answers)
        return decoded / max(decoded - sum(answer.usage.accepted_tokens for answer in self.answers), 1)


class Script:
    """Given texts in place of what a model would choose: scores are computed and read, then set aside."""

    def __init__(self, ids: Sequence[int], end: int) -> None:
        self._ids, self._end = ids, end

    @contextmanager
    def __call__(self) -> Iterator[None]:
        from vlmfast import runner
        from vlmfast.sample import Sampler

        script = self

        class Reader(Sampler):
            num_chosen = 0
            takes_best = False

            def choose(self, logits: Any, best: int | None = None) -> int:
                super().choose(logits, best)
                self.num_chosen += 1
                return script._ids[self.num_chosen - 1] if self.num_chosen <= len(script._ids) else script._end

        with mock.patch.object(runner, "Sampler", Reader):
            yield


def receipt(rng: random.Random) -> str:
    """Lines as on a till receipt: few articles, the same words around them."""
    articles = rng.sample(["red apples", "rye bread", "oat milk", "black tea", "goat cheese", "brown sugar"], 4)
    prices = [f"{rng.randrange(1, 9)}.{rng.randrange(10, 99)}" for _ in articles]
    lines = []
    for number in range(24):
        index = rng.randrange(len(articles))
        lines.append(
            f"{number + 1} piece of {articles[index]} at {prices[index]} each, total {prices[index]} with tax."
        )
    return " ".join(lines)


def random_ids(rng: random.Random, vocab_size: int) -> list[int]:
    """Tokens of no language: no pair of them comes twice but by chance."""
    return [rng.randrange(vocab_size // 4, vocab_size) for _ in range(_PAGE_TOKENS)]


def scene(index: int) -> Any:
    from vlmfast.train.render import render
    from vlmfast.train.scenes import sample_scene

    return render(sample_scene(77, index)).picture


def _token_ms(answers: Sequence[Answer]) -> float:
    decoded = sum(max(len(answer.token_ids) - 1, 0) for answer in answers)
    return sum(answer.timings.decode_ms for answer in answers) / max(decoded, 1)


class Plain:
    """A model whose requests do not draft. The same model: where weights come to lie in memory makes up to a tenth."""

    def __init__(self, vlm: VLM) -> None:
        self._vlm = vlm
        self.checkpoint = vlm.checkpoint

    def describe(self, *asked: Any, **options: Any) -> Any:
        return self._vlm.describe(*asked, speculation="off", **options)

    def stream(self, *asked: Any, **options: Any) -> Any:
        return self._vlm.stream(*asked, speculation="off", **options)

    def chat(self, *asked: Any, **options: Any) -> Any:
        return self._vlm.chat(*asked, speculation="off", **options)


@dataclass(slots=True, kw_only=True)
class Bench:
    """A model that drafts, to be compared with itself, and what was measured."""

    drafting: VLM
    rounds: int
    num_pictures: int
    rows: list[Measured] = field(default_factory=list)
    others: dict[str, VLM] = field(default_factory=dict)
    """Further models that drafted, whose acceptance is told."""

    def row(
        self,
        key: str,
        title: str,
        ask: Callable[[VLM, int], list[Answer]],
        *,
        total: bool = False,
        least_rounds: int = 1,
    ) -> None:
        """Times `ask(vlm, round)` on both sides by turns: milliseconds a token, or with `total` of all it takes."""
        first = _APART * (1 + len(self.rows))
        answers: list[Answer] = []
        samples: dict[bool, dict[int, float]] = {True: {}, False: {}}

        def sample(vlm: VLM, index: int) -> float:
            started = time.perf_counter()
            found = ask(vlm, first + index)
            ms = (time.perf_counter() - started) * 1e3
            if vlm is self.drafting:
                answers.extend(found)
            ms = ms if total else _token_ms(found)
            samples[vlm is self.drafting][index] = ms
            return ms

        rounds = max(self.rounds, least_rounds)
        plain: Any = Plain(self.drafting)
        times = alternate(lambda index: sample(self.drafting, index), lambda index: sample(plain, index), rounds=rounds)
        pairs = [samples[False][index] / samples[True][index] for index in sorted(samples[True])[-rounds:]]
        ratio = statistics.median(pairs)
        self.rows.append(
            Measured(key=key, title=title, drafting=times[0], plain=times[1], ratio=ratio, answers=answers)
        )

    def against(self, name: str, drafting: VLM) -> Bench:
        """The same with another model on the drafting side; its rows come to the same table."""
        self.others[name] = drafting
        return replace(self, drafting=drafting)

    def captions(self, vlm: VLM, first: int, sampling: Sampling | None = None) -> list[Answer]:
        """New scenes, one after the other."""
        scenes = range(first * self.num_pictures, (first + 1) * self.num_pictures)
        return [vlm.describe(scene(index), _PROMPT, sampling=sampling) for index in scenes]

    def batch(self, vlm: VLM, first: int, size: int) -> list[Answer]:
        """New scenes, several at a time."""
        streams = [vlm.stream(scene(first * self.num_pictures + index), _PROMPT) for index in range(size)]
        answers = [list(stream)[-1].answer for stream in streams]
        assert all(answers)
        return answers  # type: ignore[return-value]

    def chat(self, vlm: VLM, first: int) -> list[Answer]:
        """A question and then the same again, which the first answer helps with."""
        chat = vlm.chat(scene(first * self.num_pictures))
        return [chat.ask(_PROMPT) for _ in range(3)][1:]

    def page(self, vlm: VLM, ids: Sequence[int]) -> list[Answer]:
        """A given text of some length about a picture."""
        from vlmfast.options import Sampling

        with Script(ids[:_PAGE_TOKENS], next(iter(vlm.checkpoint.eos_token_ids)))():
            return [vlm.describe(scene(5), "What does the sign say?", sampling=Sampling(max_new_tokens=512))]

    def receipt_ids(self, index: int) -> list[int]:
        text = receipt(random.Random(index))
        return list(self.drafting.checkpoint.tokenizer.encode(text, add_special_tokens=False))

    def random_ids(self, index: int) -> list[int]:
        return random_ids(random.Random(index), self.drafting.checkpoint.config.text.vocab_size)


def branching(vlm: VLM, *, branches: bool) -> None:
    """Lets a model draft from the job's earlier answers and the request alone: a chain, or a tree of all they offer."""
    from vlmfast.spec.suffix import SuffixDrafter
    from vlmfast.spec.tree import ROOT, DraftTree

    class Branching(SuffixDrafter):
        def propose(self, context: Sequence[int], budget: int) -> DraftTree:
            chain = super().propose(context, budget)
            nodes: dict[tuple[int, ...], int] = {}
            parents: list[int] = []
            for cursor in sorted(self._cursors, key=lambda one: -one.length):
                found = cursor.automaton.continuation(cursor.state, 2 * cursor.length, 0.1) if cursor.length else []
                for end in range(1, len(self._cut(found)) + 1):
                    path = tuple(found[:end])
                    if path not in nodes and len(nodes) < budget:
                        parents.append(nodes.get(path[:-1], ROOT))
                        nodes[path] = len(nodes)
            return DraftTree(tokens=tuple(path[-1] for path in nodes), parents=tuple(parents), origin=chain.origin)

    kind = Branching if branches else SuffixDrafter
    speculator = vlm._speculator
    ends = vlm.checkpoint.eos_token_ids
    speculator._drafters = lambda: [kind(speculator._memory.sources("", ()), ends=ends)]


def _load(folder: Any, speculation: Any, dtype: str, **options: Any) -> VLM:
    from vlmfast.vlm import VLM

    return VLM.from_pretrained(folder, dtype=dtype, speculation=speculation, **options)


def verify(options: Options, num_pictures: int) -> dict[str, Any]:
    """Compares tokens of plain and drafting runs.

    Raises:
        SystemExit: they differ in float32.
    """
    from vlmfast.options import Sampling

    drawn = Sampling(temperature=1.0, top_p=0.95, seed=3)
    differing = {}
    for dtype in ("float32", "bfloat16"):
        sides = []
        for speculation in ("off", "auto", "tree", *(["model"] if options.draft_model else [])):
            vlm = _load(options.pocket, _drafting(options, speculation), dtype, caching=False)
            if speculation == "tree":
                branching(vlm, branches=True)
            bench = Bench(drafting=vlm, rounds=0, num_pictures=num_pictures)
            answers = [*bench.captions(vlm, 0), *bench.captions(vlm, 0), *bench.captions(vlm, 0, drawn)]
            answers += [*bench.batch(vlm, 0, 4), *bench.chat(vlm, 0), *bench.page(vlm, bench.receipt_ids(0))]
            sides.append([answer.token_ids for answer in answers])
        plain, *others = sides
        differing[dtype] = sum(one != two for other in others for one, two in zip(plain, other, strict=True))
        if dtype == "float32" and differing[dtype]:
            sys.exit(f"{differing[dtype]} of {len(sides[0])} answers differ from the plain run in float32")
    compared = len(sides[0]) * (len(sides) - 1)
    return {"identical": True, "compared": compared, "bf16_differing": differing["bfloat16"]}


def _drafting(options: Options, name: str) -> Any:
    """How to draft: a drafter by name, with the model that was given for "model"."""
    from vlmfast.spec.options import Speculation

    if name == "model":
        return Speculation(drafter="model", draft_model=options.draft_model)
    return "auto" if name == "tree" else name


def measure(options: Options) -> Bench:
    """All rows."""
    from vlmfast.options import Sampling

    rounds = options.rounds or (2 if options.quick else 9)
    num_pictures = 4 if options.quick else 12
    drafting = _load(options.pocket, "auto", "bfloat16", caching=False)
    bench = Bench(drafting=drafting, rounds=rounds, num_pictures=num_pictures)
    bench.captions(drafting, 0)  # the job has begun

    def worst(vlm: VLM, index: int) -> list[Answer]:
        return bench.page(vlm, bench.random_ids(index))

    bench.row("suffix_x", "captions", bench.captions)
    bench.row("lookup_x", "receipt (given text)", lambda vlm, index: bench.page(vlm, bench.receipt_ids(index)))
    bench.row("worst_case_x", "random words (given)", worst, least_rounds=6)
    bench.row("suffix_chat_x", "same question again in a chat", bench.chat)
    if options.draft_model is not None:
        model = bench.against("model", _load(options.pocket, _drafting(options, "model"), "bfloat16", caching=False))
        model.row("draft_model_x", "captions, draft model", model.captions)
        model.row("draft_model_worst_x", "random words, draft model", worst, least_rounds=6)
    if options.quick:
        return bench
    if options.draft_model is not None:
        hot = Sampling(temperature=1.0)
        model.row("draft_model_total_x", "whole answers, draft model", model.captions, total=True)
        model.row("draft_model_drawn_x", "temperature 1, draft model", lambda vlm, i: model.captions(vlm, i, hot))
        model.row("draft_model_batch_4_x", "4 at a time, draft model", lambda vlm, i: model.batch(vlm, i, 4))
    for key in ("chain", "tree"):
        one = bench.against(key, _load(options.pocket, "auto", "bfloat16", caching=False))
        branching(one.drafting, branches=key == "tree")
        one.captions(one.drafting, 0)
        one.row(f"{key}_x", f"captions, {key}s of the job", one.captions)
    drawn = Sampling(temperature=1.0, top_p=0.95, seed=1)
    bench.row("suffix_total_x", "captions, whole answers", bench.captions, total=True)
    bench.row("suffix_drawn_x", "captions, temperature 1", lambda vlm, index: bench.captions(vlm, index, drawn))
    for size in (4, 8):
        bench.row(
            f"suffix_batch_{size}_x",
            f"captions, {size} at a time",
            lambda vlm, i, n=size: bench.batch(vlm, i, n),  # type: ignore[misc]
            least_rounds=_JOB_ROUNDS,
        )
    known = _load(options.pocket, "auto", "bfloat16")
    again = Bench(drafting=known, rounds=rounds, num_pictures=num_pictures, rows=bench.rows)
    again.captions(known, 0)
    again.row("suffix_known_x", "known pictures, tokens", lambda vlm, _: again.captions(vlm, 0))
    again.row(
        "suffix_known_total_x", "known pictures, whole answers", lambda vlm, _: again.captions(vlm, 0), total=True
    )
    return bench


def report(bench: Bench, checks: dict[str, Any], options: Options) -> None:
    """Prints the table (to stderr with `--json`), then the JSON object if asked for."""
    console = Console(stderr=options.json)
    table = Table("", "plain ms", "drafting ms", "tokens a second", "ratio", "tokens a pass")
    for row in bench.rows:
        rate = "" if row.key.endswith("total_x") else f"{1e3 / row.drafting.median:.0f}"
        cells = (f"{row.plain.median:.2f}", f"{row.drafting.median:.2f}", rate, f"{row.ratio:.2f}x")
        table.add_row(row.title, *cells, f"{row.tokens_per_pass:.2f}")
    acceptance = bench.drafting._speculator.gate.acceptance()
    for name, vlm in bench.others.items():
        acceptance |= {f"{name}: {origin}": found for origin, found in vlm._speculator.gate.acceptance().items()}
    console.print(table, f"checked before timing: {checks}")
    for origin, chances in acceptance.items():
        console.print(f"{origin}: accepted by position {' '.join(f'{chance:.2f}' for chance in chances)}")
    if not options.json:
        return
    values: dict[str, Any] = {"draft_model_x": None}
    for row in bench.rows:
        stem = row.key.removesuffix("_x")
        values |= {row.key: round(row.ratio, 3), f"{stem}_tokens_per_pass": round(row.tokens_per_pass, 3)}
        values |= {f"{stem}_plain_ms": round(row.plain.median, 3), f"{stem}_drafting_ms": round(row.drafting.median, 3)}
    mean = {origin: round(statistics.fmean(chances), 3) for origin, chances in acceptance.items()}
    print(json.dumps(values | checks | {"acceptance": mean} | environment()))


def main() -> None:
    """Runs the script."""
    options = parse_options("Decoding with drafts against plain decoding.")
    prepare(options)
    checks = verify(options, 3 if options.quick else 12)
    report(measure(options), checks, options)


if __name__ == "__main__":
    main()

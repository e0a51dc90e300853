"""Look-ahead decoding (Jacobi with an n-gram pool, arXiv 2402.02057), tried on the bundled model: would it pay?

    python benchmarks/lookahead.py [--quick] [--json] [--threads N] [--pocket FOLDER]

Each pass computes a window of W columns and N - 1 levels of guessed tokens, which fills a pool of n-grams, and up to G
n-grams of the pool that begin with the last token, of which the right ones are accepted. Both are one tree behind the
last token. The tokens must be those of plain decoding, or the script ends.

    tokens a pass   what it would give: 1 without drafts
    cost            a pass of so many tokens over a pass of one, as a chain: the cheapest form that a pass can have;
                    the least of 60 times each
    at best         the one over the other: the gain if everything else cost nothing. Below 1 it is slower
"""

from __future__ import annotations

import json
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from side_by_side import Options, environment, parse_options, prepare

if TYPE_CHECKING:
    from vlmfast.spec.tree import DraftTree
    from vlmfast.vlm import VLM

_SETTINGS = ((2, 3, 1), (3, 3, 2), (5, 3, 3), (5, 4, 5))
_POOLED = 8
"""N-grams kept of each first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting."""

    window: int
    ngram: int
    guesses: int
    tokens_per_pass: float
    nodes: float
    cost: float

    @property
    def at_best(self) -> float:
        return self.tokens_per_pass / self.cost


class Window:
    """Guessed tokens, `levels[n][w]`, and the n-grams that they have become."""

    def __init__(self, width: int, ngram: int, prompt: Sequence[int]) -> None:
        self._levels = [
            [prompt[-1 - (level + column) % len(prompt)] for column in range(width)] for level in range(ngram - 1)
        ]
        self._pool: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def tree(self, last: int, guesses: int) -> tuple[DraftTree, list[int]]:
        """The window and the guesses as one tree behind the token `last`, and the nodes of the window's last level."""
        from vlmfast.spec.tree import ROOT, DraftTree

        tokens: list[int] = []
        parents: list[int] = []
        for level, row in enumerate(self._levels):
            for column, token in enumerate(row):
                before = len(tokens) - len(row) if level else (len(tokens) - 1 if column else ROOT)
                tokens.append(token)
                parents.append(before)
        edge = list(range(len(tokens) - len(self._levels[0]), len(tokens)))
        for gram in list(reversed(self._pool.get(last, ())))[:guesses]:
            parents += [ROOT, *range(len(tokens), len(tokens) + len(gram) - 1)]
            tokens += gram
        return DraftTree(tokens=tuple(tokens), parents=tuple(parents)), edge

    def advance(self, found: Sequence[int]) -> None:
        """Takes the tokens after the last level: n-grams for the pool, and the window moves on."""
        for column, token in enumerate(found):
            first, *rest = [row[column] for row in self._levels]
            kept = self._pool.setdefault(first, OrderedDict())
            gram = (*rest, token)
            kept.pop(gram, None)
            kept[gram] = None
            if len(kept) > _POOLED:
                kept.popitem(last=False)
        self._levels = [*self._levels[1:], list(found)]


class Decoding:
    """A prompt about a picture in one page, and passes behind it."""

    def __init__(self, vlm: VLM, picture: Any, question: str) -> None:
        import torch

        from vlmfast.image.load import load_image
        from vlmfast.kv import SequenceKV
        from vlmfast.prompt import Message

        self.vlm, self.decoder = vlm, vlm.model.decoder
        image = load_image(picture)
        prompt = vlm.build_prompt([Message(role="user", text=question, images=(image,))])
        self.prompt_ids = list(prompt.ids)
        embeddings = self.decoder.embed(torch.tensor(self.prompt_ids))
        places = torch.tensor(self.prompt_ids) == vlm.checkpoint.config.image_token_id
        embeddings[places] = vlm._vision.encode(image, prompt.spans[0].plan).tokens
        self.kv = SequenceKV(vlm.checkpoint.config.text, len(prompt.ids) + 512, vlm.device, vlm.dtype)
        self.first = int(self._run(embeddings, range(len(prompt.ids)), self._causal(len(prompt.ids)))[-1].argmax())

    def _causal(self, num_rows: int) -> Any:
        from vlmfast.spec.attention import BatchAttention

        return BatchAttention([(0, num_rows, self.kv)], self.vlm.device, self.vlm.dtype)

    def _run(self, embeddings: Any, positions: Sequence[int], attention: Any) -> Any:
        import torch

        return self.decoder.logits(self.decoder.run(embeddings, torch.tensor(list(positions)), attention))

    def after(self, last: int, tree: DraftTree) -> Any:
        """Logits [1 + K, V] after the token and after each node of a tree behind it."""
        import torch

        from vlmfast.spec.attention import TreeAttention, row_parents

        start = self.kv.lengths[0]
        parts = [(0, 1 + len(tree), self.kv)]
        attention = TreeAttention(parts, [row_parents(1, tree)], self.vlm.device, self.vlm.dtype)
        positions = [start, *(start + depth for depth in tree.depths)]
        return self._run(self.decoder.embed(torch.tensor([last, *tree.tokens])), positions, attention)

    def pass_ms(self, num_rows: int) -> float:
        """Milliseconds of a pass over a chain, which leaves no trace."""
        import torch

        start = self.kv.lengths[0]
        embeddings = self.decoder.embed(torch.full((num_rows,), self.first))
        began = time.perf_counter()
        self._run(embeddings, range(start, start + num_rows), self._causal(num_rows))
        ms = (time.perf_counter() - began) * 1e3
        self.kv.truncate(start)
        return ms


def answer(decoding: Decoding, window: Window | None, guesses: int, max_tokens: int = 64) -> tuple[list[int], int, int]:
    """The greedy tokens of an answer, the passes it took, and the nodes computed in them."""
    import torch

    from vlmfast.options import Sampling
    from vlmfast.sample import Sampler
    from vlmfast.spec.tree import NO_DRAFT
    from vlmfast.spec.verify import verify

    sampler = Sampler(Sampling(), torch.tensor([0]), decoding.vlm.checkpoint.config.text.vocab_size)
    ends = decoding.vlm.checkpoint.eos_token_ids
    start = decoding.kv.lengths[0]
    tokens, num_passes, num_nodes = [decoding.first], 0, 0
    while len(tokens) < max_tokens and not ends & set(tokens):
        tree, edge = window.tree(tokens[-1], guesses) if window else (NO_DRAFT, [])
        logits = decoding.after(tokens[-1], tree)
        num_passes, num_nodes = num_passes + 1, num_nodes + len(tree)
        acceptance = verify(tree, logits, sampler)
        decoding.kv.compact(len(tree), acceptance.path)
        tokens += [*(tree.tokens[node] for node in acceptance.path), acceptance.token]
        if window:
            window.advance([int(logits[node + 1].argmax()) for node in edge])
    decoding.kv.truncate(start)
    end = next((at for at, token in enumerate(tokens) if token in ends), max_tokens)
    return tokens[:end], num_passes, num_nodes


def measure(options: Options) -> list[Row]:
    """One row a setting.

    Raises:
        SystemExit: the tokens are not those of plain decoding.
    """
    import torch
    from speculate import scene

    from vlmfast.vlm import VLM

    vlm = VLM.from_pretrained(options.pocket, dtype="float32", speculation="off", caching=False)
    quick = VLM.from_pretrained(options.pocket, dtype="bfloat16", speculation="off", caching=False)
    rows = []
    with torch.inference_mode():
        decodings = [
            Decoding(vlm, scene(index), "Describe the picture.") for index in range(3 if options.quick else 12)
        ]
        plain = [answer(one, None, 0)[0] for one in decodings]
        timed = Decoding(quick, scene(0), "Describe the picture.")
        for width, ngram, guesses in _SETTINGS:
            found = [answer(one, Window(width, ngram, one.prompt_ids), guesses) for one in decodings]
            if [tokens for tokens, _, _ in found] != plain:
                sys.exit(f"look-ahead {width, ngram, guesses}: the tokens are not those of plain decoding")
            passes = sum(number for _, number, _ in found)
            nodes = sum(number for _, _, number in found) / passes
            times: dict[int, list[float]] = {1: [], 1 + round(nodes): []}
            for _ in range(60):
                for number, samples in times.items():
                    samples.append(timed.pass_ms(number))
            one_ms, wide_ms = map(min, times.values())
            per_pass = sum(len(tokens) for tokens, _, _ in found) / passes
            row = Row(
                window=width, ngram=ngram, guesses=guesses, tokens_per_pass=per_pass, nodes=nodes, cost=wide_ms / one_ms
            )
            rows.append(row)
    return rows


def main() -> None:
    """Runs the script."""
    options = parse_options("Look-ahead decoding: what a pass would give, and what it would cost.")
    prepare(options)
    rows = measure(options)
    table = Table("W, N, G", "drafted a pass", "tokens a pass", "cost", "at best")
    for row in rows:
        cells = (f"{row.nodes:.1f}", f"{row.tokens_per_pass:.2f}", f"{row.cost:.2f}", f"{row.at_best:.2f}x")
        table.add_row(f"{row.window}, {row.ngram}, {row.guesses}", *cells)
    Console(stderr=options.json).print(table)
    if options.json:
        found = [{**asdict(row), "at_best_x": round(row.at_best, 3)} for row in rows]
        print(json.dumps({"lookahead_x": max(one["at_best_x"] for one in found), "rows": found} | environment()))


if __name__ == "__main__":
    main()

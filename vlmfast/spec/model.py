"""Drafts of a smaller model with the same tokenizer: it reads prompt and answer as the large one does, and goes on.

It keeps keys and values of its own. Positions are those of its own prompt, one after the other: a model with a tower
has its own visual tokens in a picture's place, a text model has nothing there, and the text behind moves up.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vlmfast.kv import SequenceKV
from vlmfast.sample import penalise, probabilities
from vlmfast.spec.attention import BatchAttention
from vlmfast.spec.batch import Asked
from vlmfast.spec.costs import typical
from vlmfast.spec.tree import NO_DRAFT, DraftTree
from vlmfast.types import ImageInput
from vlmfast_models.config import TextConfig
from vlmfast_models.geometry import TilePlan

_log = logging.getLogger(__name__)

_SAMPLES = 12
"""Times that `chain_ms` takes the medians of."""

Look: TypeAlias = Callable[[ImageInput, int, TilePlan], tuple[list[int], list[int], Tensor]]
"""(picture, pictures in all, the target's plan) -> its token ids, the places of visual tokens among them, and these,
[N, E]."""


@dataclass(slots=True, kw_only=True)
class _State:
    """What is kept of a sequence. `kv` holds `num_prompt` tokens of prompt, then those of `fed`."""

    asked: Asked
    kv: SequenceKV | None = None
    num_prompt: int = 0
    fed: list[int] = field(default_factory=list)
    """Tokens after the prompt: of the answer, and behind them drafted ones that may have been rejected."""
    seen: Tensor | None = None
    """Where a repetition penalty is asked for: bool [V], the tokens of prompt and answer."""
    reading_ms: float = 0.0
    is_broken: bool = False


class ModelDrafter:
    """Chains by a smaller decoder: its likeliest tokens, or its own draws where the answer is drawn without a seed.

    With a seed an answer repeats itself token for token only if the random numbers that the target uses up do not
    depend on what was drafted; so then, too, the likeliest tokens are drafted.

    Args:
        decoder: see `vlmfast_models.decoder.Decoder`; its vocabulary may be padded otherwise than the target's.
        config: the decoder's.
        vocab_size: the target's V.
        ends: tokens after which nothing is drafted.
        look: None leaves pictures out.
    """

    origin = "model"

    def __init__(
        self,
        decoder: Any,
        config: TextConfig,
        *,
        vocab_size: int,
        device: torch.device,
        dtype: torch.dtype,
        ends: frozenset[int],
        look: Look | None = None,
    ) -> None:
        self._decoder, self._config = decoder, config
        self._vocab_size = vocab_size
        self._device, self._dtype = device, dtype
        self._ends = ends
        self._look = look
        self._states: dict[int, _State] = {}
        self._first_samples: deque[float] = deque(maxlen=_SAMPLES)
        self._further_samples: deque[float] = deque(maxlen=_SAMPLES)
        self._generator = torch.Generator()
        self._generator.seed()

    def chain_ms(self, length: int) -> float:
        """Typical time of so many tokens: of the first, which reads what was accepted, and of each after it."""
        known = [typical(samples) for samples in (self._first_samples, self._further_samples) if samples]
        return known[0] + (length - 1) * known[-1] if known and length else 0.0

    def begin(self, seq_id: int, asked: Asked) -> None:
        """A new sequence; nothing is computed yet."""
        self._states[seq_id] = _State(asked=asked)

    def end(self, seq_id: int) -> None:
        """Drops keys and values."""
        self._states.pop(seq_id, None)

    def reading_ms(self, seq_id: int) -> float:
        """Time spent on the prompt and its pictures."""
        state = self._states.get(seq_id)
        return state.reading_ms if state else 0.0

    @torch.inference_mode()
    def propose(self, wanted: Sequence[tuple[int, Sequence[int], int]]) -> list[DraftTree]:
        """A chain, or none, for each (seq_id, answer so far, most tokens)."""
        drafts: list[list[int]] = [[] for _ in wanted]
        proposals: list[list[Tensor]] = [[] for _ in wanted]
        active: list[int] = []
        parts: list[tuple[_State, list[int]]] = []
        budgets: list[int] = []
        for index, (seq_id, answer, budget) in enumerate(wanted):
            state = self._states[seq_id]
            self._read(state)
            if state.is_broken or state.kv is None:
                budgets.append(0)
                continue
            budgets.append(min(budget, state.kv.capacity - state.num_prompt - len(answer) + 1))
            if budgets[-1] > 0:
                active.append(index)
                parts.append((state, self._unread(state, answer)))
        is_first = True
        while active:
            started = time.perf_counter()
            more = self._go_on(parts, min(budgets[index] - len(drafts[index]) for index in active))
            if more is None:
                chosen = self._choose(parts, drafts, active, self._pass(parts))
                for index, (token, proposal) in zip(active, chosen, strict=True):
                    drafts[index].append(token)
                    if proposal is not None:
                        proposals[index].append(proposal)
            else:
                for index, tokens in zip(active, more, strict=True):
                    end = next((at + 1 for at, token in enumerate(tokens) if token in self._ends), None)
                    drafts[index] += tokens[:end]
            samples = self._first_samples if is_first and more is None else self._further_samples
            samples.append((time.perf_counter() - started) * 1e3 / (1 if more is None else len(more[0])))
            is_first = False
            states = {index: state for index, (state, _) in zip(active, parts, strict=True)}
            active = [i for i in active if drafts[i][-1] not in self._ends and len(drafts[i]) < budgets[i]]
            parts = [(states[index], [drafts[index][-1]]) for index in active]
        return [
            DraftTree.chain(draft, origin=self.origin, proposals=drawn) if draft else NO_DRAFT
            for draft, drawn in zip(drafts, proposals, strict=True)
        ]

    def _read(self, state: _State) -> None:
        """Computes a prompt that has not been."""
        if state.kv is not None or state.is_broken:
            return
        started = time.perf_counter()
        state.is_broken = True  # unless all goes well
        try:
            ids, places, tokens = self._prompt(state.asked)
        except Exception:  # a picture that this model can not take; the answer is written without
            _log.warning("the draft model can not read a prompt; nothing is drafted for it", exc_info=True)
            return
        capacity = min(len(ids) + state.asked.max_tokens - len(state.asked.prompt_ids), self._config.max_positions)
        if len(ids) >= capacity:
            return
        state.kv = SequenceKV(self._config, capacity, self._device, self._dtype)
        embeddings = self._decoder.embed(torch.tensor(ids, device=self._device))
        if places:
            embeddings[torch.tensor(places, device=self._device)] = torch.cat(tokens).to(embeddings.dtype)
        attention = BatchAttention([(0, len(ids), state.kv)], self._device, self._dtype)
        self._decoder.run(embeddings, torch.arange(len(ids), device=self._device), attention)
        state.num_prompt = len(ids)
        if state.asked.sampling.repetition_penalty != 1.0:
            state.seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            state.seen[torch.tensor(state.asked.prompt_ids, device=self._device)] = True
        state.is_broken = False
        state.reading_ms = (time.perf_counter() - started) * 1e3

    def _prompt(self, asked: Asked) -> tuple[list[int], list[int], list[Tensor]]:
        """The target's prompt with this model's own tokens for pictures: ids, places of visual tokens, and these."""
        ids: list[int] = []
        places: list[int] = []
        tokens: list[Tensor] = []
        position = 0
        for image, (start, end), plan in zip(asked.images, asked.places, asked.plans, strict=True):
            ids += asked.prompt_ids[position:start]
            position = end
            if self._look is not None:
                own_ids, own_places, visual = self._look(image, len(asked.images), plan)
                places += [len(ids) + place for place in own_places]
                ids += own_ids
                tokens.append(visual)
        return [*ids, *asked.prompt_ids[position:]], places, tokens

    def _unread(self, state: _State, answer: Sequence[int]) -> list[int]:
        """The tokens of the answer that must be computed, at least the last; what was rejected is forgotten."""
        assert state.kv is not None
        most = min(len(state.fed), len(answer) - 1)
        known = next((at for at in range(most) if state.fed[at] != answer[at]), most)
        state.kv.truncate(state.num_prompt + known)
        del state.fed[known:]
        if state.seen is not None:
            state.seen[torch.tensor(answer, device=self._device)] = True
        return list(answer[known:])

    def _pass(self, parts: Sequence[tuple[_State, list[int]]]) -> Tensor:
        """Logits [B, V] after the last of the tokens that each sequence is given."""
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        pages: list[tuple[int, int, SequenceKV]] = []
        for state, new in parts:
            assert state.kv is not None
            start = state.num_prompt + len(state.fed)
            positions += range(start, start + len(new))
            pages.append((len(ids), len(ids) + len(new), state.kv))
            ids += new
            last.append(len(ids) - 1)
        attention = BatchAttention(pages, self._device, self._dtype)
        embeddings = self._decoder.embed(torch.tensor(ids, device=self._device))
        hidden = self._decoder.run(embeddings, torch.tensor(positions, device=self._device), attention)
        for state, new in parts:
            state.fed += new  # not before: an interrupted pass has not happened
        if len(last) < len(ids):
            hidden = hidden[torch.tensor(last, device=self._device)]
        logits: Tensor = self._decoder.logits(hidden)[:, : self._vocab_size]
        missing = self._vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _go_on(self, parts: Sequence[tuple[_State, list[int]]], steps: int) -> list[list[int]] | None:
        """For each sequence the next `steps` tokens, in one call; None where it must go pass by pass."""
        if not all(len(new) == 1 and state.seen is None and _is_certain(state) for state, new in parts):
            return None
        pages = [state.kv for state, _ in parts if state.kv is not None]
        tokens = torch.tensor([new[0] for _, new in parts], device=self._device)
        starts = [state.num_prompt + len(state.fed) for state, _ in parts]
        positions = torch.tensor(starts, device=self._device)
        found = self._decoder.go_on(tokens, positions, pages, steps, self._vocab_size)
        if found is None:
            return None
        chains: list[list[int]] = found.T.tolist()
        for (state, new), chain in zip(parts, chains, strict=True):
            state.fed += [*new, *chain[:-1]]
        return chains

    def _choose(
        self, parts: Sequence[tuple[_State, list[int]]], drafts: list[list[int]], active: list[int], logits: Tensor
    ) -> list[tuple[int, Tensor | None]]:
        """The next token of each sequence, and the distribution it was drawn from if it was."""
        if all(state.seen is None and _is_certain(state) for state, _ in parts):
            return [(token, None) for token in logits.float().argmax(-1).tolist()]
        chosen: list[tuple[int, Tensor | None]] = []
        for (state, _), index, row in zip(parts, active, logits, strict=True):
            sampling = state.asked.sampling
            if state.seen is not None:
                seen = state.seen.clone()
                seen[torch.tensor(drafts[index], dtype=torch.int64, device=self._device)] = True
                row = penalise(row, seen, sampling.repetition_penalty)
            if _is_certain(state):
                chosen.append((int(row.float().argmax()), None))
                continue
            proposal = probabilities(row, sampling).cpu()
            chosen.append((int(torch.multinomial(proposal, 1, generator=self._generator)), proposal))
        return chosen


def _is_certain(state: _State) -> bool:
    sampling = state.asked.sampling
    return sampling.temperature == 0.0 or sampling.seed is not None

"""Held-out accuracy during training: batched greedy answers of the training network itself.

The runtime's own answers are what `score` measures; this is the quick look that needs no finished checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vlmfast.train.attention import CachedAttention, fast_on_cpu
from vlmfast.train.dense import normalised
from vlmfast.train.frames import Frames
from vlmfast.train.joint import merged
from vlmfast.train.questions import Question
from vlmfast.train.tally import Tally
from vlmfast.train.tokens import END_OF_TURN, PromptTokens
from vlmfast_models.families.idefics3 import Idefics3

_MAX_ANSWER_TOKENS = 80


def held_out_questions(frames: Frames, count: int) -> list[tuple[int, Question]]:
    """(frame number, question): every kind the scene allows, the same ones on every call."""
    return [(number, question) for number in range(count) for question in frames.source.scored_questions(number)]


@torch.no_grad()
def evaluate(
    model: Idefics3,
    tokens: PromptTokens,
    frames: Frames,
    device: torch.device,
    *,
    count: int = 96,
    batch_size: int = 64,
    global_only: bool = False,
) -> Tally:
    """Accuracy for each kind over the first `count` scenes of held-out frames, or over their global frames alone."""
    asked = held_out_questions(frames, count)
    with torch.autocast(device.type, torch.bfloat16), fast_on_cpu(device):
        pixels = torch.from_numpy(np.array(frames.pixels[:count, -1:] if global_only else frames.pixels[:count])).to(
            device
        )
        visual = torch.stack([model.encode(normalised(picture)).flatten(0, 1) for picture in pixels])  # [C, F * N, E]
        opening = tokens.opening(frames.global_plan if global_only else frames.plan)
        answered = []
        # Questions of like length side by side: less padding.
        asked.sort(key=lambda pair: (len(pair[1].answer), pair[0]))
        for start in range(0, len(asked), batch_size):
            part = asked[start : start + batch_size]
            prefixes = [opening + tokens.turns(question) for _, question in part]
            texts = answer(model, tokens, visual[[number for number, _ in part]], prefixes)
            answered += [(question, text) for (_, question), text in zip(part, texts, strict=True)]
    return Tally.of(answered)


def answer(model: Idefics3, tokens: PromptTokens, visual: Tensor, prefixes: Sequence[Sequence[int]]) -> list[str]:
    """Greedy answers to one question about each picture: its visual tokens [B, N, E] and the ids up to the answer."""
    lengths = torch.tensor([len(prefix) for prefix in prefixes], device=visual.device)
    longest = int(lengths.max())
    ids = torch.tensor([[*prefix, *[0] * (longest - len(prefix))] for prefix in prefixes], device=visual.device)
    cache = CachedAttention(len(prefixes), longest + _MAX_ANSWER_TOKENS)
    positions = torch.arange(longest, device=visual.device).expand(len(prefixes), -1)
    hidden = merged(model, ids, visual).flatten(0, 1)
    hidden = model.decoder.run(hidden, positions.flatten(), cache.at(positions)).view(len(prefixes), longest, -1)
    last = hidden[torch.arange(len(prefixes)), lengths - 1]  # [B, E]
    end = tokens.token_id(END_OF_TURN)
    produced: list[Tensor] = []
    finished = torch.zeros(len(prefixes), dtype=torch.bool, device=visual.device)
    for offset in range(_MAX_ANSWER_TOKENS):
        token = model.decoder.logits(last).argmax(-1)
        produced.append(token)
        finished |= token == end
        if finished.all():
            break
        at = (lengths + offset)[:, None]
        embedded = model.decoder.embed(token).to(torch.bfloat16)
        last = model.decoder.run(embedded, at.flatten(), cache.at(at))
    rows = torch.stack(produced, dim=1).tolist()
    return [tokens.decode(row[: row.index(end)] if end in row else row) for row in rows]

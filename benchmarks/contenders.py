"""Ours and transformers behind one interface, the checkpoints they share, and the check that they agree.

Both load the same folder in the same dtype and answer the same question greedily, batch 1. transformers runs as its
users run it: processor call, then `generate` with sdpa attention.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlmfast.options import Sampling
from vlmfast.testing import SMOLVLM_256M, random_checkpoint
from vlmfast.vlm import VLM

PROMPT = "What is in the picture?"
PHOTOS = Path(__file__).resolve().parents[1] / "assets" / "photos"
PICTURE_SIZE = (640, 480)
BF16_TOLERANCE = 0.02
"""Largest allowed (best logit - logit of our token) / |best logit| in bfloat16: about five roundings of 2^-8."""


class DisagreementError(Exception):
    """The two contenders do not compute the same; timing them would mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One answer and its clock, in milliseconds from the picture and prompt in hand."""

    token_ids: list[int]
    num_prompt_tokens: int
    first_token_ms: float
    total_ms: float

    @property
    def ms_per_token(self) -> float:
        """Mean time of the tokens after the first."""
        return (self.total_ms - self.first_token_ms) / (len(self.token_ids) - 1)


class Ours:
    """vlmfast, computing every picture and every token itself: nothing kept, nothing drafted."""

    def __init__(self, folder: Path, dtype: torch.dtype | str = torch.bfloat16) -> None:
        name = str(dtype).removeprefix("torch.")
        self.vlm = VLM.from_pretrained(folder, device="cpu", dtype=name, caching=False, speculation="off")

    def run(self, picture: Image.Image, num_tokens: int) -> Run:
        """Answers with `num_tokens` tokens."""
        started = time.perf_counter()
        answer = self.vlm.describe(picture, PROMPT, sampling=Sampling(max_new_tokens=num_tokens))
        total_ms = (time.perf_counter() - started) * 1e3
        return Run(
            token_ids=list(answer.token_ids),
            num_prompt_tokens=answer.usage.prompt_tokens,
            first_token_ms=answer.timings.first_token_ms,
            total_ms=total_ms,
        )


class _FirstTokenClock:
    """A streamer for `generate` that notes when the first new token comes (the prompt is put first)."""

    def __init__(self) -> None:
        self._num_puts = 0
        self.first_token: float = 0.0

    def put(self, value: torch.Tensor) -> None:
        self._num_puts += 1
        if self._num_puts == 2:
            self.first_token = time.perf_counter()

    def end(self) -> None:
        """Called by `generate` at its end."""


class Transformers:
    """transformers' processor and `generate`."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self._processor = AutoProcessor.from_pretrained(folder)
        self._model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self._dtype = dtype

    def run(self, picture: Image.Image, num_tokens: int) -> Run:
        """Answers with `num_tokens` tokens."""
        clock = _FirstTokenClock()
        started = time.perf_counter()
        inputs = self._inputs(picture)
        output = self._model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, streamer=clock)
        ended = time.perf_counter()
        num_prompt = inputs["input_ids"].shape[1]
        return Run(
            token_ids=output[0, num_prompt:].tolist(),
            num_prompt_tokens=num_prompt,
            first_token_ms=(clock.first_token - started) * 1e3,
            total_ms=(ended - started) * 1e3,
        )

    def num_prompt_tokens(self, picture: Image.Image) -> int:
        """Length of the prompt, visual tokens included."""
        return int(self._inputs(picture)["input_ids"].shape[1])

    @torch.inference_mode()
    def gaps(self, picture: Image.Image, token_ids: list[int]) -> torch.Tensor:
        """How far each token is from the likeliest after those before it: (best - its logit) / |best|, [T]."""
        inputs = self._inputs(picture)
        answer = torch.tensor([token_ids])
        inputs["input_ids"] = torch.cat((inputs["input_ids"], answer), 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        logits = self._model(**inputs).logits[0, -len(token_ids) - 1 : -1].float()  # [T, V]
        best = logits.amax(-1)
        return (best - logits.gather(1, answer.T)[:, 0]) / best.abs()

    def _inputs(self, picture: Image.Image) -> dict[str, Any]:
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}]
        text = self._processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = self._processor(text=text, images=[picture], return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
        return dict(inputs)


def fresh_picture(index: int, size: tuple[int, int] = PICTURE_SIZE) -> Image.Image:
    """A picture never seen before: a photograph, randomly cropped, resized, with a little noise. Same for an index."""
    photos = sorted(PHOTOS.glob("*.jpg"))
    rng = np.random.default_rng(index)
    with Image.open(photos[index % len(photos)]) as photo:
        width, height = photo.size
        left, top = int(rng.integers(0, width // 5)), int(rng.integers(0, height // 5))
        cropped = photo.convert("RGB").crop((left, top, left + width * 4 // 5, top + height * 4 // 5)).resize(size)
    pixels = np.asarray(cropped, np.int16) + rng.integers(-3, 4, (size[1], size[0], 3), np.int16)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def smolvlm_checkpoint(cache: Path) -> Path:
    """A random bfloat16 checkpoint of SmolVLM-256M's shape below `cache`, made on first use (15 s, 500 MB)."""
    shape_id = hashlib.sha256(repr(SMOLVLM_256M).encode()).hexdigest()[:8]
    folder = cache / f"smolvlm-256m-random-{shape_id}"
    if not (folder / "processor_config.json").is_file():  # the file that is written last
        random_checkpoint(folder, SMOLVLM_256M, dtype=torch.bfloat16)
    return folder


def variant(folder: Path, target: Path, *, longest_edge: int | None = None) -> Path:
    """The same checkpoint at `target` (weights linked), made to never end an answer early, and to size pictures so.

    The end-of-answer id is set beyond the vocabulary: greedy decoding then gives the asked number of tokens on both
    sides, without an option that only one side has.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        link = target / file.name
        link.unlink(missing_ok=True)
        if file.is_file():
            link.symlink_to(file.resolve())
    vocab_size = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    _rewrite(target / "generation_config.json", {"eos_token_id": vocab_size})
    if longest_edge is not None:
        for name in ("preprocessor_config.json", "processor_config.json"):
            if (target / name).is_file():
                values = json.loads((target / name).read_text())
                part = values.get("image_processor", {}) if name == "processor_config.json" else values
                part["size"] = {"longest_edge": longest_edge}
                _rewrite(target / name, values)
    return target


def verify(ours: Ours, theirs: Transformers, picture: Image.Image, num_tokens: int, tolerance: float) -> str:
    """Says how far the two agree on a picture: prompts as long, and each of our tokens transformers' best or near it.

    transformers reads prompt and our answer in one pass; at every step our token must be its likeliest, or as likely
    within `tolerance` (relative to the best logit). At tolerance 0 the token sequences of both must be identical.

    Raises:
        DisagreementError: they do not agree.
    """
    mine = ours.run(picture, num_tokens)
    if len(mine.token_ids) != num_tokens:
        raise DisagreementError(f"ours stopped after {len(mine.token_ids)} of {num_tokens} tokens")
    num_prompt = theirs.num_prompt_tokens(picture)
    if mine.num_prompt_tokens != num_prompt:
        raise DisagreementError(f"prompts differ: ours has {mine.num_prompt_tokens} tokens, theirs {num_prompt}")
    if tolerance == 0.0:
        expected = theirs.run(picture, num_tokens).token_ids
        if mine.token_ids != expected:
            raise DisagreementError(f"tokens differ: ours {mine.token_ids}, theirs {expected}")
        return f"{num_tokens} tokens equal after a prompt of {num_prompt}"
    gaps = theirs.gaps(picture, mine.token_ids)
    worst = float(gaps.max())
    if not worst <= tolerance:
        raise DisagreementError(
            f"token {int(gaps.argmax())} of ours is {worst:.2%} below the best logit, allowed {tolerance:.2%}"
        )
    return f"{int((gaps == 0).sum())}/{num_tokens} tokens best, worst gap {worst:.2%}, after a prompt of {num_prompt}"


def _rewrite(file: Path, changes: dict[str, Any]) -> None:
    """Replaces a JSON file (or the link to it) by its values with changes."""
    values = json.loads(file.read_text()) if file.is_file() else {}
    file.unlink(missing_ok=True)
    file.write_text(json.dumps(values | changes, indent=2))

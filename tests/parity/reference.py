"""transformers' own run of a checkpoint folder in float32: inputs, features, logits, greedy tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlmfast.verify.reference import Networks, Processor


class Reference:
    """transformers' networks and processor of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        networks = Networks(folder, device=torch.device("cpu"), dtype=torch.float32)
        self.model = networks.model
        self._processor = Processor(folder, networks.model_type)
        self._end_tokens = networks.end_tokens
        self.image_processor = self._processor.processor.image_processor

    def inputs(self, images: list[np.ndarray], question: str) -> dict[str, Tensor]:
        """input_ids, attention_mask, pixel_values (with pictures) of one question."""
        return self._processor.inputs([Image.fromarray(image) for image in images], question)

    @torch.inference_mode()
    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Visual tokens of all pictures, [N, E]."""
        inputs = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
        return torch.cat(list(self.model.get_image_features(**inputs).pooler_output))

    @torch.inference_mode()
    def logits(self, inputs: dict[str, Tensor]) -> Tensor:
        """[T, V]."""
        return self.model(**inputs).logits[0]

    @torch.inference_mode()
    def answer(self, inputs: dict[str, Tensor], num_tokens: int) -> tuple[int, ...]:
        """Greedy tokens, the end token not included."""
        out = self.model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        tokens = out[0, inputs["input_ids"].shape[1] :].tolist()
        end = next((index for index, token in enumerate(tokens) if token in self._end_tokens), len(tokens))
        return tuple(tokens[:end])

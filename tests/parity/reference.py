"""transformers' own run of a checkpoint folder: processor, features, logits, greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor


class Reference:
    """transformers' networks and processor of one folder, float32."""

    def __init__(self, folder: Path, model_class: Any = None) -> None:
        self.folder = folder
        model_class = model_class or transformers.Idefics3ForConditionalGeneration
        self.model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self.image_processor = transformers.Idefics3ImageProcessorPil.from_pretrained(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        config = self.model.config
        side = config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor
        self.processor = transformers.Idefics3Processor(
            self.image_processor,
            self.tokenizer,
            image_seq_len=side**2,
            chat_template=(folder / "chat_template.jinja").read_text(),
        )

    def inputs(self, images: list[np.ndarray], question: str) -> dict[str, Tensor]:
        """input_ids, attention_mask, pixel_values (with pictures) of one question."""
        content = [{"type": "image"} for _ in images] + [{"type": "text", "text": question}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        pictures = [Image.fromarray(image) for image in images] or None
        return dict(self.processor(text=text, images=pictures, return_tensors="pt", add_special_tokens=False))

    @torch.inference_mode()
    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Visual tokens of all pictures, [N, E]."""
        out = self.model.get_image_features(inputs["pixel_values"], inputs["pixel_attention_mask"])
        return torch.cat(list(out.pooler_output))

    @torch.inference_mode()
    def logits(self, inputs: dict[str, Tensor]) -> Tensor:
        """[T, V]."""
        return self.model(**inputs).logits[0]

    @torch.inference_mode()
    def answer(self, inputs: dict[str, Tensor], num_tokens: int) -> tuple[int, ...]:
        """Greedy tokens, the end token not included."""
        out = self.model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        tokens = out[0, inputs["input_ids"].shape[1] :].tolist()
        eos = self.model.generation_config.eos_token_id
        return tuple(tokens[: tokens.index(eos)] if eos in tokens else tokens)

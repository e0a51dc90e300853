"""The pocket's tokenizer: byte-level BPE over scene text and ordinary English, with the special tokens of SmolVLM.

Written as the files that `transformers.AutoTokenizer` reads. The text of a question around its picture is made from the
same chat template that the runtime uses, and a test holds the two together.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from vlmfast.train.questions import Question, ask_all
from vlmfast.train.scenes import Split, sample_scene, stream
from vlmfast.train.vocabulary import SIGN_CHARACTERS, SIGN_WORDS
from vlmfast_models.families.idefics3 import Idefics3
from vlmfast_models.geometry import TilePlan

START = "<|im_start|>"
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<end_of_utterance>"
FRAME = "<fake_token_around_image>"
IMAGE = "<image>"
GLOBAL = "<global-img>"
MAX_TILES_A_SIDE = 6

SPECIAL_TOKENS = (
    END_OF_TEXT,
    START,
    END_OF_TURN,
    FRAME,
    IMAGE,
    GLOBAL,
    *(
        f"<row_{row}_col_{column}>"
        for row in range(1, MAX_TILES_A_SIDE + 1)
        for column in range(1, MAX_TILES_A_SIDE + 1)
    ),
)

CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'] is string %}{{ ': ' + message['content'] }}{% else %}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

_CORPUS_SCENES = 6000
_CORPUS_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """Encodes the parts of a conversation about one picture."""

    tokenizer: Tokenizer

    def token_id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no token {token!r}; was it made by vlmfast.train.tokens?")
        return int(found)

    def opening(self, plan: TilePlan) -> list[int]:
        """Ids up to and with a picture of this plan: the part that all questions about it share."""
        return self.encode(f"{START}User:{Idefics3.placeholder(plan)}")

    def question(self, prompt: str, *, first: bool = True) -> list[int]:
        """Ids from behind the picture (or behind an earlier turn) to where the answer begins."""
        return self.encode(f"{'' if first else f'{chr(10)}User: '}{prompt}{END_OF_TURN}\nAssistant:")

    def answer(self, text: str) -> list[int]:
        """Ids of the answer with the end of its turn."""
        return self.encode(f" {text}{END_OF_TURN}")

    def turns(self, question: Question) -> list[int]:
        """Ids from behind the picture to where the question's answer begins: earlier turns with theirs, then it."""
        ids: list[int] = []
        for asked, told in question.turns[:-1]:
            ids += self.question(asked, first=not ids) + self.answer(told)
        return ids + self.question(question.prompt, first=not ids)

    def decode(self, ids: list[int]) -> str:
        """The text of generated ids, without special tokens and the space after "Assistant:"."""
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which special tokens count as such."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def train_tokenizer(vocab_size: int = 2048) -> Tokenizer:
    """A fresh tokenizer; the same on every run of one version of the scenes and of the tokenizers library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "bos_token": START,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "additional_special_tokens": [FRAME, IMAGE, END_OF_TURN],
    }
    settings = {
        **named,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Idefics3Processor",
        "model_max_length": max_positions,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", named)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids for `shape.model_config`."""
    prompt = PromptTokens(tokenizer=tokenizer)
    tokens = {"image": IMAGE, "bos": START, "eos": END_OF_TURN, "pad": END_OF_TEXT}
    return {role: prompt.token_id(token) for role, token in tokens.items()}


def _corpus() -> Iterator[str]:
    """Scene text, then the English of Python's own manual; sign words and characters so that each is few pieces."""
    rng = stream("tokenizer", _CORPUS_SEED)
    for index in range(_CORPUS_SCENES):
        for question in ask_all(sample_scene(_CORPUS_SEED, index, split=Split.TRAIN), rng):
            yield f"User: {question.prompt}\nUser:{question.prompt}\nAssistant: {question.answer}"
    yield from (f" {word}" for word in SIGN_WORDS for _ in range(20))
    yield from SIGN_CHARACTERS
    yield from pydoc_data.topics.topics.values()


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

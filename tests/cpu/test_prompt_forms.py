"""Prompts of other tokenizers and templates: Llama's spaces, beginning of text, mixed content, text-only templates."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import build, noise
from tokenizers import Tokenizer

from vlmfast import Sampling
from vlmfast.errors import InputError
from vlmfast.image.load import load_image
from vlmfast.prompt import Message, PromptBuilder
from vlmfast.testing import TINY_SHAPES
from vlmfast_models.families.llava import Llava

_ONE, _TWO = noise(61, 37), noise(20, 90)


@pytest.fixture(scope="module")
def llava(checkpoint_of: Callable[..., Path], load_vlm: Callable[..., Any]) -> Any:
    """A tiny LLaVA with a tokenizer like Llama's."""
    return load_vlm(checkpoint_of(TINY_SHAPES["llava"]))


def _decoded(vlm: Any, ids: Any) -> str:
    return str(vlm.checkpoint.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _builder(vlm: Any, template: str) -> PromptBuilder:
    return PromptBuilder(vlm.checkpoint.tokenizer, template, "<image>", Llava.placeholder)


def _plans(vlm: Any, *images: Any) -> list[Any]:
    return [vlm._vision.plan(image) for image in images]


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_the_text_begins_once(llava: Any, num_images: int) -> None:
    """Guards the beginning-of-text token that the tokenizer, not the template, puts first."""
    prompt, _ = build(llava, [_ONE] * num_images, "What?")
    bos = llava.checkpoint.tokenizer.bos_token_id
    assert prompt.ids[0] == bos and prompt.ids.count(bos) == 1
    written = _builder(llava, "<s>{{ messages[0]['content'][0]['text'] }}")
    assert written.build([Message(role="user", text="hi")], []).ids.count(bos) == 1


def test_the_text_begins_before_a_picture(llava: Any) -> None:
    """Guards a template whose first word is a picture: no space is put before the text behind it."""
    image = load_image(_ONE)
    message = Message(role="user", text="hi", images=(image,))
    prompt = _builder(llava, "<image>{{ messages[0]['content'][1]['text'] }}").build([message], _plans(llava, image))
    tokenizer = llava.checkpoint.tokenizer
    assert list(prompt.ids) == tokenizer("<image>" * prompt.spans[0].plan.n_tokens + "hi")["input_ids"]
    assert (prompt.spans[0].start, prompt.spans[0].end) == (1, 1 + prompt.spans[0].plan.n_tokens)


@given(
    text=st.lists(
        st.sampled_from(["<image>", "</s>", "<s>", "<unk>", "<", "image>", "s>", " ", "\n", "é", "▁", "\ue000", "a"])
    )
)
def test_typed_tokens_stay_text(llava: Any, text: list[str]) -> None:
    """Guards case 33 where the tokenizer has bytes for what it does not know: nothing typed is special, or lost."""
    typed = "x" + "".join(text)
    prompt, _ = build(llava, [], typed)
    special = [token for token in prompt.ids if token in set(llava.checkpoint.tokenizer.all_special_ids)]
    assert special == [llava.checkpoint.tokenizer.bos_token_id]
    assert _decoded(llava, prompt.ids) == f"<s> USER: {typed} ASSISTANT:".replace("▁", " ")


def _folding(vlm: Any, normalizer: Any, more: dict[str, Any] | None = None) -> Any:
    """The tokenizer with another normalizer, its added tokens looked for in normalized text, and more of them."""
    raw = json.loads(vlm.checkpoint.tokenizer.backend_tokenizer.to_str())
    raw["normalizer"] = normalizer
    added = [{**token, "normalized": True} for token in raw["added_tokens"]]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added += [
        {"id": len(vlm.checkpoint.tokenizer) + index, "content": content, **flags, **settings}
        for index, (content, settings) in enumerate((more or {}).items())
    ]
    tokenizer = copy.deepcopy(vlm.checkpoint.tokenizer)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps({**raw, "added_tokens": added}))
    return tokenizer


_NFKC = {"type": "NFKC"}
_LOWERS = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]}


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [
        (_NFKC, "＜image＞"),
        (_NFKC, "a＜ｉｍａｇｅ> and ＜/s＞</s> and <image>"),
        (_NFKC, "<imªge>"),
        (_NFKC, "＜image＞" * 9),
        (_LOWERS, "<IMAGE>"),
        (_LOWERS, "see <Imàge></S> there"),
    ],
)
def test_normalizers_make_no_special_tokens(llava: Any, normalizer: Any, text: str) -> None:
    """Guards case 33 where a normalizer runs before added tokens are looked for: what it folds stays text, too."""
    tokenizer = _folding(llava, normalizer)
    special = set(tokenizer.all_special_ids) | {llava.checkpoint.config.image_token_id}
    assert special & set(tokenizer.encode(text, add_special_tokens=False))  # without care it would become one
    builder = PromptBuilder(tokenizer, llava.checkpoint.chat_template, "<image>", Llava.placeholder)
    plain, prompt = (builder.build([Message(role="user", text=typed)], []) for typed in ("x", f"x{text}"))
    assert [token for token in prompt.ids if token in special] == [token for token in plain.ids if token in special]
    folded = tokenizer.backend_tokenizer.normalizer.normalize_str(f"x{text}")
    assert folded in tokenizer.decode(list(prompt.ids), clean_up_tokenization_spaces=False)


def test_a_special_token_of_one_character_is_refused(llava: Any) -> None:
    """Guards case 33 where nothing can be split: the error names the character; a word of one letter is no mark."""
    more = {"§": {"special": True}, "¶": {"special": False}}
    tokenizer = _folding(llava, _NFKC, more)
    builder = PromptBuilder(tokenizer, llava.checkpoint.chat_template, "<image>", Llava.placeholder)
    with pytest.raises(InputError, match=r"'§' \(U\+00A7\).*special token '§'.*leave it out"):
        builder.build([Message(role="user", text="after paragraph § 3")], [])
    assert tokenizer.convert_tokens_to_ids("¶") in builder.build([Message(role="user", text="a ¶ b")], []).ids


def test_long_prompts_are_not_warned_of(llava: Any) -> None:
    """Guards the console: a prompt that is too long is an error of ours, without a warning of transformers before."""
    tokenizer = copy.deepcopy(llava.checkpoint.tokenizer)
    tokenizer.model_max_length = 5
    logger = logging.getLogger("transformers.tokenization_utils_base")
    with mock.patch.object(logger, "warning") as warned:
        builder = PromptBuilder(tokenizer, llava.checkpoint.chat_template, "<image>", Llava.placeholder)
        assert len(builder.build([Message(role="user", text="word " * 50)], []).ids) > 50
        warned.assert_not_called()
        tokenizer.encode("word " * 50)
        warned.assert_called_once()  # the check can fail


def test_neighbouring_parts_do_not_make_a_token(llava: Any) -> None:
    """Guards mixed content: a special token can not be put together from two pieces of text."""
    parts = ["look: <ima", "ge> <", "/s", ">"]
    message = Message.mixed("user", parts)
    assert message.text == "".join(parts) and len(message.parts) == 1
    prompt = llava.build_prompt([message])
    assert llava.checkpoint.config.image_token_id not in prompt.ids
    assert llava.checkpoint.tokenizer.eos_token_id not in prompt.ids


def test_mixed_content_keeps_its_order(llava: Any) -> None:
    """Guards case 32 (InternVL 1065, vllm 15564): text-picture-text-picture."""
    one, two = load_image(_ONE), load_image(_TWO)
    message = Message.mixed("user", ["first", one, "then", two, "which?"])
    assert message.images == (one, two)
    prompt = llava.build_prompt([message])
    assert [span.digest for span in prompt.spans] == [one.digest, two.digest]
    first, second = prompt.spans
    assert _decoded(llava, prompt.ids[: first.start]).endswith("first ")
    assert _decoded(llava, prompt.ids[first.end : second.start]).strip() == "then"
    assert _decoded(llava, prompt.ids[second.end :]).strip() == "which? ASSISTANT:"
    swapped = llava.build_prompt([Message.mixed("user", ["first", two, "then", one, "which?"])])
    answers = {
        next(reversed(list(llava.answer_messages([item], sampling=Sampling(max_new_tokens=12))))).answer.token_ids
        for item in (message, Message.mixed("user", ["first", two, "then", one, "which?"]))
    }
    assert swapped.ids == prompt.ids and len(answers) == 2


def test_a_template_may_write_whole_placeholders(llava: Any) -> None:
    """Guards against expanding twice: a picture's tokens that are already there are taken as they are."""
    one, two = load_image(_ONE), load_image(_TWO)
    plans = _plans(llava, one, two)
    message = Message(role="user", text="hi", images=(one, two))
    short = _builder(llava, "a <image><image> b").build([message], plans)
    whole = "".join(Llava.placeholder(plan) for plan in plans)
    assert _builder(llava, f"a {whole} b").build([message], plans) == short
    for wrong in (f"a {whole}<image> b", f"a {whole[:-7]} b", f"a <image>{whole} b"):
        with pytest.raises(InputError, match="made room for"):
            _builder(llava, wrong).build([message], plans)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}|{% endfor %}",
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'].strip() + '|' }}{% endfor %}",
    ],
    ids=["prints", "adds"],
)
def test_templates_of_text_models_get_text(llava: Any, template: str) -> None:
    """Guards LLaVA folders whose template takes a string: pictures become `<image>` lines, nothing of Python shows."""
    image = load_image(_ONE)
    messages = [
        Message(role="user", text="hi <image>", images=(image,)),
        Message(role="assistant", text="yes"),
        Message.mixed("user", ["and", image]),
    ]
    prompt = _builder(llava, template).build(messages, _plans(llava, image, image))
    placeholder = Llava.placeholder(prompt.spans[0].plan)
    shown = _decoded(llava, prompt.ids).replace(placeholder, "[picture]")
    last = "and[picture]|" if "strip" in template else "and[picture]\n|"
    assert shown == f"<s> user: [picture]\nhi <image>|assistant: yes|user: {last}"


@pytest.mark.parametrize("model_type", sorted(TINY_SHAPES))
def test_every_family_answers(
    checkpoint_of: Callable[..., Path], load_vlm: Callable[..., Any], model_type: str
) -> None:
    """Guards case 25 and 35 for every family: tiny and long pictures, several of them, and a batch equals alone."""
    loaded = load_vlm(checkpoint_of(TINY_SHAPES[model_type]))
    questions = [([noise(1, 1)], "What?"), ([noise(2, 300), noise(61, 37)], "Which?"), (None, "Why?"), ([_TWO], "How?")]
    sampling = Sampling(max_new_tokens=8)
    streams = [loaded.stream(*question, sampling=sampling) for question in questions]
    together = [list(stream)[-1].answer for stream in streams]
    alone = [loaded.describe(*question, sampling=sampling) for question in questions]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [answer.usage.num_images for answer in alone] == [1, 2, 0, 1]

"""The table of what goes together: a test for every cell, and the docs' copy of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from oracle import check_idle, noise

from vlmfast import FastV, Reduce, Sampling, ToMe, Vision
from vlmfast.compose import Method, Setting, cell, check_layers, markdown
from vlmfast.errors import OptionError
from vlmfast.options import Batching, Caching
from vlmfast.spec.options import Speculation

_GREEDY = Sampling(max_new_tokens=10)
_PICTURE, _OTHER = noise(64, 61), noise(33, 64, 1)
_QUESTION = "What is in the picture?"

_VISIONS = {
    Method.TOME: Vision(tome=ToMe(r=0.3)),
    Method.REDUCE: Vision(reduce=Reduce("scope", keep=0.25)),
    Method.FASTV: Vision(fastv=FastV(layer=1, keep=0.25)),
    Method.RESOLUTION: Vision(resolution="low"),
}
_TOWER = "float32, int8 tower"
_ALL = Vision(resolution="auto", tome=ToMe(r=0.2), reduce=Reduce("diversity", keep=0.5), fastv=FastV(layer=2, keep=0.5))
_CASES = [pytest.param((vision, "float32"), id=str(method)) for method, vision in _VISIONS.items()] + [
    pytest.param((Vision(), "int8"), id="int8"),
    pytest.param((Vision(), "int4"), id="int4"),
    pytest.param((Vision(), _TOWER), id="int8 vision"),
    pytest.param((_ALL, "float32"), id="all"),
    pytest.param((_ALL, _TOWER), id="all and int8 vision"),
    pytest.param((_ALL, "int8"), id="all and int8"),
    pytest.param((_ALL, "int4"), id="all and int4"),
]


@pytest.fixture(params=_CASES)
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def vision(case: Any) -> Any:
    return case[0]


@pytest.fixture
def load(load_vlm: Callable[..., Any], case: Any) -> Callable[..., Any]:
    dtype = {"dtype": "float32", "vision_dtype": "int8"} if case[1] == _TOWER else {"dtype": case[1]}
    return lambda **options: load_vlm(**dtype, **options)


@pytest.fixture
def plain(load: Callable[..., Any]) -> Any:
    """Nothing is kept between requests."""
    return load(caching=False)


def _ask(vlm: Any, images: Any, vision: Vision | None, question: str = _QUESTION) -> Any:
    return vlm.describe(images, question, sampling=_GREEDY, vision=vision)


def test_feature_cache(load: Callable[..., Any], plain: Any, vision: Vision) -> None:
    """Whole, then otherwise, then so again: features of the wrong kind are never reused, and the right ones are."""
    vlm = load(caching=Caching(features_disk_bytes=0, prefix_ram_bytes=0))
    others = [None, Vision(tome=ToMe(r=0.1)), Vision(reduce=Reduce("scope", keep=0.5)), vision]
    for other in (*others, *others):
        assert _ask(vlm, _PICTURE, other).token_ids == _ask(plain, _PICTURE, other).token_ids
    usage = _ask(vlm, _PICTURE, vision, "Which?").usage
    assert (usage.images_encoded, usage.images_from_ram) == (0, 1)
    assert vlm.counters["features.misses"] == len({(other.tome, other.resolution) for other in map(_given, others)})
    check_idle(vlm)


def test_prefix_cache(load: Callable[..., Any], plain: Any, vision: Vision) -> None:
    """Keys and values made one way are never found by a request made another way."""
    vlm = load(caching=Caching(features_disk_bytes=0))
    others = [None, Vision(reduce=Reduce("scope", keep=0.5)), Vision(reduce=Reduce("random", keep=0.25)), vision]
    for other, question in product((*others, *others), (_QUESTION, "What colour?")):
        answer = _ask(vlm, _PICTURE, other, question)
        assert answer.token_ids == _ask(plain, _PICTURE, other, question).token_ids
    cached = _ask(vlm, _PICTURE, vision, "Which one?").usage.cached_tokens
    assert (cached == 0) == (vision.fastv is not None), "FastV computes anew; the others reuse the picture"
    check_idle(vlm)


def test_chat(load: Callable[..., Any], plain: Any, vision: Vision) -> None:
    """Case 44: turn 2 after a reduced turn 1, a picture in turn 3; with prefix hits as without."""
    vlm = load(caching=Caching(features_disk_bytes=0))
    answers = []
    for one in (plain, vlm):
        chat = one.chat(_PICTURE, vision=vision)
        turns = [chat.ask(_QUESTION, sampling=_GREEDY), chat.ask("What colour?", sampling=_GREEDY)]
        turns += [chat.ask("And this?", _OTHER, sampling=_GREEDY), chat.fork().ask("Which?", sampling=_GREEDY)]
        answers.append([turn.token_ids for turn in turns])
        if vision.fastv is not None:  # what the first turn's picture keeps does not change as the chat goes on
            kept = [[place for place in turn.kept_places if place < 60] for turn in turns]
            assert kept[0] == kept[1] == kept[2] == kept[3]
    assert answers[0] == answers[1]
    assert answers[0][0] == _ask(plain, _PICTURE, vision).token_ids
    check_idle(vlm)


def test_several_pictures(plain: Any, vision: Vision) -> None:
    """Order counts; a reducer cuts each picture by itself, FastV ranks all of a turn together."""
    questions = (_QUESTION, "What colour?", "Which one?")
    both, swapped = (
        [_ask(plain, images, vision, question) for question in questions]
        for images in ([_PICTURE, _OTHER], [_OTHER, _PICTURE])
    )
    assert [answer.token_ids for answer in both] != [answer.token_ids for answer in swapped]
    alone = [_ask(plain, image, vision).usage for image in (_PICTURE, _OTHER)]
    assert both[0].usage.visual_tokens == sum(usage.visual_tokens for usage in alone)
    keep = 1.0 if vision.fastv is None else vision.fastv.keep
    assert both[0].usage.visual_tokens_after == round(both[0].usage.visual_tokens * keep)


def _given(vision: Vision | None) -> Vision:
    return vision or Vision()


@pytest.mark.parametrize("max_step_tokens", [4096, 120])
def test_batch(load: Callable[..., Any], plain: Any, vision: Vision, max_step_tokens: int) -> None:
    """Each request of a batch answers as alone, beside plain ones and others, in steps with room for all or for one."""
    vlm = load(caching=False, batching=Batching(max_sequences=4, max_step_tokens=max_step_tokens))
    asked = [(_PICTURE, vision), (_OTHER, None), (_OTHER, vision), (None, vision), (_PICTURE, _VISIONS[Method.FASTV])]
    asked += [(_PICTURE, _VISIONS[Method.REDUCE]), (_PICTURE, None), (_PICTURE, vision)]
    streams = [vlm.stream(image, _QUESTION, sampling=_GREEDY, vision=other) for image, other in asked]
    answers = [list(stream)[-1].answer for stream in streams]
    for (image, other), answer in zip(asked, answers, strict=True):
        assert answer.token_ids == _ask(plain, image, other).token_ids
    check_idle(vlm)


def test_speculation(load: Callable[..., Any], plain: Any, vision: Vision) -> None:
    """Drafts change nothing: asked twice, so that earlier answers are drafted from, alone and in a batch."""
    vlm = load(speculation=Speculation(drafter="suffix", adaptive=False))
    asked = [(_PICTURE, vision), (_OTHER, None), (_PICTURE, _VISIONS[Method.FASTV]), ([_OTHER, _PICTURE], vision)]
    drafted = 0
    for _ in range(2):
        streams = [vlm.stream(image, _QUESTION, sampling=_GREEDY, vision=other) for image, other in asked]
        answers = [list(stream)[-1].answer for stream in streams]
        answers += [_ask(vlm, image, other) for image, other in asked]
        for (image, other), answer in zip([*asked, *asked], answers, strict=True):
            assert answer.token_ids == _ask(plain, image, other).token_ids
            drafted += answer.usage.draft_tokens
    assert drafted > 0
    check_idle(vlm)


def test_captions(plain: Any, vision: Vision) -> None:
    rows = list(plain.caption([_PICTURE, _OTHER], _QUESTION, sampling=_GREEDY, vision=vision))
    assert [row.token_ids for row in rows] == [_ask(plain, image, vision).token_ids for image in (_PICTURE, _OTHER)]


def test_every_setting_has_its_test_and_every_cell_its_words() -> None:
    tests = {
        Setting.FEATURE_CACHE: test_feature_cache,
        Setting.PREFIX_CACHE: test_prefix_cache,
        Setting.CHAT: test_chat,
        Setting.PICTURES: test_several_pictures,
        Setting.BATCH: test_batch,
        Setting.SPECULATION: test_speculation,
        Setting.OTHERS: test_chat,  # the cases "all"
    }
    assert set(tests) == set(Setting)
    assert {name for method in Method for name in method.split(", ")} <= {case.id for case in _CASES}
    assert all(len(cell(method, setting)) > 10 for method, setting in product(Method, Setting))


def test_layers() -> None:
    check_layers(FastV(layer=3), 3)
    with pytest.raises(OptionError, match="layer=4"):
        check_layers(FastV(layer=4), 3)


def test_the_docs_have_this_table() -> None:
    """Made by the command that the page names."""
    page = Path(__file__).parents[2] / "docs" / "compose.md"
    assert page.read_text(encoding="utf-8") == markdown()

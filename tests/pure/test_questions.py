"""Scenes, questions and the checking of answers: decided without torch, and the same on every run."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from vlmfast.train.answers import is_right, things_in
from vlmfast.train.questions import KINDS, Question, ask, ask_all
from vlmfast.train.scenes import Kind, Scene, Split, sample_scene, stream
from vlmfast.train.tally import Share, Tally
from vlmfast.train.vocabulary import COLOURS, PLACES, SHAPES, counted, joined, sticker_names

NUM_SCENES = 400


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [sample_scene(5, index) for index in range(NUM_SCENES)]


@pytest.fixture(scope="module")
def questions(scenes: list[Scene]) -> list[Question]:
    return [question for scene in scenes for question in ask_all(scene, stream("test", scene.index))]


def test_a_scene_is_a_function_of_its_key(scenes: list[Scene]) -> None:
    assert scenes[17] == sample_scene(5, 17)
    assert scenes[17] != sample_scene(6, 17)


def test_training_and_held_out_scenes_of_one_seed_differ() -> None:
    """Guards the promise that no seed makes them meet: the split is in the key of every stream."""
    train = [sample_scene(5, index, split=Split.TRAIN).things for index in range(50)]
    held_out = [sample_scene(5, index, split=Split.HELD_OUT).things for index in range(50)]
    assert not set(train) & set(held_out)


def test_twins_differ_by_one_name(scenes: list[Scene]) -> None:
    for left, right in zip(scenes[::2], scenes[1::2], strict=True):
        assert set(left.counts) - set(right.counts) == {left.swapped} == {right.absent}
        assert set(right.counts) - set(left.counts) == {right.swapped} == {left.absent}
        assert [thing.box for thing in left.things] == [thing.box for thing in right.things]
        assert left.background == right.background


def test_things_lie_inside_and_shapes_stand_out(scenes: list[Scene]) -> None:
    for scene in scenes:
        assert 1 <= len(scene.things) <= 4
        for thing in scene.things:
            assert all(-0.001 <= edge <= 1.001 for edge in thing.box)
            assert thing.colour != scene.background
        assert list(scene.things) == sorted(scene.things, key=lambda thing: thing.cell)


def test_every_kind_every_place_and_every_look_occurs(scenes: list[Scene], questions: list[Question]) -> None:
    assert {question.kind for question in questions} == set(KINDS)
    assert {thing.place for scene in scenes for thing in scene.things} == set(PLACES)
    assert {thing.kind for scene in scenes for thing in scene.things} == set(Kind)


def test_every_answer_is_right_by_its_own_check(questions: list[Question]) -> None:
    wrong = [question for question in questions if not is_right(question.kind, question.expect, question.answer)]
    assert not wrong


def test_answers_of_other_scenes_are_mostly_wrong(scenes: list[Scene], questions: list[Question]) -> None:
    """A check that accepts anything would pass the test above. Two scenes may agree by chance, seldom on `what`."""
    whats = [question for question in questions if question.kind == "what"]
    swapped = [is_right("what", q.expect, other.answer) for q, other in pairwise(whats)]
    assert sum(swapped) < 0.02 * len(swapped)


def test_yes_and_no_are_balanced(questions: list[Question]) -> None:
    """Binomial with n = 400: outside 40-60 % once in 16,000 sets of scenes; the seed is fixed."""
    yes = [question.expect["exists"] for question in questions if question.kind == "exists"]
    assert 0.4 < sum(yes) / len(yes) < 0.6


def test_exists_never_contradicts_the_scene(scenes: list[Scene]) -> None:
    for scene in scenes[:100]:
        for attempt in range(5):
            question = ask(scene, "exists", stream("exists", scene.index, attempt))
            assert question is not None
            named = set(things_in(question.prompt))
            assert len(named) == 1
            assert (named <= set(scene.counts)) == question.expect["exists"]


def test_sign_questions_need_a_sign(scenes: list[Scene]) -> None:
    for scene in scenes:
        has_sign = any(thing.kind is Kind.SIGN for thing in scene.things)
        assert (ask(scene, "sign", stream("sign")) is not None) == has_sign


@pytest.mark.parametrize(
    ("kind", "expect", "text", "right"),
    [
        ("what", {"things": {"dog": 1, "red circle": 1}}, "I see a red circle and a dog.", True),
        ("what", {"things": {"dog": 1, "red circle": 1}}, "There is a dog and a blue circle.", False),
        ("what", {"things": {"dog": 1}}, "There is a dog and a cat.", False),
        ("what", {"things": {"dog": 2}}, "There are two dogs.", True),
        ("what", {"things": {"dog": 2}}, "There is a dog.", False),
        ("what", {"things": {"fish": 1}}, "A fish!", True),
        ("what", {"things": {"bus": 1, "sign": 1}}, "There is a bus and a sign. The sign says CAR.", True),
        ("what", {"things": {"dog": 1}}, "", False),
        ("colour", {"colour": "grey"}, "It is gray.", True),
        ("colour", {"colour": "red"}, "It is red or blue.", False),
        ("colour", {"colour": "red"}, "It is nice.", False),
        ("exists", {"exists": True}, "Yes.", True),
        ("exists", {"exists": False}, "There is none.", False),
        ("exists", {"exists": False}, "No, there is no dog.", True),
        ("count", {"number": 2}, "2", True),
        ("count", {"number": 2}, "There are two or three dogs.", False),
        ("count", {"number": 0}, "There are no dogs.", True),
        ("where", {"place": "top left"}, "In the upper left corner.", True),
        ("where", {"place": "left"}, "The dog is at the top left.", False),
        ("where", {"place": "middle"}, "In the centre.", True),
        ("where", {"place": "top"}, "At the top middle.", True),
        ("where", {"place": "left"}, "At the middle left.", True),
        ("sign", {"text": "STOP"}, 'The sign says "STOP".', True),
        ("sign", {"text": "STOP"}, "STOP", True),
        ("sign", {"text": "STOP"}, "The sign says STEP.", False),
    ],
)
def test_checks(kind: str, expect: dict[str, object], text: str, right: bool) -> None:
    assert is_right(kind, expect, text) is right


CAPTION = {"things": {"dog": 1, "sign": 1}, "places": {"dog": "top left", "sign": "bottom"}, "background": "blue"}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("A dog at the top left and a sign at the bottom. The background is blue. The sign says GO.", True),
        ("A dog and a sign.", True),
        ("A dog at the top right and a sign at the bottom.", False),
        ("A dog at the top left and a sign at the bottom. The background is red.", False),
        ("On a blue background there is a dog at the top left.", False),
        ("A dog at the top left and a sign at the bottom. The sign says NO.", False),
    ],
)
def test_caption_check(text: str, right: bool) -> None:
    assert is_right("caption", {**CAPTION, "text": "GO"}, text) is right


def test_english() -> None:
    assert joined(["a", "b", "c"]) == "a, b and c"
    assert counted("butterfly", 2) == "two butterflies"
    assert counted("orange circle", 1) == "an orange circle"


def test_names_are_told_apart() -> None:
    """A sticker called like a colour or a shape, or twice, would make answers ambiguous."""
    names = [*sticker_names(), *COLOURS, *SHAPES, "sign", "thing", "background"]
    assert [name for name, number in Counter(names).items() if number > 1] == []


def test_wilson_interval() -> None:
    """Reference values: Wilson score interval of 81 out of 263 (Newcombe 1998, table I)."""
    low, high = Share(num_right=81, num_asked=263).interval
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def test_tally_counts_each_kind(questions: list[Question]) -> None:
    tally = Tally.of((question, question.answer if question.kind != "count" else "") for question in questions)
    assert tally.shares["what"].accuracy == 1.0
    assert tally.shares["count"].num_right == 0
    assert tally.shares["what"].num_asked == NUM_SCENES


def test_no_torch_is_needed() -> None:
    code = "import sys, vlmfast.train.tally, vlmfast.train.score; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

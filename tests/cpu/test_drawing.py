"""Signs, pages, photographs and fonts as they are drawn, and the command that scores answers about them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from vlmfast.cli.scenes import app
from vlmfast.prompt import Message
from vlmfast.train import easy_vqa
from vlmfast.train.answers import is_right
from vlmfast.train.lettering import font
from vlmfast.train.pages import FONTS, Page
from vlmfast.train.questions import KINDS, Question
from vlmfast.train.render import Rendering, render
from vlmfast.train.scenes import PAGES, Kind, Scene, Split, sample_scene
from vlmfast.train.score import answered
from vlmfast.train.vocabulary import CHARACTERS, PHOTOGRAPH, PHOTOGRAPHS, sticker_names


def read_marked(characters: np.ndarray) -> str:
    """The characters of one upright line, from left to right, as the map has them; repeated ones once."""
    columns = [np.bincount(column[column > 0]).argmax() for column in characters.T if column.any()]
    values = [columns[0], *(right for left, right in pairwise(columns) if left != right)]
    return "".join(CHARACTERS[value - 1] for value in values)


def without_runs(text: str) -> str:
    return "".join(character for left, character in pairwise(f" {text}") if character != left)


def test_every_font_has_every_character() -> None:
    """A missing glyph would be drawn as a box, and taught as a letter."""
    for name in FONTS:
        for bold in (False, True):
            face = font(name, 40, bold)
            missing = bytes(face.getmask("\ue000"))
            assert all(bytes(face.getmask(character)) != missing for character in CHARACTERS)


def test_a_page_is_marked_as_it_reads() -> None:
    for index in range(40):
        scene = sample_scene(3, index, style=PAGES)
        assert scene.page is not None
        rendering = render(scene)
        assert not rendering.owners.any()
        marked = {CHARACTERS[value - 1] for value in np.unique(rendering.characters) if value}
        assert marked == set("".join(scene.page.words))
        if len(scene.page.lines) == 1 and scene.page.turn == 0.0:
            assert read_marked(rendering.characters) == without_runs("".join(scene.page.words))


def test_an_upright_line_is_marked_in_order() -> None:
    scene = sample_scene(3, 0, style=PAGES)
    page = Page(lines=("Seven dogs, 42!",), font="pt-serif", bold=False, size=0.09, leading=1.2, centred=True, turn=0.0)
    straight = Scene(**{name: getattr(scene, name) for name in scene.__slots__ if name != "page"}, page=page)
    assert read_marked(render(straight).characters) == "Sevendogs,42!"


def test_page_letters_are_dark_on_light() -> None:
    for index in range(20):
        rendering = render(sample_scene(4, index, style=PAGES))
        grey = np.asarray(rendering.picture.convert("L"), dtype=float)
        inked, bare = grey[rendering.characters > 0], grey[rendering.characters == 0]
        assert np.quantile(inked, 0.1) < np.median(bare) - 60


def sign_renderings(count: int) -> list[tuple[Scene, Rendering]]:
    scenes = (sample_scene(3, index) for index in range(0, 400, 2))
    signed = [scene for scene in scenes if any(thing.kind is Kind.SIGN for thing in scene.things)]
    return [(scene, render(scene)) for scene in signed[:count]]


def test_signs_come_in_many_sizes() -> None:
    """Height of the marks (1.2 times that of the letters) at 512 pixels: from below 34 (17 in one tile) to above 60."""
    heights = []
    for scene, rendering in sign_renderings(30):
        rows = np.nonzero(rendering.characters.any(axis=1))[0]
        heights.append((rows[-1] - rows[0] + 1) * 512 / max(scene.width, scene.height))
    assert min(heights) < 34 and max(heights) > 60


def test_signs_are_marked_with_their_text() -> None:
    for scene, rendering in sign_renderings(30):
        text = next(thing.text for thing in scene.things if thing.kind is Kind.SIGN) or ""
        assert {CHARACTERS[value - 1] for value in np.unique(rendering.characters) if value} <= set(text)


def test_photographs_vary_and_repeat() -> None:
    scenes = [scene for scene in (sample_scene(3, index) for index in range(800)) if scene.background == PHOTOGRAPH]
    assert {scene.texture for scene in scenes} == set(PHOTOGRAPHS)
    picture = np.asarray(render(scenes[0]).picture)
    assert picture.std() > 5
    assert np.array_equal(picture, np.asarray(render(scenes[0]).picture))


def test_follow_ups_are_scored_only_by_who_can_chat() -> None:
    chats = []

    def chat(picture: object, before: tuple[tuple[str, str], ...], prompt: str) -> str:
        chats.append((before, prompt))
        return ""

    alone = [question for question, _ in answered(lambda picture, prompt: "", 3, 6)]
    both: list[Question] = [question for question, _ in answered(lambda picture, prompt: "", 3, 6, chat)]
    assert not any(question.before for question in alone)
    assert [question for question in both if not question.before] == alone
    assert chats == [(question.before, question.prompt) for question in both if question.before] != []


def test_unseen_things_are_drawn_but_never_named() -> None:
    from vlmfast.train.unseen import unseen_names, unseen_questions, unseen_scenes

    assert len(unseen_names()) == 24 and not set(unseen_names()) & set(sticker_names())
    kinds = set()
    for scene in islice(unseen_scenes(3), 30):
        stickers = {thing.name for thing in scene.things if thing.kind is Kind.STICKER}
        assert stickers <= set(unseen_names()) and stickers
        assert set(np.unique(render(scene).owners)) - {0} == set(range(1, len(scene.things) + 1))
        for question in unseen_questions(scene):
            kinds.add(question.kind)
            assert is_right(question.kind, question.expect, question.answer)
            assert not any(name in f"{question.prompt} {question.answer}" for name in stickers)
    assert {"colour", "exists", "count", "where"} <= kinds


class Parrot:
    """Stands in for a model: reads "come home" off every picture, and repeats the last turn of a chat."""

    def load_images(self, picture: object) -> tuple[object, ...]:
        return (picture,)

    def describe(self, picture: object, prompt: str) -> SimpleNamespace:
        return SimpleNamespace(text="come home")

    def answer_messages(self, messages: Sequence[Message]) -> Iterator[SimpleNamespace]:
        assert [message.role for message in messages] == ["user", "assistant", "user"]
        assert [len(message.images) for message in messages] == [1, 0, 0]
        yield SimpleNamespace(answer=None)
        yield SimpleNamespace(answer=SimpleNamespace(text=messages[1].text))


def test_score_shows_what_was_right_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmfast.cli.loading.load_model", lambda *args, **kwargs: Parrot())
    command = ["score", "--seed", "5", "--count", "20"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    kinds = json.loads(result.output)["kinds"]
    assert list(kinds) == [kind for kind in KINDS if kind in kinds]
    assert {"caption", "page", "follow"} <= set(kinds)
    assert kinds["caption"]["credit"]["counts"] == "things F1" and kinds["caption"]["credit"]["mean"] == 0
    assert 0 <= kinds["page"]["credit"]["low"] <= kinds["page"]["credit"]["mean"] < 0.5
    table = CliRunner().invoke(app, command).output
    for source in ("--unseen", "--easy-vqa"):
        if source == "--unseen" or find_spec("easy_vqa"):
            assert json.loads(CliRunner().invoke(app, [*command, source, "--json"]).output)["source"] == source[2:]
    assert CliRunner().invoke(app, [*command, "--unseen", "--easy-vqa"]).exit_code == 2
    assert "caption things F1" in table and "page words" in table and "\nall " in table


def test_easy_vqa_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "easy_vqa", None)
    from vlmfast.errors import InputError

    with pytest.raises(InputError, match="pip install easy-vqa"):
        easy_vqa.easy_pictures(Split.HELD_OUT)


def test_easy_vqa_splits() -> None:
    pytest.importorskip("easy_vqa")
    test = easy_vqa.easy_pictures(Split.HELD_OUT)
    assert len(test) == 1000 and test[0].open().size == (64, 64)
    questions = [question for picture in test for question in picture.questions]
    assert {question.kind for question in questions} == set(easy_vqa.KINDS)
    assert all(is_right(question.kind, question.expect, question.answer) for question in questions)
    train = easy_vqa.easy_pictures(Split.TRAIN)
    assert not {picture.path for picture in train} & {picture.path for picture in test}

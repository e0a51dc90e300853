"""Drawing, frames, tokens and packed rows of the pocket, and the commands around them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from vlmfast.cli.scenes import app
from vlmfast.train import shape
from vlmfast.train.alignment import NO_WORD, cell_words
from vlmfast.train.answers import is_right
from vlmfast.train.attention import CachedAttention, PackedAttention, spelled_out_attention
from vlmfast.train.dense import normalised
from vlmfast.train.evaluate import answer
from vlmfast.train.export import write_pocket
from vlmfast.train.frames import GRID, IGNORED, LABELS, num_classes, open_frames, patch_labels, picture_frames
from vlmfast.train.packing import IGNORED_TARGET, collate, pack
from vlmfast.train.questions import ask_all
from vlmfast.train.render import render
from vlmfast.train.scenes import CROWDED, PAGES, Kind, Split, sample_scene, stream
from vlmfast.train.showcase import showcase_scenes
from vlmfast.train.sources import SceneSource
from vlmfast.train.stages import new_pocket
from vlmfast.train.tokens import IMAGE, PromptTokens, train_tokenizer, write_tokenizer
from vlmfast.train.truth import scene_questions
from vlmfast_models.config import PreprocessConfig
from vlmfast_models.families.idefics3 import Idefics3
from vlmfast_models.geometry import TilePlan, idefics3_plan

PREPROCESS = PreprocessConfig.from_hf(shape.preprocessor_config(shape.POCKET_SIZE))
PLAN = idefics3_plan(512, 512, PREPROCESS, tokens_per_tile=64)


@pytest.fixture(scope="module")
def tokens() -> PromptTokens:
    return PromptTokens(tokenizer=train_tokenizer())


def test_a_picture_is_a_function_of_its_scene() -> None:
    scene = sample_scene(3, 8)
    first, second = render(scene), render(scene)
    assert first.picture.size == (scene.width, scene.height)
    assert np.array_equal(np.asarray(first.picture), np.asarray(second.picture))
    other = np.asarray(render(sample_scene(4, 8)).picture.resize((64, 64)), dtype=int)
    assert np.abs(other - np.asarray(first.picture.resize((64, 64)), dtype=int)).mean() > 5


def test_every_thing_is_seen_inside_its_box() -> None:
    for index in range(40):
        scene = sample_scene(3, index)
        owners = render(scene).owners
        assert set(np.unique(owners)) <= set(range(len(scene.things) + 1))
        for number, thing in enumerate(scene.things, start=1):
            ys, xs = np.nonzero(owners == number)
            assert len(ys) > 0.15 * (thing.box[2] - thing.box[0]) * (thing.box[3] - thing.box[1]) * owners.size
            assert xs.min() >= thing.box[0] * scene.width - 2 and xs.max() <= thing.box[2] * scene.width + 2
            assert ys.min() >= thing.box[1] * scene.height - 2 and ys.max() <= thing.box[3] * scene.height + 2


def test_sign_characters_are_marked_in_order() -> None:
    scene = next(s for s in (sample_scene(3, i) for i in range(200)) if any(t.kind is Kind.SIGN for t in s.things))
    text = next(thing.text for thing in scene.things if thing.kind is Kind.SIGN) or ""
    marked = render(scene).characters
    columns = {value: np.nonzero(marked == value)[1].mean() for value in np.unique(marked) if value}
    assert len(columns) == len(set(text))


def test_frames_are_what_the_runtime_makes() -> None:
    """The pocket is trained on exactly the pixels that the product's own preprocessing gives it."""
    from vlmfast.image.load import load_image
    from vlmfast.image.preprocess import preprocess

    for index in range(6):
        picture = render(sample_scene(3, index)).picture
        plan = idefics3_plan(*picture.size, PREPROCESS, tokens_per_tile=64)
        pixels = preprocess(load_image(picture), plan, PREPROCESS).pixels
        ours = normalised(torch.from_numpy(picture_frames(picture, PREPROCESS)))
        assert pixels.shape == (GRID[0] * GRID[1] + 1, 3, shape.TILE_SIDE, shape.TILE_SIDE)
        assert (pixels - ours).abs().max() < 1e-5


def test_a_picture_of_another_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="100x400 scene becomes 2 x 1 tiles"):
        picture_frames(Image.new("RGB", (100, 400)), PREPROCESS)


def test_patch_labels_name_what_the_scene_holds() -> None:
    for index in range(20):
        scene = sample_scene(3, index)
        labels = patch_labels(scene, render(scene), shape.TILE_SIDE, shape.PATCH_SIZE)
        assert set(labels) == set(LABELS)
        for name, classes in num_classes().items():
            values = np.unique(labels[name])
            assert ((values < classes) | (values == IGNORED)).all()
        seen = set(np.unique(labels["thing"])) - {0, IGNORED}
        kinds = {thing.shape or thing.name for thing in scene.things}
        assert len(seen) == len(kinds)


def test_pages_of_dense_pretraining_are_full() -> None:
    scenes = [sample_scene(9, index, split=Split.TRAIN, style=CROWDED) for index in range(0, 60, 2)]
    pages = [scene.page for scene in scenes if scene.page is not None]
    ordinary = [sample_scene(9, index, split=Split.TRAIN, style=PAGES).page for index in range(30)]
    assert len(pages) >= 5
    lengths = [[len(page.text) for page in some if page is not None] for some in (pages, ordinary)]
    assert sum(lengths[0]) / len(lengths[0]) > 2 * sum(lengths[1]) / len(lengths[1])
    scene = next(scene for scene in scenes if scene.page is not None)
    labels = patch_labels(scene, render(scene), shape.TILE_SIDE, shape.PATCH_SIZE)["character"]
    assert ((labels > 0) & (labels < IGNORED)).mean() > 0.2


def test_frame_folders_are_reused_only_for_the_same_scenes(tmp_path: Path) -> None:
    members = SceneSource(split=Split.TRAIN, seed=9, count=3, style=CROWDED, step=2)
    first = open_frames(tmp_path, members, PREPROCESS, shape.PATCH_SIZE, workers=1)
    stamp = (tmp_path / "pixels.npy").stat().st_mtime_ns
    again = open_frames(tmp_path, members, PREPROCESS, shape.PATCH_SIZE, workers=1)
    assert (tmp_path / "pixels.npy").stat().st_mtime_ns == stamp
    assert np.array_equal(first.pixels, again.pixels)
    picture = render(members.scene(2)).picture
    assert np.array_equal(first.pixels[2], picture_frames(picture, PREPROCESS))
    assert np.array_equal(first.single().pixels[12, 0], first.pixels[2, 2]) and first.single().plan.num_tiles == 1
    kept = np.array(first.pixels)  # the file below the old array is written anew
    other = SceneSource(split=Split.HELD_OUT, seed=9, count=3, style=CROWDED, step=2)
    assert not np.array_equal(kept, open_frames(tmp_path, other, PREPROCESS, shape.PATCH_SIZE, workers=1).pixels)


def test_tokens_follow_the_chat_template(tokens: PromptTokens, tmp_path: Path) -> None:
    """Training builds its ids part by part; the runtime and transformers go through the template. They must agree."""
    from transformers import AutoTokenizer

    write_tokenizer(tokens.tokenizer, tmp_path, 2048)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = loaded.apply_chat_template(
        [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What do you see?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "There is a dog."}]},
            {"role": "user", "content": [{"type": "text", "text": "Where is it?"}]},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    ids = loaded(text.replace(IMAGE, Idefics3.placeholder(PLAN)))["input_ids"]
    parts = tokens.question("What do you see?") + tokens.answer("There is a dog.")
    assert ids == tokens.opening(PLAN) + parts + tokens.question("Where is it?", first=False)
    assert tokens.decode(tokens.answer("Two dogs, näive 犬.")) == "Two dogs, näive 犬."


def test_every_scene_name_is_few_pieces(tokens: PromptTokens) -> None:
    for scene in (sample_scene(3, index) for index in range(50)):
        for name in scene.counts:
            assert len(tokens.encode(f" {name}")) <= 2


def test_packed_rows_hold_every_answer(tokens: PromptTokens) -> None:
    questions = ask_all(sample_scene(3, 1), stream("pack"))
    opening = tokens.opening(PLAN)
    row = pack(tokens, opening, questions, chat=False)
    answers = [token for question in questions for _, told in question.turns for token in tokens.answer(told)]
    assert [token for token in row.targets if token != IGNORED_TARGET] == answers
    assert row.ids.count(tokens.token_id(IMAGE)) == 5 * 64
    start = len(opening)
    assert {row.positions[i] for i in range(1, len(row.ids)) if row.segments[i] != row.segments[i - 1]} == {start}
    batch = collate([row, pack(tokens, opening, questions[:1], chat=True)], padding_id=0)
    assert batch.ids.shape == (2, len(row.ids)) and (batch.segments[1, -1] == -1)


def test_packed_questions_do_not_see_each_other(tokens: PromptTokens) -> None:
    """Negative control included: the same question in a chat row does see the turn before."""
    model = new_pocket(tokens.tokenizer, seed=1)
    questions = ask_all(sample_scene(3, 1), stream("pack"))[:3]

    def logits_of_last(number: int, others: list[int], *, chat: bool) -> torch.Tensor:
        row = pack(tokens, tokens.opening(PLAN), [*(questions[i] for i in others), questions[number]], chat=chat)
        batch = collate([row], padding_id=0)
        attention = PackedAttention(batch.segments, torch.float32)
        hidden = model.decoder.run(model.decoder.embed(batch.ids).flatten(0, 1), batch.positions.flatten(), attention)
        return model.decoder.logits(hidden[-4:])

    alone = logits_of_last(2, [], chat=False)
    assert torch.allclose(alone, logits_of_last(2, [0, 1], chat=False), atol=1e-5)
    assert not torch.allclose(alone, logits_of_last(2, [0], chat=True), atol=1e-3)


def test_batched_greedy_answers_equal_single_ones(tokens: PromptTokens) -> None:
    model = new_pocket(tokens.tokenizer, seed=1)
    visual = torch.randn(3, 5 * 64, model.config.text.hidden_size, generator=torch.Generator().manual_seed(0))
    asked = ["What is in the picture?", "Count the things.", "Read the sign."]
    prefixes = [tokens.opening(PLAN) + tokens.question(prompt) for prompt in asked]
    with torch.no_grad():
        together = answer(model, tokens, visual, prefixes)
        singly = [answer(model, tokens, visual[i : i + 1], prefixes[i : i + 1])[0] for i in range(3)]
    assert together == singly


def test_spelled_out_attention_is_attention() -> None:
    query, key, value = torch.randn(3, 2, 3, 7, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert torch.allclose(spelled_out_attention(query, key, value), expected, atol=1e-6)


def test_cached_attention_ignores_fillers() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2 * 4, heads, 8, generator=generator) for heads in (2, 1, 1))
    positions = torch.arange(4).expand(2, -1)
    out = CachedAttention(2, 9).at(positions).attend(0, query, key, value)
    changed = key.clone()
    changed[3] += 1.0  # row 0, position 3: a filler for a row of three tokens
    again = CachedAttention(2, 9).at(positions).attend(0, query, changed, value)
    assert torch.equal(out.view(2, 4, 2, 8)[0, :3], again.view(2, 4, 2, 8)[0, :3])


def test_cells_speak_of_things_and_places(tokens: PromptTokens) -> None:
    scene = next(s for s in (sample_scene(3, i) for i in range(99)) if s.things[0].kind is Kind.STICKER)
    labels = patch_labels(scene, render(scene), shape.TILE_SIDE, shape.PATCH_SIZE)
    words = cell_words(tokens, {name: array[None] for name, array in labels.items()}, scale_factor=2)
    assert words.shape == (1, 5, 64, 8)
    for frames in (slice(0, 4), slice(4, 5)):  # the tiles together show all that the global frame does
        spoken = {tokens.decode([token]) for token in set(words[0, frames, :, 0].flatten().tolist()) - {NO_WORD}}
        assert scene.things[0].name in spoken and "background" in spoken


def test_cells_of_a_page_speak_its_characters(tokens: PromptTokens) -> None:
    scene = sample_scene(3, 0, style=PAGES)
    labels = patch_labels(scene, render(scene), shape.TILE_SIDE, shape.PATCH_SIZE)
    words = cell_words(tokens, {name: array[None] for name, array in labels.items()}, scale_factor=2)
    spoken = {tokens.decode([token]) for token in set(words[0, ..., 4:].flatten().tolist()) - {NO_WORD}}
    assert scene.page is not None and len(spoken) > 3
    assert spoken <= set("".join(scene.page.lines))


def test_a_tile_knows_where_in_the_picture_it_lies(tokens: PromptTokens) -> None:
    shown = {name: np.full((1, 5, 16, 16), IGNORED, np.uint8) for name in LABELS}
    shown["thing"][:] = 1
    places = cell_words(tokens, shown, scale_factor=2)[0, ..., 2:4]  # [F, cells, 2]
    corners = [places[tile, cell].tolist() for tile, cell in ((0, 0), (1, 7), (2, 56), (3, 63))]
    assert corners == [places[4, cell].tolist() for cell in (0, 7, 56, 63)]
    assert places[0, 63].tolist() == [tokens.encode(" middle")[0], NO_WORD]


def test_checkpoint_loads_in_transformers(tokens: PromptTokens, tmp_path: Path) -> None:
    """The folder is an ordinary Idefics3 checkpoint: processor and network of transformers give our logits."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = new_pocket(tokens.tokenizer, seed=2).eval()
    write_pocket(model, tokens.tokenizer, shape.POCKET_SIZE, tmp_path, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    picture = render(sample_scene(3, 1)).picture
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What do you see?"}]}]
    inputs = processor(
        text=processor.apply_chat_template(messages, add_generation_prompt=True), images=[picture], return_tensors="pt"
    )
    assert inputs["input_ids"][0].tolist() == tokens.opening(_plan(picture)) + tokens.question("What do you see?")
    with torch.no_grad():
        expected = theirs(**inputs).logits[0]
        visual = model.encode(inputs["pixel_values"][0].float())
        ids = inputs["input_ids"]
        embedded = model.decoder.embed(ids)
        embedded[ids == model.config.image_token_id] = visual.flatten(0, 1)
        attention = PackedAttention(torch.zeros_like(ids), torch.float32)
        hidden = model.decoder.run(embedded[0], torch.arange(ids.shape[1]), attention)
        ours = model.decoder.logits(hidden)
    assert (ours - expected).abs().max() < 1e-4


def _plan(picture: Image.Image) -> TilePlan:
    return idefics3_plan(*picture.size, PREPROCESS, tokens_per_tile=64)


def test_make_writes_pictures_and_truth(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["make", "--seed", "3", "--count", "4", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "truth.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for index, row in enumerate(rows):
        picture = Image.open(tmp_path / row["file"])
        assert picture.size == (row["width"], row["height"])
        assert {thing["name"] for thing in row["things"]} == set(sample_scene(3, index).counts)
        assert {"what", "colour", "exists", "count", "caption"} <= {question["kind"] for question in row["questions"]}


def test_showcase_holds_the_scenes_and_the_verdicts_it_claims() -> None:
    """`assets/scenes/truth.json` must follow from the generator; remake it with `python -m vlmfast.train.showcase`."""
    folder = Path(__file__).parents[2] / "assets" / "scenes"
    rows = {row["file"]: row for row in json.loads((folder / "truth.json").read_text(encoding="utf-8"))}
    scenes = showcase_scenes()
    assert list(rows) == list(scenes)
    for file, scene in scenes.items():
        assert np.array_equal(np.asarray(Image.open(folder / file)), np.asarray(render(scene).picture)), file
        asked = scene_questions(scene)
        assert [row["question"] for row in rows[file]["questions"]] == [question.prompt for question in asked]
        for row, question in zip(rows[file]["questions"], asked, strict=True):
            assert row["pocket_right"] == is_right(question.kind, question.expect, row["pocket"])


def test_score_asks_the_bundled_model() -> None:
    result = CliRunner().invoke(app, ["score", "--seed", "2024", "--count", "1", "--json"])
    assert result.exit_code == 0, result.output
    kinds = json.loads(result.output)["kinds"]
    assert kinds["what"]["asked"] == 1 and kinds["colour"]["right"] == 1

"""A smaller model drafts: the answers stay those of the plain run, and their distribution where they are drawn.

Chance of a false alarm: see `test_speculation.py` for the tokens; below 1e-6 for the distribution, with fixed seeds.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import DRAWN, GREEDY, QUESTIONS
from oracle import check_idle, noise
from PIL import Image

from vlmfast import VLM, FastV, Sampling, Vision
from vlmfast.cli.main import main
from vlmfast.errors import ConfigError, OptionError
from vlmfast.kv import SequenceKV
from vlmfast.sample import Sampler, probabilities
from vlmfast.spec import model as model_module
from vlmfast.spec.batch import Asked
from vlmfast.spec.model import ModelDrafter
from vlmfast.spec.options import Speculation
from vlmfast.spec.tree import DraftTree
from vlmfast.spec.verify import verify
from vlmfast.testing import TINY_SHAPES, Shape
from vlmfast_models.config import TextConfig
from vlmfast_models.rope import RopeConfig

_SMALL = Shape(
    initializer_range=0.2,
    text={**Shape().text, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48},
    vision={**Shape().vision, "num_hidden_layers": 1},
)


def _drafting(folder: Path, **options: Any) -> Speculation:
    return Speculation(drafter="model", draft_model=folder, **{"adaptive": False, "max_draft_tokens": 4, **options})


@pytest.fixture(scope="module")
def text_model(checkpoint_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama without a tower, with the tokenizer of the tiny checkpoint and a padded vocabulary."""
    import transformers

    folder = tmp_path_factory.mktemp("text")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=520,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint_of() / name, folder)
    return folder


@pytest.fixture(scope="module")
def drafters(checkpoint_of: Callable[..., Path], text_model: Path) -> dict[str, Path]:
    return {"copy": checkpoint_of(), "other": checkpoint_of(_SMALL, seed=4), "text": text_model}


@pytest.fixture(scope="module")
def plain(load_vlm: Callable[..., Any]) -> Any:
    """The model without drafts and caches."""
    return load_vlm(speculation="off", caching=False)


@pytest.fixture(scope="module")
def expected(plain: Any) -> dict[Sampling, list[tuple[int, ...]]]:
    return {
        sampling: [plain.describe(*question, sampling=sampling).token_ids for question in QUESTIONS]
        for sampling in (GREEDY, DRAWN)
    }


def _check_freed(vlm: Any) -> None:
    check_idle(vlm)
    assert not vlm._speculator._sequences and not vlm._speculator._model._states


@pytest.mark.parametrize("adaptive", [False, True], ids=["always", "gate"])
@pytest.mark.parametrize("kind", ["copy", "other", "text"])
def test_the_answer_is_the_plain_one(
    load_vlm: Callable[..., Any],
    drafters: dict[str, Path],
    expected: dict[Sampling, list[tuple[int, ...]]],
    kind: str,
    adaptive: bool,
) -> None:
    """Guards cases 37 and 39: with pictures and without, alone, in a batch, from known prefixes, drawn with a seed."""
    loaded = load_vlm(speculation=_drafting(drafters[kind], adaptive=adaptive))
    for sampling in (GREEDY, DRAWN):
        alone = [loaded.describe(*question, sampling=sampling) for question in QUESTIONS]
        assert [answer.token_ids for answer in alone] == expected[sampling]
        streams = [loaded.stream(*question, sampling=sampling) for question in QUESTIONS]
        together = [list(stream)[-1].answer for stream in streams]
        assert [answer.token_ids for answer in together] == expected[sampling]
        if not adaptive:
            answers = (*alone, *together)
            assert all(one.usage.draft_tokens for one in answers)
            if kind == "copy" and sampling is GREEDY:
                ends = [one.finish_reason == "stop" for one in answers]  # an end token is drafted, and no token of it
                assert [one.usage.draft_tokens - one.usage.accepted_tokens for one in answers] == ends
    _check_freed(loaded)


@pytest.mark.parametrize("family", sorted(TINY_SHAPES))
def test_every_family_drafts_for_itself(
    load_vlm: Callable[..., Any], checkpoint_of: Callable[..., Path], family: str
) -> None:
    """Guards each family as target and as draft model: its own copy knows every token, pictures included."""
    folder = checkpoint_of(TINY_SHAPES[family])
    plain, loaded = load_vlm(folder, speculation="off"), load_vlm(folder, speculation=_drafting(folder))
    for images, question in QUESTIONS[:3]:
        one = plain.describe(images, question, sampling=GREEDY)
        two = loaded.describe(images, question, sampling=GREEDY)
        assert two.token_ids == one.token_ids
        assert two.usage.accepted_tokens >= two.usage.draft_tokens - 1  # an end token counts as drafted alone
    _check_freed(loaded)


def test_chats_and_pruned_prompts(load_vlm: Callable[..., Any], plain: Any, drafters: dict[str, Path]) -> None:
    """Guards turns over reused prefixes, of which the draft model knows nothing, and prompts that FastV thins out."""
    vision = Vision(fastv=FastV(layer=1, keep=0.5))
    loaded = load_vlm(speculation=_drafting(drafters["copy"]))
    for options in ({}, {"vision": vision}):
        both = []
        for vlm in (plain, loaded):
            chat = vlm.chat(noise(50, 40), **options)
            answers = [chat.ask(text, sampling=GREEDY) for text in ("What is it?", "Again?")]
            answers.append(chat.ask("And here?", noise(30, 60), sampling=GREEDY))
            both.append([answer.token_ids for answer in answers])
        assert both[0] == both[1]
    _check_freed(loaded)


def test_leaving_frees_the_draft_models_memory(
    load_vlm: Callable[..., Any], drafters: dict[str, Path], expected: dict[Sampling, list[tuple[int, ...]]]
) -> None:
    """Guards case 39 (llama.cpp 22673): a reader that goes away in the middle; the other's drafts go on."""
    loaded = load_vlm(speculation=_drafting(drafters["copy"]))
    stay, leave = (loaded.stream(*QUESTIONS[index], sampling=GREEDY) for index in (2, 0))
    next(leave)
    next(leave)
    assert len(loaded._speculator._model._states) == 2
    leave.close()
    assert list(stay)[-1].answer.token_ids == expected[GREEDY][2]
    _check_freed(loaded)


def test_a_picture_that_the_draft_model_can_not_take(
    load_vlm: Callable[..., Any],
    drafters: dict[str, Path],
    expected: dict[Sampling, list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards invariant 7: that request is answered without drafts, the others with them."""
    loaded = load_vlm(speculation=_drafting(drafters["copy"]))
    monkeypatch.setattr(loaded._speculator._model, "_look", lambda image, num: 1 / 0)
    streams = [loaded.stream(*question, sampling=GREEDY) for question in QUESTIONS[:2]]
    answers = [list(stream)[-1].answer for stream in streams]
    assert [answer.token_ids for answer in answers] == expected[GREEDY][:2]
    assert answers[0].usage.draft_tokens == 0 < answers[1].usage.draft_tokens
    _check_freed(loaded)


def test_pictures_are_encoded_once(
    load_vlm: Callable[..., Any], drafters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the feature cache: the draft model's features lie there under a key of their own, not the target's."""
    loaded = load_vlm(speculation=_drafting(drafters["other"]))
    keys: list[str] = []
    get = loaded._vision._cache.get_or_encode

    def noted(key: str, plan: Any, encode: Callable[[], Any]) -> Any:
        keys.append(key)
        return get(key, plan, encode)

    monkeypatch.setattr(loaded._vision._cache, "get_or_encode", noted)
    picture = noise(44, 45)
    for question in ("What is it?", "Where is it?"):
        loaded.describe(picture, question, sampling=GREEDY)
    assert len(set(keys)) == 2 and keys.count(keys[1]) == 2


# --- what is loaded ---


def test_another_tokenizer_is_refused(load_vlm: Callable[..., Any], text_model: Path, tmp_path: Path) -> None:
    """Guards token ids that mean something else: the first difference is named."""
    folder = tmp_path / "draft"
    shutil.copytree(text_model, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[200:202]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    number = vocabulary[second]
    with pytest.raises(ConfigError, match="another tokenizer") as raised:
        load_vlm(speculation=_drafting(folder))
    assert f"token {number} is '{first}' to the target and '{second}' to it" in str(raised.value)


def test_a_draft_model_must_be_loaded(load_vlm: Callable[..., Any], plain: Any, drafters: dict[str, Path]) -> None:
    """Guards requests for a model that is not there; what is loaded can be switched on and off by request."""
    with pytest.raises(OptionError, match="draft_model"):
        VLM.from_pretrained(speculation="model")
    with pytest.raises(OptionError, match="none"):
        plain.describe(None, "What?", speculation="model")
    loaded = load_vlm(speculation=Speculation(drafter="off", draft_model=drafters["copy"], adaptive=False))
    off, on, lookup = (
        loaded.describe(None, "What?", sampling=GREEDY, speculation=how) for how in (None, "model", "lookup")
    )
    assert off.token_ids == on.token_ids == lookup.token_ids
    assert off.usage.draft_tokens == 0 < on.usage.draft_tokens
    with pytest.raises(OptionError, match="loaded is"):
        loaded.describe(None, "What?", speculation=_drafting(drafters["other"]))


def test_the_command_takes_a_draft_model(
    drafters: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    Image.fromarray(noise(30, 20)).save(picture)
    options = ["--model", str(drafters["copy"]), "-p", "What?", "--json", "--draft-model", str(drafters["text"])]

    def run(*more: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            main(["describe", str(picture), *options, *more])
        return exit_info.value.code, *capsys.readouterr()

    code, out, _ = run()
    assert code in (0, None) and "draft_tokens" in json.loads(out)["usage"]
    code, out, err = run("--speculation", "lookup")
    assert (code, out) == (2, "") and "--draft-model" in err


# --- keys and values of the draft model ---


def _draft(drafter: ModelDrafter, seq_id: int, answer: Sequence[int]) -> tuple[int, ...]:
    return drafter.propose([(seq_id, answer, 3)])[0].tokens


@pytest.mark.parametrize("wrong", [False, True])
def test_rejected_tokens_leave_nothing(
    load_vlm: Callable[..., Any], text_model: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """Guards the roll-back: drafts are those of a model that reads the answer anew; not where nothing is undone."""
    drafter = load_vlm(speculation=_drafting(text_model))._speculator._model
    asked = Asked(prompt_ids=(5, 9, 60, 61), images=(), places=(), plans=(), sampling=Sampling(), max_tokens=60)
    drafter.begin(0, asked)
    generator = torch.Generator().manual_seed(8)
    answer: list[int] = [7]
    same = []
    if wrong:
        monkeypatch.setattr(SequenceKV, "truncate", lambda self, length: None)
        monkeypatch.setattr(SequenceKV, "append", _unbounded(SequenceKV.append))
    for _ in range(10):
        kept = _draft(drafter, 0, answer)
        drafter.begin(1, asked)
        same.append(kept == _draft(drafter, 1, answer))
        answer += kept[: int(torch.randint(3, (), generator=generator))]
        answer.append(int(torch.randint(300, (), generator=generator)))
    assert all(same) is not wrong


def _unbounded(append: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a page that never forgets grow."""

    def grown(self: SequenceKV, layer: int, key: Any, value: Any) -> Any:
        if self.lengths[layer] + len(key) > self.capacity:
            self.lengths[layer] = 0
        return append(self, layer, key, value)

    return grown


# --- drawn drafts ---

_TARGET = torch.tensor([[1.2, 0.3, -0.5, 0.0], [-1.0, 2.0, 0.4, 0.1], [0.0, 0.2, 0.1, -2.0], [0.7, 0.7, -3.0, 1.5]])
_DRAFTED = torch.tensor([[0.2, 0.9, -0.5, 0.6], [0.4, 0.0, 0.4, 0.1], [0.0, 0.2, 1.1, -1.0], [0.1, 0.7, -1.0, 2.5]])
_CUT = Sampling(temperature=0.8, top_k=3, top_p=0.95)


class _Table:
    """A decoder whose logits follow from the last token alone."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, None].float()

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Any) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _DRAFTED[hidden[:, 0].long()]


def _tiny_drafter() -> ModelDrafter:
    rope = RopeConfig.from_hf({"rope_theta": 1e4}, "text_config")
    config = TextConfig.from_hf(
        {
            "hidden_size": 1,
            "intermediate_size": 1,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "vocab_size": 4,
            "max_position_embeddings": 64,
        },
        tie_embeddings=True,
    )
    assert config.rope == rope
    device = torch.device("cpu")
    drafter = ModelDrafter(_Table(), config, vocab_size=4, device=device, dtype=torch.float32, ends=frozenset())
    drafter._generator.manual_seed(3)
    return drafter


@cache
def _known(row: tuple[float, ...]) -> torch.Tensor:
    return probabilities(torch.tensor(row), _CUT)


class _QuickSampler(Sampler):
    def distribution(self, logits: torch.Tensor, best: int | None = None) -> torch.Tensor:
        return _known(tuple(logits.tolist()))


def _chi_square(change: Callable[[DraftTree], DraftTree] = lambda tree: tree, num_answers: int = 8000) -> float:
    """Of answers of three tokens, written with drafts for all at once, against the target's own distribution."""
    drafter, sampler = _tiny_drafter(), _QuickSampler(replace(_CUT, seed=1), _ids(2), 4)
    answers = [[0] for _ in range(num_answers)]  # the first token is given
    for number in range(num_answers):
        drafter.begin(number, Asked(prompt_ids=(2,), images=(), places=(), plans=(), sampling=_CUT, max_tokens=9))
    while open_ones := [number for number, answer in enumerate(answers) if len(answer) < 4]:
        trees = drafter.propose([(number, answers[number], 2) for number in open_ones])
        for number, tree in zip(open_ones, map(change, trees), strict=True):
            rows = [_TARGET[token] for token in (answers[number][-1], *tree.tokens)]
            acceptance = verify(tree, rows, sampler)  # type: ignore[arg-type]
            answers[number] += [*(tree.tokens[node] for node in acceptance.path), acceptance.token]
    counts = Counter(tuple(answer[1:4]) for answer in answers)
    rows = [probabilities(row, _CUT).double().tolist() for row in _TARGET]
    chi_square = 0.0
    for cell in itertools.product(range(4), repeat=3):
        chance = 1.0
        for last, token in zip((0, *cell), cell, strict=False):
            chance *= rows[last][token]
        seen = counts[cell]
        if chance == 0 and seen:
            return float("inf")
        chi_square += (seen - chance * num_answers) ** 2 / (chance * num_answers) if chance else 0.0
    return chi_square


def _ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens)


@pytest.fixture(autouse=True)
def quick_probabilities(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Each distribution of the tables is computed once, for speed alone."""
    if "drawn" in request.node.name or "probabilities" in request.node.name:
        monkeypatch.setattr(model_module, "probabilities", lambda row, sampling: _known(tuple(row.tolist())))


def test_drawn_answers_follow_the_target() -> None:
    """Guards the probabilities that come with the draws: at most 63 degrees of freedom, 133 is one in a million."""
    assert _chi_square() < 133.0


@pytest.mark.parametrize("wrong", ["likeliest", "untempered"])
def test_wrong_probabilities_are_found_out(wrong: str) -> None:
    """Negative controls: tokens that were not drawn from what is claimed, and claims from before temperature."""

    def changed(tree: DraftTree) -> DraftTree:
        if wrong == "likeliest":
            tokens = [int(proposal.argmax()) for proposal in tree.proposals[:1]]
            return DraftTree.chain(tokens, proposals=tree.proposals[:1])
        return DraftTree.chain(tree.tokens, proposals=[proposal**0.3 for proposal in tree.proposals])

    assert _chi_square(changed, 2000) > 133.0

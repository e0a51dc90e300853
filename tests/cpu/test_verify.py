"""`verify` finds nothing on a sound checkpoint, and names the stage that was broken on one that is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import noise
from safetensors.torch import load_file, save_file

import vlmfast.verify.memory as memory
import vlmfast.verify.reference as reference_module
from vlmfast.cli.main import main
from vlmfast.errors import DeviceError, ImageError, InputError, ModelNotFoundError, OptionError, UnsupportedModelError
from vlmfast.image.load import load_image
from vlmfast.options import Verification
from vlmfast.testing import TINY_SHAPES
from vlmfast.verify.compare import Report
from vlmfast.verify.reference import ProcessorMissing
from vlmfast.verify.run import verify
from vlmfast.verify.stages import compare_networks
from vlmfast.verify.trace import Case, trace
from vlmfast_models.families import FAMILIES

_SHORT = Verification(max_new_tokens=8)
PICTURES = [noise(61, 37), noise(33, 90)]


def _names(report: Report, case: int) -> list[str]:
    return [stage.name for stage in report.cases[case].stages]


def test_the_pocket_passes() -> None:
    """Guards the bundled model, and that every stage is looked at: a stage left out would pass for ever."""
    report = verify()
    assert report.passed, [case.parting for case in report.cases]
    assert [case.name for case in report.cases] == ["text only", "one picture", "2 pictures"]
    config = json.loads((Path(report.model) / "config.json").read_text())
    towers = [f"vision layer {index}" for index in range(config["vision_config"]["num_hidden_layers"])]
    decoder = [f"decoder layer {index}" for index in range(config["text_config"]["num_hidden_layers"])]
    assert _names(report, 0) == ["prompt ids", "token embeddings", *decoder, "logits", "greedy tokens"]
    for case in (1, 2):
        assert _names(report, case) == [
            "prompt ids",
            "pixels",
            "vision embeddings",
            *towers,
            "vision output",
            "connector output",
            "visual features",
            "token embeddings",
            *decoder,
            "logits",
            "greedy tokens",
        ]
        assert not report.cases[case].notes
    assert all(case.num_answer_tokens for case in report.cases)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def of_a_family(request: pytest.FixtureRequest, checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of(replace(TINY_SHAPES[request.param], initializer_range=0.2))


def test_every_family_passes(of_a_family: Path) -> None:
    """Guards each family's preprocessing, networks and prompts on pictures of several sizes, and the names of its parts
    in transformers: a processor that is missing or a stage that is not seen fails here."""
    report = verify(of_a_family, images=[*PICTURES, noise(200, 19)])
    assert report.passed, [case.parting for case in report.cases]
    for case in report.cases:
        assert not case.notes
        assert case.num_answer_tokens > 10
    assert {"pixels", "vision layer 1", "connector output", "visual features"} < set(_names(report, 2))


@pytest.fixture(scope="module")
def sound(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of()


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    """A copy of the small checkpoint that a test may break."""
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def _scale(name: str, factor: float) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        (stored,) = (stored for stored in tensors if stored == name or stored.endswith(f".{name}"))
        tensors[stored] = tensors[stored] * factor
        save_file(tensors, file, metadata={"format": "pt"})

    return edit


def _set(file: str, *path: str, value: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        raw = json.loads((folder / file).read_text())
        inner = raw
        for key in path[:-1]:
            inner = inner[key]
        assert path[-1] in inner
        inner[path[-1]] = value
        (folder / file).write_text(json.dumps(raw))

    return edit


def _template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("Assistant:", "Assistant: "))


VISION, TEXT = "model.vision_model.encoder.layers", "model.text_model.layers"
BROKEN: dict[str, tuple[Callable[[Path], None], str | None, str | None]] = {
    "vision layer 1": (_scale(f"{VISION}.1.mlp.fc2.weight", 1.02), None, "vision layer 1"),
    "patch embedding": (
        _scale("model.vision_model.embeddings.patch_embedding.bias", 1.1),
        None,
        "vision embeddings",
    ),
    "last norm of the tower": (_scale("model.vision_model.post_layernorm.weight", 1.01), None, "vision output"),
    "connector": (_scale("model.connector.modality_projection.proj.weight", 1.01), None, "connector output"),
    "decoder layer 0": (_scale(f"{TEXT}.0.self_attn.v_proj.weight", 1.02), "decoder layer 0", "decoder layer 0"),
    "decoder layer 2": (_scale(f"{TEXT}.2.mlp.down_proj.weight", 1.02), "decoder layer 2", "decoder layer 2"),
    "head": (_scale("lm_head.weight", 1.01), "logits", "logits"),
    "embedding": (_scale("model.text_model.embed_tokens.weight", 1.01), "token embeddings", "token embeddings"),
    "rope theta": (
        _set("config.json", "text_config", "rope_parameters", "rope_theta", value=9000.0),
        "decoder layer 0",
        "decoder layer 0",
    ),
    "norm epsilon": (
        _set("config.json", "text_config", "rms_norm_eps", value=1e-2),
        "decoder layer 0",
        "decoder layer 0",
    ),
    "image mean": (
        _set("processor_config.json", "image_processor", "image_mean", value=[0.5, 0.48, 0.5]),
        None,
        "pixels",
    ),
    "longest edge": (
        _set("processor_config.json", "image_processor", "size", value={"longest_edge": 96}),
        None,
        "prompt ids",
    ),
    "template": (_template, "prompt ids", "prompt ids"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_broken_stage_is_named(sound: Path, copy: Path, fault: str) -> None:
    """Guards the use of the command: of a fault on our side, the first stage that parts is the one that has it."""
    edit, text_only, with_picture = BROKEN[fault]
    edit(copy)
    report = verify(copy, reference=sound, images=PICTURES[:1], options=_SHORT)
    partings = [case.parting.name if case.parting else None for case in report.cases]
    assert partings == [text_only, with_picture]
    assert not report.passed


def test_what_follows_the_connector_is_a_stage_of_its_own(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    """Guards AnyRes: line ends are put between the connector's outputs, so these agree and the features do not."""
    sound = checkpoint_of(replace(TINY_SHAPES["llava_next"], initializer_range=0.2))
    copy = Path(shutil.copytree(sound, tmp_path / "copy"))
    _scale("image_newline", 1.5)(copy)
    report = verify(copy, reference=sound, images=PICTURES[:1], options=_SHORT)
    assert [case.parting and case.parting.name for case in report.cases] == [None, "visual features"]


def test_the_processor_file_decides(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    """Guards the reference: what LLaVA's processor file says is not made good by config.json."""
    sound = checkpoint_of(replace(TINY_SHAPES["llava"], initializer_range=0.2))
    copy = Path(shutil.copytree(sound, tmp_path / "copy"))
    (copy / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor", "patch_size": 14}))
    report = verify(sound, reference=copy, images=PICTURES[:1], options=_SHORT)
    assert [case.parting and case.parting.name for case in report.cases] == [None, "prompt ids"]


def test_networks_are_judged_apart_from_pixels(sound: Path, copy: Path) -> None:
    """Guards the independence of the stages: both networks get our pixels, so a wrong mean is no fault of theirs."""
    BROKEN["image mean"][0](copy)
    stages = verify(copy, reference=sound, images=PICTURES, options=_SHORT).cases[2].stages
    assert [stage.name for stage in stages if stage.parted] == ["pixels"]


def test_another_end_token_is_found(sound: Path, copy: Path) -> None:
    """Guards the end of answers on both sides: ours ends where theirs goes on, and the other way round."""
    answer = next(iter(_answers(sound)))
    end = _set("generation_config.json", "eos_token_id", value=answer[3])
    end(copy)
    for ours, theirs in ((copy, sound), (sound, copy)):
        report = verify(ours, reference=theirs, images=PICTURES[:1], options=_SHORT)
        assert report.cases[0].parting is not None
        assert report.cases[0].parting.name == "greedy tokens"
        assert report.cases[0].parting.note.startswith(f"token {answer.index(answer[3])} is ")


def _answers(folder: Path) -> list[tuple[int, ...]]:
    from vlmfast import VLM, Sampling
    from vlmfast.verify.run import _QUESTIONS

    vlm = VLM.from_pretrained(folder, device="cpu", dtype="float32")
    return [vlm.describe(None, _QUESTIONS[0], sampling=Sampling(max_new_tokens=8)).token_ids]


def test_an_image_token_in_the_answer(sound: Path) -> None:
    """Guards small random checkpoints: transformers takes every image token for the place of a picture."""
    from vlmfast import VLM

    vlm = VLM.from_pretrained(sound, device="cpu", dtype="float32", caching=False)
    case = Case(name="one picture", images=(load_image(PICTURES[0]),), question="a?")
    run = trace(vlm, case, max_new_tokens=4, progress=lambda done, total: None)
    run = replace(run, answer=(run.answer[0], run.image_token_id, *run.answer[2:]))
    networks = reference_module.Networks(sound, device=torch.device("cpu"), dtype=torch.float32)
    stage = compare_networks(run, networks, 1e-3, lambda done, total: None)[-1]
    assert stage.name == "greedy tokens"
    assert f"token 1 is {run.image_token_id} here" in stage.note


def test_bfloat16_and_other_options(sound: Path) -> None:
    """Guards the other dtype, and that a tolerance of nothing is not met by rounding."""
    assert verify(sound, images=PICTURES, dtype="bfloat16", options=_SHORT).passed
    strict = verify(sound, images=PICTURES, options=Verification(max_new_tokens=1, tolerance=0.0))
    assert not strict.passed
    for name, value in (("tolerance", -1.0), ("grey_levels", None), ("grey_levels", "1"), ("max_new_tokens", 0)):
        with pytest.raises(OptionError, match=name):
            Verification(**{name: value})


def test_one_side_at_a_time(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory: our networks are gone when transformers' are loaded."""
    import gc

    from vlmfast import VLM

    def num_loaded() -> int:
        return sum(type(value) is VLM for value in gc.get_objects())

    seen: list[int] = []
    load = reference_module.Networks.__init__

    def counted(self: Any, *args: Any, **options: Any) -> None:
        seen.append(num_loaded())
        load(self, *args, **options)

    monkeypatch.setattr(reference_module.Networks, "__init__", counted)
    gc.collect()
    before = num_loaded()
    assert verify(sound, images=PICTURES[:1], options=_SHORT).passed
    assert seen == [before]


def test_progress_and_prompt(sound: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = verify(
        sound,
        images=PICTURES[:1],
        prompt="a?",
        options=_SHORT,
        progress=lambda text, done, total: seen.append((text, done, total)),
    )
    assert report.passed
    texts = list(dict.fromkeys(text for text, _, _ in seen))
    assert texts == [
        "loading our networks",
        "ours: text only",
        "ours: one picture",
        "loading transformers' networks",
        "transformers: text only",
        "transformers: one picture",
    ]
    assert all(0 <= done <= total for _, done, total in seen)


def test_without_a_processor_the_networks_are_compared(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards families whose processor needs packages that are not there: said, and the rest is done."""

    def missing(folder: Path, model_type: str) -> Any:
        raise ProcessorMissing("it needs torchvision")

    monkeypatch.setattr(reference_module, "_load_processor", missing)
    report = verify(sound, images=PICTURES, options=_SHORT)
    assert report.passed
    for case in report.cases:
        assert "torchvision" in case.notes[0]
        assert {"prompt ids", "pixels"}.isdisjoint(stage.name for stage in case.stages)
        assert case.stages[-1].name == "greedy tokens"


def test_a_case_without_room_is_skipped(copy: Path) -> None:
    """Guards templates and contexts that can not hold a case: the others are compared."""
    _set("config.json", "text_config", "max_position_embeddings", value=60)(copy)
    report = verify(copy, images=PICTURES, options=_SHORT)
    assert [bool(case.stages) for case in report.cases] == [True, False, False]
    assert "context" in report.cases[-1].notes[0]
    assert report.passed


@pytest.mark.parametrize("who", ["ours", "theirs"])
def test_too_little_memory_is_an_error(sound: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    """Guards both ways to learn of it: the weights can not fit, or an allocation fails on the way."""
    if who == "ours":
        monkeypatch.setattr(memory, "_free_bytes", lambda device: 1000)
    else:

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

        monkeypatch.setattr(reference_module.Networks, "run", fail)
    with pytest.raises(DeviceError, match=r"memory|free"):
        verify(sound, images=PICTURES[:1], options=_SHORT)


def test_other_runtime_errors_are_not_called_memory(sound: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"^size mismatch$"),
        memory.memory_for_weights(sound, "float32", torch.device("cpu"), torch.float32),
    ):
        raise RuntimeError("size mismatch")


def test_no_class_in_transformers(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("Unrecognized configuration class")

    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", unknown)
    with pytest.raises(UnsupportedModelError, match=r"transformers .* can not load"):
        verify(sound, images=PICTURES[:1], options=_SHORT)


def test_wrong_names_are_said_before_anything_is_loaded(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vlmfast.verify.run as module

    monkeypatch.setattr(module, "VLM", None)
    with pytest.raises(ModelNotFoundError):
        verify(sound / "nowhere")
    with pytest.raises(ModelNotFoundError):
        verify(sound, reference=sound / "nowhere")
    with pytest.raises(ImageError):
        verify(sound, images=["nowhere.png"])


# The command.


def _run(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["verify", *args])
    return int(exit_info.value.code or 0)


def test_command(sound: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards exit codes and what is written where."""
    from PIL import Image

    picture = str(tmp_path / "noise.png")
    Image.fromarray(PICTURES[0]).save(picture)
    short = ("--image", picture, "--max-new-tokens", "4")
    assert _run(str(sound), *short) == 0
    out, err = capsys.readouterr()
    assert "The same as transformers in 2 of 2 cases." in out and err == ""
    assert "decoder layers 0 - 2" in out and "decoder layer 1 " not in out
    assert _run(str(sound), *short, "--layers") == 0
    assert "decoder layer 1 " in capsys.readouterr().out
    _scale(f"{VISION}.1.mlp.fc2.weight", 1.02)(copy)
    assert _run(str(copy), *short, "--reference", str(sound)) == 1
    assert "Parts at vision layer 1 (one picture)." in capsys.readouterr().out
    assert _run(str(copy), *short, "--reference", str(sound), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False and report["dtype"] == "float32" and set(report["versions"]) >= {"transformers"}
    assert [case["parts_at"] for case in report["cases"]] == [None, "vision layer 1"]
    assert {stage["name"] for stage in report["cases"][1]["stages"] if stage["verdict"] == "same"} >= {"pixels"}


def test_nothing_to_compare_is_an_error(sound: Path) -> None:
    with pytest.raises(InputError, match="empty"):
        verify(sound, images=PICTURES, prompt=" ")


def test_command_errors(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in ((str(sound / "nowhere"),), (str(sound), "--tolerance", "-1"), (str(sound), "-i", "nowhere.png")):
        assert _run(*args) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("vlmfast: error: ") and err.count("\n") == 1

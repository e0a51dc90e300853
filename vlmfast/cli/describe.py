"""`vlmfast describe`: asks about pictures, one by one or together."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmfast.cli.loading import load_model
from vlmfast.cli.options import (
    DeviceOption,
    DraftModelOption,
    DtypeOption,
    ModelOption,
    NoCacheOption,
    SpeculationOption,
    VisionDtypeOption,
    drafting_of,
    field_docs,
    sampling_option,
)
from vlmfast.cli.output import write, write_error, write_foreign, write_json
from vlmfast.cli.vision import (
    FastVLayerOption,
    FastVOption,
    KeepOption,
    ReduceOption,
    ResolutionOption,
    ShowTokensOption,
    TomeOption,
    check_show_tokens,
    vision_of,
)
from vlmfast.errors import OptionError, VLMFastError
from vlmfast.options import Caching, Limits, Sampling, Vision
from vlmfast.spec.options import DEFAULT_DRAFTER

if TYPE_CHECKING:
    from vlmfast.vlm import VLM

_log = logging.getLogger(__name__)
_DEFAULT = Sampling()
_LIMITS = Limits()
_NUCLEUS_NOTE = "Matters with --temperature above 0."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """One row of the output: what to ask about, and how to call it in JSON and in text."""

    images: tuple[Any, ...]
    label: dict[str, Any]
    title: str


def describe(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE", help="Picture files or URLs.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="What to ask about each picture.")],
    together: Annotated[bool, typer.Option("--together", help="Ask one question about all the pictures.")] = False,
    model: ModelOption = None,
    max_new_tokens: Annotated[int, sampling_option("max_new_tokens", metavar="N")] = _DEFAULT.max_new_tokens,
    temperature: Annotated[float, sampling_option("temperature", metavar="T")] = _DEFAULT.temperature,
    top_p: Annotated[float, sampling_option("top_p", metavar="P", note=_NUCLEUS_NOTE)] = _DEFAULT.top_p,
    top_k: Annotated[int, sampling_option("top_k", metavar="K", note=_NUCLEUS_NOTE)] = _DEFAULT.top_k,
    repetition_penalty: Annotated[
        float, sampling_option("repetition_penalty", metavar="R")
    ] = _DEFAULT.repetition_penalty,
    stop: Annotated[
        list[str] | None, sampling_option("stop", "--stop", metavar="TEXT", note="May be given several times.")
    ] = None,
    seed: Annotated[int | None, sampling_option("seed", metavar="S")] = _DEFAULT.seed,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    vision_dtype: VisionDtypeOption = "auto",
    max_image_pixels: Annotated[
        int, typer.Option(metavar="N", min=1, help=field_docs(Limits).get("max_image_pixels"))
    ] = _LIMITS.max_image_pixels,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help=field_docs(Limits).get("allow_truncated"))
    ] = _LIMITS.allow_truncated,
    no_cache: NoCacheOption = False,
    resolution: ResolutionOption = "high",
    tome: TomeOption = None,
    reduce: ReduceOption = None,
    keep: KeepOption = None,
    fastv: FastVOption = None,
    fastv_layer: FastVLayerOption = None,
    show_tokens: ShowTokensOption = None,
    speculation: SpeculationOption = DEFAULT_DRAFTER,
    draft_model: DraftModelOption = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Write one JSON object a line: image, text, finish_reason, usage, timings; or image, error."
        ),
    ] = False,
) -> None:
    """Answer a question about pictures.

    For example: vlmfast describe dog.png -p "What is in the picture?"

    Several pictures are answered one by one, in order. One that can not be used is reported, the others still run, and
    the exit code is 2.
    """
    if not prompt.strip():
        raise typer.BadParameter('ask something, for example "What is in the picture?"', param_hint="--prompt")
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or _DEFAULT.stop),
        seed=seed,
    )
    drafting = drafting_of(speculation, draft_model)  # a wrong one is said before a model is loaded
    limits = Limits(max_image_pixels=max_image_pixels, allow_truncated=allow_truncated)
    vision = vision_of(resolution=resolution, tome=tome, reduce=reduce, keep=keep, fastv=fastv, fastv_layer=fastv_layer)
    questions = _questions(images, together)
    check_show_tokens(show_tokens, images, len(questions))
    vlm: VLM | None = None
    num_failed = 0
    for index, question in enumerate(questions):
        if len(questions) > 1 and not as_json:
            write_foreign(("\n" if index else "") + f"==> {question.title} <==\n")
        tried = _tried(question, limits) if vlm is None else question
        if isinstance(tried, _Question):
            vlm = vlm or load_model(
                model,
                device=device,
                dtype=dtype,
                vision_dtype=vision_dtype,
                limits=limits,
                caching=Caching.off() if no_cache else None,
                speculation=drafting,
            )
            problem = _answer(vlm, tried, prompt, sampling, vision, show_tokens, as_json)
        else:
            problem = tried
        if problem is not None:
            num_failed += 1
            _report(question, problem, as_json)
    if num_failed:
        raise typer.Exit(2)


def _questions(images: list[str], together: bool) -> list[_Question]:
    from vlmfast.image.load import source_name

    names = [source_name(image, index) for index, image in enumerate(images)]  # a path, but not a whole data URL
    if together:
        return [_Question(images=tuple(images), label={"images": names}, title=", ".join(names))]
    return [
        _Question(images=(image,), label={"image": name}, title=name) for image, name in zip(images, names, strict=True)
    ]


def _tried(question: _Question, limits: Limits) -> _Question | VLMFastError:
    """The question with what its URLs gave in their place, or what is wrong with its pictures.

    Tried before a model is loaded: a wrong path is said at once.
    """
    from vlmfast.image.load import load_images
    from vlmfast.image.sources import is_url

    try:
        loaded = load_images(question.images, limits=limits)
    except VLMFastError as error:
        return error
    images = zip(question.images, loaded, strict=True)
    return replace(question, images=tuple(image if is_url(source) else source for source, image in images))


def _answer(
    vlm: VLM,
    question: _Question,
    prompt: str,
    sampling: Sampling,
    vision: Vision,
    show_tokens: Path | None,
    as_json: bool,
) -> Exception | None:
    """Writes the answer, streaming unless it is JSON; returns the error if there is none to write."""
    answer = None
    started = False
    try:
        for chunk in vlm.stream(question.images, prompt, sampling=sampling, vision=vision):
            answer = chunk.answer
            if not as_json:
                text = chunk.text if started else chunk.text.lstrip()  # many templates make answers start with a space
                write_foreign(text)
                started = started or bool(text)
        if show_tokens is not None and answer is not None:
            from vlmfast.cli.show_tokens import draw_tokens

            drawn = draw_tokens(vlm, question.images, prompt, vision, answer)
            try:
                drawn.save(show_tokens)
            except OSError as error:
                raise OptionError(f"{show_tokens} can not be written: {error.strerror or error}") from error
    except OSError:  # stdout is closed or full: no picture's fault
        raise
    except Exception as error:  # the boundary of a picture: the others still run
        return error
    finally:
        if not as_json and (started or answer is not None):
            write("\n")
    if as_json:
        assert answer is not None
        write_json({**question.label, **answer.to_dict()})
    return None


def _report(question: _Question, error: Exception, as_json: bool) -> None:
    """Says that a question failed: as its row in JSON, else on stderr. A bug of ours also leaves a traceback there."""
    if not isinstance(error, VLMFastError):
        _log.error("%s failed", question.title, exc_info=error)
    code = error.code if isinstance(error, VLMFastError) else "internal"
    if as_json:
        write_json({**question.label, "error": {"kind": code, "message": str(error)}})
    else:
        write_error(error)

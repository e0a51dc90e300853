"""`vlmfast chat`: a conversation about pictures in the terminal, or line by line from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

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
    sampling_option,
)
from vlmfast.cli.output import is_same_file, write, write_error, write_foreign, write_note
from vlmfast.cli.vision import (
    FastVLayerOption,
    FastVOption,
    KeepOption,
    ReduceOption,
    ResolutionOption,
    TomeOption,
    is_vision_given,
    vision_of,
)
from vlmfast.compose import names_of
from vlmfast.errors import InputError, VLMFastError
from vlmfast.options import Caching, Overflow, Sampling, Vision
from vlmfast.spec.options import DEFAULT_DRAFTER

if TYPE_CHECKING:
    from vlmfast.chat import Chat
    from vlmfast.types import Answer
    from vlmfast.vlm import VLM

_DEFAULT = Sampling()
_HELP = """\
  /image PATH   give a picture (or its URL) to your next question
  /undo         take back the last question and its answer
  /save FILE    write the chat, pictures included, to a file
  /load FILE    go on with a saved chat
  /help         show this
  /quit         end (or Ctrl-D)
Ctrl-C stops an answer; its question is forgotten. A space before a slash makes it text.
"""


def chat(
    context: typer.Context,
    images: Annotated[
        list[str] | None, typer.Argument(metavar="IMAGE", help="Picture files or URLs for the first question.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="How the model should behave.")] = None,
    model: ModelOption = None,
    max_new_tokens: Annotated[int, sampling_option("max_new_tokens", metavar="N")] = _DEFAULT.max_new_tokens,
    temperature: Annotated[float, sampling_option("temperature", metavar="T")] = _DEFAULT.temperature,
    top_p: Annotated[float, sampling_option("top_p", metavar="P")] = _DEFAULT.top_p,
    top_k: Annotated[int, sampling_option("top_k", metavar="K")] = _DEFAULT.top_k,
    repetition_penalty: Annotated[
        float, sampling_option("repetition_penalty", metavar="R")
    ] = _DEFAULT.repetition_penalty,
    stop: Annotated[
        list[str] | None, sampling_option("stop", "--stop", metavar="TEXT", note="May be given several times.")
    ] = None,
    seed: Annotated[int | None, sampling_option("seed", metavar="S")] = _DEFAULT.seed,
    overflow: Annotated[
        Overflow,
        typer.Option("--overflow", help="When the model's context is full: drop the oldest turns, or an error."),
    ] = Overflow.DROP,
    stats: Annotated[bool, typer.Option("--stats", help="Show tokens and times after each answer.")] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    vision_dtype: VisionDtypeOption = "auto",
    no_cache: NoCacheOption = False,
    speculation: SpeculationOption = DEFAULT_DRAFTER,
    draft_model: DraftModelOption = None,
    resolution: ResolutionOption = "high",
    tome: TomeOption = None,
    reduce: ReduceOption = None,
    keep: KeepOption = None,
    fastv: FastVOption = None,
    fastv_layer: FastVLayerOption = None,
) -> None:
    """Talk about pictures.

    For example: vlmfast chat dog.png

    Type a question, or /help. From a pipe, each line is a question or a command; lines that fail are reported, the
    others still run, and the exit code is 2.
    """
    from vlmfast.image.load import load_images

    drafting = drafting_of(speculation, draft_model)
    vision = vision_of(resolution=resolution, tome=tome, reduce=reduce, keep=keep, fastv=fastv, fastv_layer=fastv_layer)
    loaded = load_images(images or [])  # before the model: a wrong path is said at once
    vlm = load_model(
        model,
        device=device,
        dtype=dtype,
        vision_dtype=vision_dtype,
        caching=Caching.off() if no_cache else None,
        speculation=drafting,
    )
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or _DEFAULT.stop),
        seed=seed,
    )
    conversation = vlm.chat(list(loaded), system=system, overflow=overflow, vision=vision)
    asked = vision if is_vision_given(context) else None
    session = _Session(vlm=vlm, chat=conversation, sampling=sampling, stats=stats, vision=asked)
    num_failed = 0
    for line in _lines():
        try:
            if not session.take(line):
                break
        except VLMFastError as error:
            write_error(error)
            num_failed += 1
        except BrokenPipeError:
            raise
        except OSError as error:
            write_error(f"{error.filename}: {error.strerror}" if error.filename else error)
            num_failed += 1
    if num_failed and not sys.stdin.isatty():
        raise typer.Exit(2)


@dataclass(slots=True, kw_only=True)
class _Session:
    """A chat and what the terminal does to it."""

    vlm: VLM
    chat: Chat
    sampling: Sampling
    stats: bool
    vision: Vision | None
    """What the options ask for, None if nothing is said: a chat that is loaded then keeps its own."""

    def take(self, line: str) -> bool:
        """Carries out a line: a question or a command. False when it is the last.

        Raises:
            VLMFastError: it can not be carried out; the chat is as it was.
            OSError: a file can not be written.
        """
        if line.startswith("/"):
            command, _, rest = line.partition(" ")
            return self._command(command, _path(rest))
        if line.strip():
            self._ask(line)
        return True

    def _command(self, command: str, path: str) -> bool:
        if command in ("/image", "/save", "/load") and not path:
            raise InputError(f"{command} needs a file: {command} FILE")
        match command:
            case "/image":
                self.chat.add_images([path])
                image = self.chat.pending_images[-1]
                write_note(f"{image.name}, {image.width}x{image.height}: goes with your next question")
            case "/undo":
                write_note(f"taken back: {self.chat.undo().text}")
            case "/save":
                self._save(path)
                write_note(f"saved to {path}")
            case "/load":
                self._load(path)
            case "/help":
                write(_HELP)
            case "/quit" | "/exit":
                return False
            case _:
                raise InputError(f"no command {command}; /help lists them, and a space before it makes it text")
        return True

    def _save(self, path: str) -> None:
        held = [image for message in self.chat.messages for image in message.images]
        if any(is_same_file(path, image.name) for image in (*held, *self.chat.pending_images)):
            raise InputError(f"{path} is one of the chat's pictures; give another file")
        self.chat.save(path)

    def _load(self, path: str) -> None:
        self.chat = type(self.chat).load(path, self.vlm, vision=self.vision)
        write_note(f"{len(self.chat.messages)} messages; the last: {_last_text(self.chat)}")
        if self.chat.vision != Vision():
            whose = "the file says" if self.vision is None else "the options say"
            write_note(f"fewer visual tokens, as {whose}: {', '.join(names_of(self.chat.vision))}")

    def _ask(self, text: str) -> None:
        """Streams the answer. Ctrl-C ends it, and the chat is as it was before the question."""
        num_messages = len(self.chat.messages)
        answer = None
        try:
            stream = self.chat.stream(text, sampling=self.sampling)
            for chunk in stream:
                write_foreign(chunk.text)
                answer = chunk.answer
        except KeyboardInterrupt:
            write("\n")
            write_note("stopped; the question is forgotten")
            return
        write("\n")
        if len(self.chat.messages) < num_messages + 2:
            write_note("the model's context is full: the oldest turns were dropped")
        if self.stats and answer is not None:
            write_note(_stats(answer))


def _lines() -> Iterator[str]:
    """Lines of a terminal, after a prompt, or of a pipe. Ctrl-C at the prompt of a terminal begins the line anew."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with suppress(ImportError):  # not everywhere
        import readline  # noqa: F401  gives `input` its editing and history
    write_note("/help lists the commands")
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:
            write("\n")
            write_note("/quit or Ctrl-D ends the chat")
            continue
        except EOFError:
            write("\n")
            return
        yield line


def _path(text: str) -> str:
    """A path as people type or paste it: quotes around it and a leading ~ are taken for what they mean."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return os.path.expanduser(text)


def _last_text(chat: Chat) -> str:
    return chat.messages[-1].text if chat.messages else "none"


def _stats(answer: Answer) -> str:
    usage, timings = answer.usage, answer.timings
    return (
        f"prompt {usage.prompt_tokens} tokens, {usage.cached_tokens} of them known; "
        f"pictures encoded: {usage.images_encoded} of {usage.num_images}; "
        f"first token after {timings.first_token_ms:.0f} ms, then {timings.token_ms:.1f} ms a token"
        + (f"; visual tokens {usage.visual_tokens_after} of {usage.visual_tokens_before}" if usage.fewer_tokens else "")
        + (f" ({'; '.join(usage.fewer_tokens)})" if usage.fewer_tokens else "")
    )

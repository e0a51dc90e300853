"""Answers about many pictures in input order: pictures are decoded ahead in threads, and several are answered at once.

Nothing grows with the number of pictures: at most `look_ahead` are decoded and `max_running` submitted ahead of the one
that is yielded.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from vlmfast.errors import VLMFastError
from vlmfast.image.load import ImageSource, source_name
from vlmfast.types import Answer, CaptionError, Chunk, ImageInput

_log = logging.getLogger(__name__)

_DECODERS = 2
"""Threads that decode: Pillow lets go of the interpreter, and one picture decodes faster than it is encoded."""


def captions(
    sources: Iterable[ImageSource],
    *,
    load: Callable[[ImageSource], ImageInput],
    submit: Callable[[ImageInput], Iterator[Chunk]],
    max_running: int,
    look_ahead: int,
) -> Iterator[Answer | CaptionError]:
    """An answer or an error for each source, in their order; an error harms no other.

    Args:
        load: decodes a picture; called in threads.
        submit: asks about one; called in the caller's thread, as are the steps that answer.
        max_running: pictures that are answered at the same time.
        look_ahead: pictures that may be decoded before their turn.
    """
    decoded: deque[tuple[str, Future[ImageInput]]] = deque()
    running: deque[tuple[str, Iterator[Chunk] | CaptionError]] = deque()
    named = ((source_name(source, index), source) for index, source in enumerate(sources))
    broken: Exception | None = None  # what ended the sources; told when all before it are answered
    with ThreadPoolExecutor(_DECODERS, thread_name_prefix="vlmfast-decode") as pool:
        try:
            while True:
                while broken is None and len(decoded) < look_ahead:
                    try:
                        name, source = next(named)
                    except StopIteration:
                        break
                    except Exception as error:
                        broken = error
                    else:
                        decoded.append((name, pool.submit(load, source)))
                while decoded and len(running) < max_running:
                    name, picture = decoded.popleft()
                    running.append((name, _submitted(name, picture, submit)))
                if not running:
                    if broken is not None:
                        raise broken
                    return
                yield _fetched(*running.popleft())
        finally:
            for _, picture in decoded:
                picture.cancel()


def _submitted(
    name: str, picture: Future[ImageInput], submit: Callable[[ImageInput], Iterator[Chunk]]
) -> Iterator[Chunk] | CaptionError:
    try:
        return submit(picture.result())
    except Exception as error:
        return _row(name, error)


def _fetched(name: str, chunks: Iterator[Chunk] | CaptionError) -> Answer | CaptionError:
    if isinstance(chunks, CaptionError):
        return chunks
    try:
        answer = None
        for chunk in chunks:
            answer = chunk.answer
        assert answer is not None
        return answer
    except Exception as error:
        return _row(name, error)


def _row(name: str, error: Exception) -> CaptionError:
    """The error as a row. What we did not foresee is logged with its trace: it is a fault of ours."""
    known = isinstance(error, VLMFastError)
    if not known:
        _log.warning("captioning %s failed", name, exc_info=error)
    return CaptionError(
        image=name, kind=error.code if isinstance(error, VLMFastError) else "internal", message=str(error)
    )

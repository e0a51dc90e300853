"""Streaming text: whole characters only, stop texts held back, the pieces concatenate to the whole (cases.md 49)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vlmfast.text import TextStream

_REPLACEMENT = "\ufffd"
_TEXTS = [
    "The quick brown fox", "🎉", "👩‍👩‍👧‍👦 family", "한국어 문장입니다", "naïve café", "日本語🎌テスト",
    "a\u0301 e\u0308",
    " leading and trailing ", "line\nbreak\ttab", "mixed 🙂 한 é x", "\u200d", "🇰🇷🇩🇪", "",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(vlm: Any) -> Any:
    return vlm.checkpoint.tokenizer


def _byte_ids(tokenizer: Any, text: str) -> list[int]:
    """One token a byte: the hardest way to spell a text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    return [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in text.encode()]


def _pieces(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream


@pytest.mark.parametrize("text", _TEXTS)
@pytest.mark.parametrize("spelling", ["bytes", "tokens"])
def test_pieces_concatenate_and_are_whole(tokenizer: Any, text: str, spelling: str) -> None:
    """Guards case 49 (exllamav3 171): emoji and Hangul split over tokens never show as U+FFFD."""
    ids = _byte_ids(tokenizer, text) if spelling == "bytes" else tokenizer.encode(text, add_special_tokens=False)
    pieces, stream = _pieces(tokenizer, ids)
    assert "".join(pieces) == stream.text == text.lstrip()
    assert not any(_REPLACEMENT in piece for piece in pieces)


def test_text_comes_as_early_as_it_is_certain(tokenizer: Any) -> None:
    """Guards against a stream that keeps everything until its end: each whole character comes with its last byte."""
    stream = TextStream(tokenizer)
    seen = [stream.push(token) for token in _byte_ids(tokenizer, "a한b🎉")]
    assert seen == ["a", "", "", "한", "b", "", "", "", "🎉"]


@given(text=st.text(max_size=40))
def test_any_text_streams_exactly(tokenizer: Any, text: str) -> None:
    """Guards the window of re-decoded tokens, for any text of any script."""
    text = text.encode("utf-8", "ignore").decode()
    for ids in (_byte_ids(tokenizer, text), tokenizer.encode(text, add_special_tokens=False)):
        pieces, stream = _pieces(tokenizer, ids)
        assert "".join(pieces) == stream.text
        # Texts may spell special tokens, which are left out; without one they come through as they are.
        assert stream.text == tokenizer.decode(ids, skip_special_tokens=True).rstrip(_REPLACEMENT).lstrip()


@given(ids=st.lists(st.integers(0, 511), max_size=60))
def test_any_tokens_stream_to_their_decoded_text(tokenizer: Any, ids: list[int]) -> None:
    """Guards streams of bytes that are no UTF-8 at all, special tokens among them: nothing lost, nothing twice."""
    pieces, stream = _pieces(tokenizer, ids)
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces) == stream.text
    assert stream.text.rstrip(_REPLACEMENT) == whole.rstrip(_REPLACEMENT).lstrip()


@given(prefix=st.lists(st.integers(128, 255), max_size=12), text=st.sampled_from(["🎉", "한", "é🙂"]))
@example(prefix=[255] * 5, text="🎉")
@example(prefix=[240, 159] * 7, text="한")
def test_broken_bytes_do_not_swallow_what_follows(tokenizer: Any, prefix: list[int], text: str) -> None:
    """Guards a whole character after bytes that were none: it still comes out."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    ids = [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in prefix] + _byte_ids(tokenizer, text)
    pieces, _ = _pieces(tokenizer, ids)
    expected = (bytes(prefix) + text.encode()).decode("utf-8", "replace")
    assert "".join(pieces) == expected


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("e t",), "on"),
        ("one two three", ("four",), "one two three"),
        ("one two", ("one",), ""),
        ("aaab", ("aab",), "a"),
        ("abababc", ("ababc",), "ab"),
        ("x 🎉 y", ("🎉",), "x "),
        ("x 한국 y", ("국 y",), "x 한"),
        ("the end\n\nmore", ("\n\n",), "the end"),
        ("a b c", ("c", "b"), "a "),
        ("abc", ("abcd", "b"), "a"),
        ("unfinished sto", ("stop",), "unfinished sto"),
    ],
)
@pytest.mark.parametrize("spelling", ["bytes", "tokens"])
def test_stop_texts(tokenizer: Any, text: str, stop: tuple[str, ...], expected: str, spelling: str) -> None:
    """Guards stop texts over token and character boundaries: nothing of them is ever handed out."""
    ids = _byte_ids(tokenizer, text) if spelling == "bytes" else tokenizer.encode(text, add_special_tokens=False)
    pieces, stream = _pieces(tokenizer, ids, stop)
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == (expected != text)
    assert stream.finish() == ""


@given(
    text=st.text(alphabet="abé🎉", max_size=20),
    stop=st.lists(st.text(alphabet="abé🎉", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_any_stop_text_cuts_where_it_begins(tokenizer: Any, text: str, stop: list[str]) -> None:
    """Guards the hold-back: the answer holds no stop text, and goes on with one exactly where it was cut."""
    pieces, stream = _pieces(tokenizer, _byte_ids(tokenizer, text), tuple(stop))
    got = "".join(pieces)
    assert got == stream.text and text.startswith(got)
    assert not any(one in got for one in stop)
    assert stream.stopped == any(one in text for one in stop)
    if stream.stopped:
        assert any(text[len(got) :].startswith(one) for one in stop)
    else:
        assert got == text

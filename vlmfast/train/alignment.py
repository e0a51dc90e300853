"""What the visual tokens should mean in the decoder's own vocabulary, cell by cell.

A visual token that lies near the embeddings of "dog", "top", "left" can simply be copied into an answer. So while the
connector learns, each of its outputs is also asked to predict, through the decoder's own head, the words for the thing
in its cell and for the cell's place; a bare cell predicts the background and its colour, a printed one its characters.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch.nn.functional as nnf
from torch import Tensor

from vlmfast.train.frames import GRID, IGNORED
from vlmfast.train.tokens import PromptTokens
from vlmfast.train.vocabulary import CHARACTERS, COLOURS, SHAPES, SIGN, SIGN_WORDS, cell_of, sticker_names

NO_WORD = -1


def cell_words(
    tokens: PromptTokens, labels: Mapping[str, npt.NDArray[np.uint8]], scale_factor: int
) -> npt.NDArray[np.int16]:
    """Target token ids [N, F, cells, 4 + s * s], NO_WORD where none.

    A cell's thing; its colour or sign text; its vertical and horizontal place; the character of each of its patches.

    Labels are [N, F, rows, columns]: the frames of a grid and the global one, or the global one alone.
    """
    things, colours, texts = (_cells(labels[name], scale_factor) for name in ("thing", "colour", "word"))
    shown = (things > 0) & (things < IGNORED)  # [N, rows, columns, patches of the cell]
    covered = np.any(shown, axis=-1)
    patch = np.where(covered, shown.argmax(-1), (things == 0).argmax(-1))[..., None]
    thing, colour, text = (np.take_along_axis(x, patch, axis=-1)[..., 0] for x in (things, colours, texts))
    words = np.full((*thing.shape, 4 + scale_factor**2), NO_WORD, dtype=np.int16)
    words[..., 0] = _table(tokens, ("background", *sticker_names(), *SHAPES, SIGN))[thing]
    words[..., 1] = np.where(colour < IGNORED, _table(tokens, COLOURS)[colour], _table(tokens, SIGN_WORDS)[text])
    words[..., 2:4] = np.where(covered[..., None], _frame_places(tokens, *thing.shape[1:]), NO_WORD)
    words[..., 4:] = _character_table(tokens)[_cells(labels["character"], scale_factor)]
    return words.reshape(*words.shape[:2], -1, words.shape[-1])


def alignment_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy of cells [C, V] against their words [C, W], each word weighed by `weights` [V]."""
    shares = weights[targets.clamp(min=0)] * (targets != NO_WORD)
    log_probabilities = nnf.log_softmax(logits.float(), dim=-1).gather(1, targets.clamp(min=0))
    return -(log_probabilities * shares).sum() / shares.sum().clamp(min=1)


def _cells(labels: npt.NDArray[np.uint8], scale: int) -> npt.NDArray[np.uint8]:
    """[N, F, rows, columns] of patches -> [N, F, rows / s, columns / s, s * s]."""
    *frames, rows, columns = labels.shape
    blocks = np.asarray(labels).reshape(*frames, rows // scale, scale, columns // scale, scale).swapaxes(-3, -2)
    return blocks.reshape(*frames, rows // scale, columns // scale, scale * scale)


def _table(tokens: PromptTokens, words: tuple[str, ...]) -> npt.NDArray[np.int16]:
    """Label -> id of the first piece of its word as it stands inside a sentence; every other label -> NO_WORD."""
    table = np.full(IGNORED + 1, NO_WORD, dtype=np.int16)
    table[: len(words)] = [tokens.encode(f" {word}")[0] for word in words]
    return table


def _character_table(tokens: PromptTokens) -> npt.NDArray[np.int16]:
    """Label -> id of the character's own piece; no character -> NO_WORD."""
    table = np.full(IGNORED + 1, NO_WORD, dtype=np.int16)
    table[1 : len(CHARACTERS) + 1] = [tokens.encode(character)[0] for character in CHARACTERS]
    return table


def _frame_places(tokens: PromptTokens, num_frames: int, rows: int, columns: int) -> npt.NDArray[np.int16]:
    """Ids [F, rows, columns, 2]: a tile's cells say where they lie in the whole picture."""
    whole = _place_words(tokens, rows, columns)[None]
    if num_frames == 1:
        return whole
    down, across = GRID
    canvas = _place_words(tokens, down * rows, across * columns)
    tiles = canvas.reshape(down, rows, across, columns, 2).swapaxes(1, 2).reshape(-1, rows, columns, 2)
    return np.concatenate((tiles, whole))


def _place_words(tokens: PromptTokens, rows: int, columns: int) -> npt.NDArray[np.int16]:
    """Ids [rows, columns, 2] of the words for where a cell lies; the very middle says so once."""
    words = np.full((rows, columns, 2), NO_WORD, dtype=np.int16)
    for row in range(rows):
        for column in range(columns):
            down, across = cell_of((column + 0.5) / columns, (row + 0.5) / rows)
            names = (("top", None, "bottom")[down], ("left", None, "right")[across])
            for axis, name in enumerate(names if any(names) else ("middle", None)):
                if name is not None:
                    words[row, column, axis] = tokens.encode(f" {name}")[0]
    return words

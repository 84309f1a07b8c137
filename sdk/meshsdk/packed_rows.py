"""Packed rows for models: attention masks, bounds of sequences, and labels, from the segments of a batch.

Law: pure functions of the arrays; torch tensors give tensors on their device, numpy arrays give arrays.
`segments` is `batch["FIELD.segments"]`: 1, 2, … for the pieces of a row, 0 for the filling.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def attention_mask(segments: Any, *, causal: bool = True) -> Any:
    """Return which element may attend to which: bool [rows, 1, length, length], True where it may.

    An element attends to its own piece only; with `causal`, to itself and what comes before. The filling
    attends to the filling, so no line is empty. It is the `attn_mask` of `scaled_dot_product_attention`; for
    rows of many thousand elements use `sequence_bounds` or `same_piece`, which need no such matrix.
    """
    allowed = segments[:, None, :, None] == segments[:, None, None, :]
    if not causal:
        return allowed
    length = segments.shape[1]
    if _is_torch(segments):
        return allowed.tril()
    return allowed & np.tri(length, dtype=np.bool_)


def same_piece(segments: Any) -> Any:
    """Return a causal `mask_mod` for torch's `flex_attention.create_block_mask`, of tensors on its device."""

    def mask_mod(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (segments[row, query] == segments[row, key]) & (query >= key)

    return mask_mod


def sequence_bounds(segments: Any) -> tuple[Any, int]:
    """Return (bounds, longest) of all pieces of the rows laid end to end, for attention over sequences of any
    length (`cu_seqlens` of FlashAttention).

    `bounds` is int32 [pieces + 1], from 0 to rows × length; the filling of a row counts as a piece.
    """
    flat = _begins(segments).reshape(-1)
    if _is_torch(segments):
        torch = sys.modules["torch"]
        starts = torch.nonzero(flat).reshape(-1).to(torch.int32)
        bounds = torch.cat([starts, starts.new_tensor([flat.numel()])])
        return bounds, int((bounds[1:] - bounds[:-1]).max())
    found = np.append(np.flatnonzero(flat), flat.size).astype(np.int32)
    return found, int(np.diff(found).max())


def next_token_labels(tokens: Any, segments: Any, *, ignore: int = -100) -> Any:
    """Return int64 [rows, length]: after each token the next one of its piece, and `ignore` where there is
    none: at the end of a piece and in the filling.

    For models that shift the labels themselves (Hugging Face's), use `piece_labels`.
    """
    following = _shift(segments, -1)
    follows = (following == segments) & (segments > 0)
    follows[:, -1] = False
    return _where(follows, _shift(_wide(tokens), -1), ignore)


def piece_labels(tokens: Any, segments: Any, *, ignore: int = -100) -> Any:
    """Return int64 [rows, length]: the tokens as labels for models that shift them, and `ignore` for the
    first token of each piece, which nothing before it predicts, and in the filling."""
    return _where((segments > 0) & ~_begins(segments), _wide(tokens), ignore)


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _shift(values: Any, by: int) -> Any:
    """Return each row moved by so many elements; what leaves it at one end comes back at the other."""
    return values.roll(by, 1) if _is_torch(values) else np.roll(values, by, axis=1)


def _begins(segments: Any) -> Any:
    """Return where pieces begin, and the filling."""
    begins = segments != _shift(segments, 1)
    begins[:, 0] = True
    return begins


def _wide(tokens: Any) -> Any:
    return tokens.long() if _is_torch(tokens) else tokens.astype(np.int64)


def _where(condition: Any, tokens: Any, other: int) -> Any:
    if _is_torch(tokens):
        return tokens.masked_fill(~condition, other)
    return np.where(condition, tokens, other)

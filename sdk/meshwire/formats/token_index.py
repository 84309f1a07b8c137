"""Index of a token file in Megatron's format: `NAME.bin` has the tokens of all sequences, `NAME.idx` the
index.

Law: nothing in an index is used before it is checked against the sizes of the index and the token file.

Layout, little endian: magic, version (uint64), code of the dtype (uint8), number of sequences and of document
bounds (uint64 each); then for each sequence its length in tokens (int32), for each its first byte (int64),
and the document bounds: the first sequence of each document, and the number of sequences (int64).
https://github.com/NVIDIA/Megatron-LM, megatron/core/datasets/readme.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from meshwire.frame.columns import Integers

INDEX_SUFFIX: Final = ".idx"
TOKENS_SUFFIX: Final = ".bin"
MAX_TOKEN_INDEX: Final = 1 << 30
"""Maximum bytes of an index."""
_MAGIC: Final = b"MMIDIDX\x00\x00"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<9sQBQQ")
HEADER_BYTES: Final = _HEADER.size
_CODES: Final = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
_DTYPES: Final = {code: dtype for dtype, code in _CODES.items()}
_MAX_LENGTH: Final = (1 << 31) - 1
_SEQUENCE_BYTES: Final = 12


class TokenIndexError(ValueError):
    """An index is malformed, or does not match its token file."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenIndex:
    """The sequences of a token file. `lengths`: int64[n], tokens; `offsets`: int64[n], first bytes."""

    dtype: str
    lengths: Integers
    offsets: Integers

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return int(self.lengths.sum())


def stored_dtype(dtype: str) -> str:
    """Return the dtype in which tokens of `dtype` are stored; Megatron has no uint32. Raises
    TokenIndexError."""
    found = "int32" if dtype == "uint32" else dtype
    _code_of(found)
    return found


def _code_of(dtype: str) -> int:
    if dtype not in _CODES:
        raise TokenIndexError(f"tokens of {dtype} cannot be stored; use one of {', '.join(_CODES)}")
    return _CODES[dtype]


def encode_token_index(lengths: Integers, dtype: str) -> bytes:
    """Encode the index of sequences that are stored one after the other. `lengths`: int64[n], in tokens.

    Raises TokenIndexError for an unsupported dtype, or more than 2³¹−1 tokens in a sequence.
    """
    code = _code_of(dtype)
    if lengths.size and int(lengths.max()) > _MAX_LENGTH:
        raise TokenIndexError(f"a sequence has {int(lengths.max())} tokens; at most {_MAX_LENGTH} fit")
    offsets = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    header = _HEADER.pack(_MAGIC, _VERSION, code, lengths.size, lengths.size + 1)
    documents = np.arange(lengths.size + 1)
    return b"".join(
        [
            header,
            lengths.astype("<i4").tobytes(),
            offsets.astype("<i8").tobytes(),
            documents.astype("<i8").tobytes(),
        ]
    )


def index_dtype(header: bytes) -> str:
    """Return the dtype of the tokens, from the first HEADER_BYTES of an index. Raises TokenIndexError."""
    return _parse_header(header)[0]


def _parse_header(header: bytes) -> tuple[str, int, int]:
    """Return (dtype, sequences, document bounds)."""
    if len(header) < HEADER_BYTES:
        raise TokenIndexError(f"it has {len(header)} bytes, which is too short")
    magic, version, code, sequences, documents = _HEADER.unpack_from(header)
    if magic != _MAGIC or version != _VERSION:
        raise TokenIndexError("not an index of tokens in Megatron's format, version 1")
    if code not in _DTYPES:
        raise TokenIndexError(f"its tokens have a dtype (code {code}) that is not of integers")
    return _DTYPES[code], sequences, documents


def parse_token_index(document: bytes, token_bytes: int) -> TokenIndex:
    """Parse an index. `token_bytes`: size of its token file. Raises TokenIndexError."""
    dtype, sequences, documents = _parse_header(document)
    needed = HEADER_BYTES + _SEQUENCE_BYTES * sequences + 8 * documents
    # A multimodal index ends with a byte for each sequence, its mode.
    if len(document) not in (needed, needed + sequences):
        raise TokenIndexError(f"it has {len(document)} bytes; {sequences} sequences take {needed}")
    lengths = np.frombuffer(document, "<i4", sequences, HEADER_BYTES).astype(np.int64)
    offsets = np.frombuffer(document, "<i8", sequences, HEADER_BYTES + 4 * sequences).astype(np.int64)
    width = np.dtype(dtype).itemsize
    if sequences:
        ends = offsets + lengths * width
        if int(lengths.min()) < 0 or int(offsets.min()) < 0 or int(ends.max()) > token_bytes:
            raise TokenIndexError(f"a sequence lies outside its token file of {token_bytes} bytes")
    return TokenIndex(dtype, lengths, offsets)

"""Token sequences: tokenize text with a tokenizer.json, truncate and pad arrays along the first axis.

Law: tokens follow from the text and the file alone; truncation and padding settings in the file are
ignored, those are separate ops. The interpretation of a file belongs to one release of `tokenizers`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from tokenizers import Tokenizer

from meshd.transform.assets import BadAssetError, asset
from meshd.transform.builtin.array_ops import fitting_value
from meshd.transform.builtin.text import check_bytes, text_of
from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import FieldType
from meshd.transform.parameters import Parameter, choice, flag, number, whole
from meshd.transform.registry import operation
from meshwire.strict_json import checked_text

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.assets import Asset
    from meshwire.plan.keyed_random import KeyedRandom


MAX_LENGTH = 1 << 24
Side = Literal["left", "right"]


def _check_sequence(field: FieldType) -> None:
    if field.kind != "array" or field.pixel_layout or not field.shape:
        raise ValueError(f"needs an array with a first axis, not {field}; tokenize or read one first")


@operation(
    "truncate",
    Parameter("length", whole(1, MAX_LENGTH)),
    Parameter("side", choice("left", "right"), "right"),
    takes="an array [n, …]",
    gives="the same dtype [at most `length`, …]",
)
class Truncate(msgspec.Struct, frozen=True):
    """At most `length` elements of the first axis; excess elements are removed at the `side`."""

    length: int
    side: Side

    def infer(self, field: FieldType) -> FieldType:
        _check_sequence(field)
        first = field.shape[0]
        cut = None if first is None else min(first, self.length)
        return FieldType("array", field.dtype, (cut, *field.shape[1:]), rate=field.rate)

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return value[: self.length] if self.side == "right" else value[max(0, len(value) - self.length) :]


@operation(
    "pad_to",
    Parameter("length", whole(1, MAX_LENGTH)),
    Parameter("value", number(-(2.0**63), 2.0**64), 0.0),
    Parameter("side", choice("left", "right"), "right"),
    takes="an array [n, …]",
    gives="the same dtype [`length`, …]: dense, if the other axes are",
    refuses="longer than `length` (put `truncate` before it)",
)
class PadTo(msgspec.Struct, frozen=True):
    """Padded with `value` to `length` elements of the first axis, at the `side`."""

    length: int
    value: float
    side: Side

    def infer(self, field: FieldType) -> FieldType:
        _check_sequence(field)
        if field.shape[0] is not None and field.shape[0] > self.length:
            raise ValueError(f"{field} is longer than {self.length}; put truncate before it")
        fitting_value(self.value, field.dtype)
        return FieldType("array", field.dtype, (self.length, *field.shape[1:]), rate=field.rate)

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        missing = self.length - len(value)
        if missing < 0:
            raise BadSampleError(
                f"a sequence of {len(value)} elements; at most {self.length} are allowed: truncate first"
            )
        padded = np.full(
            (self.length, *value.shape[1:]), fitting_value(self.value, value.dtype.name), value.dtype
        )
        start = 0 if self.side == "right" else missing
        padded[start : start + len(value)] = value
        return padded


_LOADED = 4
os.environ.setdefault(
    "TOKENIZERS_PARALLELISM", "false"
)  # each process uses one core; the pool provides the parallelism


@lru_cache(maxsize=_LOADED)
def load_tokenizer(file: Asset) -> Any:
    """Load the tokenizer of a file. Raises BadAssetError.

    Loading takes 0.1 s per few MB, so the last ones are cached.
    """
    try:
        tokenizer = Tokenizer.from_buffer(file.data)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.get_vocab_size()
    except BaseException as error:  # a panic of the library is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise BadAssetError("file", f"not a tokenizer.json of Hugging Face tokenizers: {error}") from None
    return tokenizer


def token_dtype(tokenizer: Any, wanted: str) -> str:
    """Return the dtype of the ids of a tokenizer; `wanted` may be "auto". Raises BadAssetError."""
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    dtype = ("uint16" if size <= 1 << 16 else "uint32") if wanted == "auto" else wanted
    if size - 1 > np.iinfo(dtype).max:
        raise BadAssetError("file", f"its {size} tokens do not fit into {dtype}; use uint32")
    return dtype


def _end_of_text(value: Any, path: str) -> str | None:
    """A token of the file, such as "<|endoftext|>"."""
    return None if value is None else checked_text(value, path, at_most=200)


@operation(
    "tokenize",
    Parameter("file", asset),
    Parameter("special", flag, True),
    Parameter("dtype", choice("auto", "uint16", "uint32", "int32", "int64"), "auto"),
    Parameter("end_of_text", _end_of_text, None),
    takes="bytes of a UTF-8 text",
    gives='tokens [n] of `dtype`, ragged; "auto" is uint16 for a vocabulary up to 65,536, else uint32',
    refuses="not valid UTF-8; more than 16 MiB; a text that the tokenizer refuses",
)
@dataclass(frozen=True, slots=True)
class Tokenize:
    """Token ids of a text, from a Hugging Face `tokenizer.json`; with `special`, its post-processor adds
    special tokens. `end_of_text`, a token of the file, is put after each text. Truncation and padding set in
    the file are ignored: use `truncate` and `pad_to`."""

    file: Asset
    special: bool
    dtype: str
    end_of_text: str | None = None
    _tokenizer: Any = field(init=False, repr=False, compare=False)
    _end: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tokenizer = load_tokenizer(self.file)
        object.__setattr__(self, "_tokenizer", tokenizer)
        object.__setattr__(self, "_end", self._end_tokens(tokenizer))
        object.__setattr__(self, "dtype", token_dtype(tokenizer, self.dtype))

    def _end_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        if self.end_of_text is None:
            return ()
        number = tokenizer.token_to_id(self.end_of_text)
        if number is None:
            added = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values())
            hint = f"; its special tokens are {', '.join(added[:8])}" if added else ""
            raise BadAssetError("end_of_text", f"the tokenizer has no token {self.end_of_text!r}{hint}")
        return (number,)

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        return FieldType("array", self.dtype, (None,))

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        text = text_of(value)
        try:
            (made,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=self.special)
        except BaseException as error:  # a panic of the library is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise BadSampleError(f"the tokenizer refuses the text: {error}") from None
        return np.array([*made.ids, *self._end] if self._end else made.ids, self.dtype)

"""Text to token numbers, by the tokenizer.json that a model comes with.

Law: a text's tokens follow from the text and the file alone: what the file says of truncation and padding
does not count, those are ops of their own. What the library makes of a file belongs to its release.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from meshd.transform.assets import BadAssetError, asset
from meshd.transform.builtin.texts import check_bytes, text_of
from meshd.transform.errors import BadSampleError
from meshd.transform.fieldtypes import FieldType
from meshd.transform.parameters import Parameter, choice, flag
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.assets import Asset
    from meshwire.randomness import KeyedRandom

_LOADED = 4
os.environ.setdefault(
    "TOKENIZERS_PARALLELISM", "false"
)  # a process is one core's; the pool is the parallelism


@lru_cache(maxsize=_LOADED)
def _load(file: Asset) -> Any:
    """The tokenizer of a file; loading takes 0.1 s a few MB, so the last ones stay. Raises BadAssetError."""
    try:
        tokenizer = Tokenizer.from_buffer(file.data)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.get_vocab_size()
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise BadAssetError("file", f"not a tokenizer.json of Hugging Face tokenizers: {error}") from None
    return tokenizer


@operation(
    "tokenize",
    Parameter("file", asset),
    Parameter("special", flag, True),
    Parameter("dtype", choice("auto", "uint16", "uint32", "int32", "int64"), "auto"),
    takes="bytes of a UTF-8 text",
    gives='tokens [n] of `dtype`, ragged; "auto" is uint16 for a vocabulary up to 65,536, else uint32',
    refuses="no valid UTF-8; more than 16 MiB; a text the tokenizer refuses",
)
@dataclass(frozen=True, slots=True)
class Tokenize:
    """Token numbers of a text, by a Hugging Face `tokenizer.json`; with `special` as its post-processor adds
    special tokens. Truncation and padding that the file asks for are left to `truncate` and `pad_to`."""

    file: Asset
    special: bool
    dtype: str
    _tokenizer: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tokenizer = _load(self.file)
        size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        dtype = ("uint16" if size <= 1 << 16 else "uint32") if self.dtype == "auto" else self.dtype
        if size - 1 > np.iinfo(dtype).max:
            raise BadAssetError("file", f"its {size} tokens do not fit into {dtype}; use uint32")
        object.__setattr__(self, "_tokenizer", tokenizer)
        object.__setattr__(self, "dtype", dtype)

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        return FieldType("array", self.dtype, (None,))

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        text = text_of(value)
        try:
            (made,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=self.special)
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise BadSampleError(f"the tokenizer refuses the text: {error}") from None
        return np.array(made.ids, self.dtype)

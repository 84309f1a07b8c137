"""Token files on a local disk, read by memory map.

Law: nothing in a file is used before its index is checked against it.
"""

from __future__ import annotations

import json
import operator
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from meshsdk.errors import ConfigurationError
from meshwire.formats.token_index import INDEX_SUFFIX, TOKENS_SUFFIX, TokenIndexError, parse_token_index
from meshwire.formats.token_manifest import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    import numpy.typing as npt


class TokenFiles:
    """Token files on a local disk, memory-mapped: `files[i]` is the i-th sequence, a view of its file.

    `path` is a folder (`mesh cp -r s3://corpus/tokens tokens`), or one file with or without its suffix; files
    of Megatron's tools are read as well. Nothing is read until it is used; forked workers share the pages.

    Attributes:
        dtype: of the tokens, a name such as "uint16".
        tokens: the number of tokens in all files.

    Raises ConfigurationError for a path without token files, and for files that do not fit each other.

    Example:
        files = TokenFiles("tokens")
        assert sum(len(sequence) for sequence in files) == files.tokens
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._maps: list[npt.NDArray[Any]] = []
        self._starts: list[npt.NDArray[np.int64]] = []
        self._lengths: list[npt.NDArray[np.int64]] = []
        dtypes = set[str]()
        for index in _local_indexes(Path(path)):
            data = index.with_suffix(TOKENS_SUFFIX)
            try:
                found = parse_token_index(index.read_bytes(), data.stat().st_size)
            except (TokenIndexError, OSError) as error:
                raise ConfigurationError(f"{index}: {error}") from error
            dtypes.add(found.dtype)
            width = np.dtype(found.dtype).itemsize
            if (found.offsets % width).any():
                raise ConfigurationError(f"{index}: a sequence begins within a token")
            empty = not data.stat().st_size  # an empty file cannot be mapped
            self._maps.append(np.zeros(0, found.dtype) if empty else np.memmap(data, found.dtype, "r"))
            self._starts.append(found.offsets // width)
            self._lengths.append(found.lengths)
        if len(dtypes) != 1:
            raise ConfigurationError(f"{path}: the files have tokens of {' and '.join(sorted(dtypes))}")
        (self.dtype,) = dtypes
        self.tokens = sum(int(lengths.sum()) for lengths in self._lengths)
        self._ends = np.cumsum([lengths.size for lengths in self._lengths]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: SupportsIndex) -> npt.NDArray[Any]:
        """Return a sequence. Raises IndexError."""
        place = operator.index(number)
        place += len(self) if place < 0 else 0
        if not 0 <= place < len(self):
            raise IndexError(f"no sequence {operator.index(number)}: there are {len(self)}")
        file = bisect_right(self._ends, place)
        place -= self._ends[file - 1] if file else 0
        start = int(self._starts[file][place])
        return self._maps[file][start : start + int(self._lengths[file][place])]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        return f"TokenFiles({len(self)} sequences, {self.tokens} tokens of {self.dtype})"


def _local_indexes(path: Path) -> list[Path]:
    """Return the indexes under a path: all of a folder, or that of one file."""
    if not path.is_dir():
        index = (
            path
            if path.suffix == INDEX_SUFFIX
            else Path(f"{str(path).removesuffix(TOKENS_SUFFIX)}{INDEX_SUFFIX}")
        )
        return [index]
    found = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if not found:
        raise ConfigurationError(f"{path} has no {INDEX_SUFFIX} file")
    manifest = path / MANIFEST
    if manifest.exists() and json.loads(manifest.read_bytes()).get("complete") is not True:
        raise ConfigurationError(f"{path} is incomplete: finish `mesh tokenize`, then copy it again")
    return found

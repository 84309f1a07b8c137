"""Builds columns of strings one string at a time, in the memory that the column itself takes.

Invariant: a string costs its UTF-8 bytes and eight more, not a Python object.
"""

from __future__ import annotations

from array import array
from itertools import accumulate, islice
from typing import TYPE_CHECKING

import numpy as np

from meshwire.frame.columns import StringColumn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from meshwire.frame.columns import Integers

_BLOCK = 512  # strings decoded at a time


class StringColumnBuilder:
    """The strings of a column so far. Raises UnicodeEncodeError for unpaired surrogates."""

    __slots__ = ("_blob", "_ends")

    def __init__(self) -> None:
        self._blob = bytearray()
        self._ends = array("q")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> str:
        start = self._ends[number - 1] if number else 0
        return self._blob[start : self._ends[number]].decode()

    def __iter__(self) -> Iterator[str]:
        begin = 0
        for first in range(0, len(self._ends), _BLOCK):
            ends = self._ends[first : first + _BLOCK]
            octets = self._blob[begin : ends[-1]]
            text = octets.decode() if octets.isascii() else ""  # else characters are not bytes
            at = 0
            for end in ends:
                end -= begin
                yield text[at:end] if text else octets[at:end].decode()
                at = end
            begin = ends[-1]

    def append(self, text: str) -> None:
        """Add a string."""
        self._blob += text.encode()
        self._ends.append(len(self._blob))

    def extend(self, texts: Sequence[str]) -> None:
        """Add strings."""
        octets = [text.encode() for text in texts]
        begin = len(self._blob)
        self._blob += b"".join(octets)
        self._ends.extend(islice(accumulate(map(len, octets), initial=begin), 1, None))

    def build(self, chosen: npt.NDArray[np.bool_] | None = None) -> StringColumn:
        """Return the column of all strings, or of those whose number is `chosen`: bool[strings]."""
        lengths: Integers = np.array(self._ends, dtype=np.int64)
        lengths[1:] -= lengths[:-1].copy()
        if chosen is None or chosen.all():
            return StringColumn(bytes(self._blob), lengths)
        octets = np.frombuffer(self._blob, dtype=np.uint8)[np.repeat(chosen, lengths)]
        return StringColumn(octets.tobytes(), lengths[chosen])

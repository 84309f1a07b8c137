"""HTTP byte ranges (RFC 9110 §14), as S3 answers them.

Law: a malformed or multi-range header is ignored, as S3 ignores it; an unsatisfiable one is an error (416).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANGE = re.compile(r"bytes=(?:(\d+)-(\d*)|-(\d+))\Z", re.A)
_LARGEST = (1 << 63) - 1  # longer than any object; larger numbers are read as this one


@dataclass(frozen=True, slots=True)
class RangeSpec:
    """`first`–`last` inclusive, either end open (None); `first` None means the last `last` bytes."""

    first: int | None
    last: int | None

    @property
    def is_suffix(self) -> bool:
        """Whether it asks for the last bytes, and at least one of them."""
        return self.first is None and bool(self.last)


class UnsatisfiableRangeError(ValueError):
    """The range lies beyond the object: S3's InvalidRange, status 416."""


def parse_range(header: str | None) -> RangeSpec | None:
    """The range a `Range` header asks for; None when absent, malformed or multiple (then the whole is
    sent)."""
    if header is None:
        return None
    match = _RANGE.match(header.strip(" \t"))
    if match is None:
        return None
    first, last, suffix = (_number(text) if text else None for text in match.groups())
    if suffix is not None:
        return RangeSpec(None, suffix)
    if first is not None and last is not None and last < first:
        return None
    return RangeSpec(first, last)


def _number(digits: str) -> int:
    """Python refuses to read very long numbers."""
    significant = digits.lstrip("0")
    return _LARGEST if len(significant) > 19 else min(int(significant or "0"), _LARGEST)


def resolve_range(spec: RangeSpec, size: int) -> tuple[int, int]:
    """(offset, length) in bytes within an object of `size` bytes; the end is clipped.

    Raises UnsatisfiableRangeError when nothing of the object is covered (an empty object included).
    """
    if spec.first is None:
        length = min(spec.last or 0, size)
        if length == 0:
            raise UnsatisfiableRangeError
        return size - length, length
    if spec.first >= size:
        raise UnsatisfiableRangeError
    last = size - 1 if spec.last is None else min(spec.last, size - 1)
    return spec.first, last - spec.first + 1

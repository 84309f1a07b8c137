"""What XML 1.0 can carry (section 2.2), said once for all tests of documents."""

from __future__ import annotations

import re

_NO_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def is_plain(text: str) -> bool:
    """Whether XML 1.0 can carry `text` at all."""
    return _NO_CHARACTERS.search(text) is None

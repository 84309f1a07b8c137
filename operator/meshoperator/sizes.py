"""Quantities as Kubernetes writes them, in bytes. Pure."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {"": 1} | {unit: 1000 ** (n + 1) for n, unit in enumerate("kMGTP")}
_BINARY: Final = {f"{unit}i": 1 << (10 * (n + 1)) for n, unit in enumerate("KMGTP")}


def bytes_of(text: str) -> int:
    """`1.5Ti` → bytes. Raises ValueError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text)
    unit = (_UNITS | _BINARY).get(found[2]) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is no size such as 512Mi or 1.5Ti")
    return int(float(found[1]) * unit)

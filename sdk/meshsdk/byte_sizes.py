"""Parses and formats byte sizes such as `500GiB`.

Law: pure. Input accepts units of 1000 (GB) and of 1024 (GiB); output uses units of 1024.
"""

from __future__ import annotations

from meshsdk.errors import ConfigurationError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZES |= {f"{unit}i": 1 << (10 * power) for power, unit in enumerate("kmgt", start=1)}


def parse_size(text: str, option: str) -> int:
    """Parse a size such as `500GiB` into bytes. Raises ConfigurationError, which names the option."""
    digits = text.lower().removesuffix("b").rstrip("kmgti")
    unit = text.lower().removesuffix("b")[len(digits) :]
    try:
        found = int(float(digits) * _SIZES[unit])
    except (ValueError, KeyError, OverflowError):
        found = -1
    if found < 0:
        raise ConfigurationError(f"{option} {text!r}: expected a size such as 500GiB")
    return found


def format_size(size: float) -> str:
    """Format a size in bytes for people: `12.3 MiB`."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"

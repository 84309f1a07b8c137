"""Bytes and durations as text for reports: `3.2 GB`, `8.7 h`."""

from __future__ import annotations

_UNITS = (("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3))


def bytes_text(size: float) -> str:
    """Format bytes in units of 1000: `3.2 GB`."""
    for unit, factor in _UNITS:
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """Format a duration: `8.7 h`."""
    for unit, factor in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"

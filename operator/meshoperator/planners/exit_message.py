"""Exit message of a daemon: from the end of its log to the sentence that says why it ended. Pure.

Law: the last lines count. Lines that are no error are left out if an error, or a line of plain text, follows.
"""

from __future__ import annotations

import json
from typing import Final

_LONGEST: Final = 240
_HARMLESS: Final = ("debug", "info", "warning")
_OWN: Final = frozenset({"time", "level", "process", "logger", "message"})


def exit_message(log: str) -> str:
    """Return the last lines of a log that matter, on one line, at most so long that other facts fit beside
    them; empty for an empty log."""
    lines = [_line(text.strip()) for text in log.splitlines() if text.strip()]
    telling = [text for harmless, text in lines if not harmless] or [text for _, text in lines]
    found = ""
    for text in reversed(telling):
        longer = f"{text} / {found}" if found else text
        if len(longer) > _LONGEST:
            break
        found = longer
    if found or not telling:
        return found
    return f"{telling[-1][: _LONGEST - 1]}…"


def _line(text: str) -> tuple[bool, str]:
    """Return (harmless, text) of a line: whether it reports no error; a JSON line's message and fields."""
    try:
        found = json.loads(text)
    except ValueError:
        return False, text
    if not isinstance(found, dict) or "message" not in found:
        return False, text
    fields = [f"{name}={value}" for name, value in found.items() if name not in _OWN]
    return found.get("level") in _HARMLESS, " ".join([str(found["message"]), *fields])

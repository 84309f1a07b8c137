"""Detects tuple unpacking (`a, b = batch`) from the caller's bytecode, for a warning.

Law: this is advice only; if the interpreter or a debugger hides the bytecode, there is no warning.
"""

from __future__ import annotations

from opcode import opmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_UNPACK = opmap.get("UNPACK_SEQUENCE", -1)


def is_unpacking(frame: FrameType) -> bool:
    """Return whether `frame` is currently unpacking an iterable into two or more names."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return 0 <= at < len(code) - 1 and code[at] == _UNPACK and code[at + 1] >= 2

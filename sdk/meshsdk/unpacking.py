"""Whether an iteration is an unpacking, as `a, b = batch` or `for a, b in loader`: its bytecode tells.

Law: only for a warning. Where an interpreter does not tell, or a debugger stands between, nothing is said.
"""

from __future__ import annotations

from opcode import opmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_UNPACK = opmap.get("UNPACK_SEQUENCE", -1)


def unpacks(frame: FrameType) -> bool:
    """Whether what `frame` is just doing takes an iterable apart into two names or more."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return 0 <= at < len(code) - 1 and code[at] == _UNPACK and code[at + 1] >= 2

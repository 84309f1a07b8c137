"""How many functions a piece of work calls: a measure of its cost that does not depend on the machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


class Calls:
    """Counts calls of Python and C functions in this thread while it is entered; `within`: only those by code
    whose file name begins with one of these."""

    def __init__(self, within: str | tuple[str, ...] = "") -> None:
        self.count, self._within = 0, within

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(self._within):
            self.count += 1

    def __enter__(self) -> None:
        sys.setprofile(self)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

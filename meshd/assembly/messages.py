"""What the HTTP workers and the steward say to each other about frames.

Law: requests carry a number chosen by the worker; replies come in any order, a frame's with its descriptor.
"""

from __future__ import annotations

from typing import Any

import msgspec

from meshd.assembly.addressing import Asked, FrameResult  # noqa: TC001  msgspec reads the annotations


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """`account`: whom the work is charged to."""

    number: int
    address: Asked
    account: str = ""


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """The worker is through with this request: it has sent the frame, or nobody waits for it any more."""

    number: int


class Answer(msgspec.Struct, frozen=True):
    """Either `error` (a BatchError's document) or a frame, whose memfd comes along. `fetch`, `prepare`:
    seconds of its making."""

    number: int
    size: int = 0
    rows: int = 0
    result: FrameResult = "miss"
    error: dict[str, Any] | None = None
    fetch: float = 0.0
    prepare: float = 0.0

"""The error of a write that a node refuses because clocks differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.rpc.peer_client import PeerClockError
from meshd.rpc.peer_clock import CLOCKS_CODE
from meshd.store.errors import ClocksDifferError

if TYPE_CHECKING:
    from collections.abc import Iterable


def skew_error(answers: Iterable[object], outcome: str) -> ClocksDifferError | None:
    """Returns the error, which also says `outcome`, if one of the nodes' answers is a PeerClockError."""
    skew = next((answer for answer in answers if isinstance(answer, PeerClockError)), None)
    if skew is None:
        return None
    # With CLOCKS_CODE, the node that met the refusal has said the outcome.
    return ClocksDifferError(str(skew) if skew.code == CLOCKS_CODE else f"{skew}; {outcome}")

"""A node that says nothing: at work on what was asked, or not there at all.

Law: only who does not even say that it is there is given up before the time; work takes what it takes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from meshsdk.errors import ConnectError

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.connections import Connection

ABSENT: Final = "no answer, nor a word that it is there: does it stand still, or is the way to it cut?"


def await_answer(connection: Connection, silence: float, timeout: float, there: Callable[[], bool]) -> None:
    """Until an answer begins. Each `silence` seconds it is asked whether the node is `there`. Raises
    ConnectError where it is not, and after `timeout` seconds."""
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        if connection.begins(min(silence, left)):
            return
        if left > silence and not there():
            raise ConnectError(f"{connection.endpoint}: {ABSENT}")
    raise ConnectError(f"{connection.endpoint}: no answer within {timeout:g} s")

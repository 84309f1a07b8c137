"""Messages between a transform worker and a sandbox process, and their shared arena.

Law: one JSON document per datagram, at most MAX_MESSAGE bytes. Values are in the arena, a sealed memfd
that both sides map, with inputs at IN and outputs at OUT. The sandbox side is untrusted: everything it
says is checked, and nothing it writes to the arena can harm the reader. It has the socket, the arena,
/dev/null, a memfd for its printed output and those of its wheels' shared objects, and no other descriptor.
"""

from __future__ import annotations

from typing import Final

MAX_VALUE: Final = 256 << 20
IN, OUT = 0, MAX_VALUE
ARENA_BYTES: Final = 2 * MAX_VALUE
ASSET_ROOM: Final = 128 << 20
"""Bytes of asset content that a sandbox process keeps, in addition to the memory it declares."""
MAX_MESSAGE: Final = 128 << 10
MAX_TEXT: Final = 2000


def aligned(at: int) -> int:
    """Return where the next value begins after one that ends at `at`."""
    return -(-at // 64) * 64

"""What a transform process and a confined one say to each other, and what is between them.

Law: one JSON document a datagram, at most MAX_MESSAGE bytes; values lie in the arena, a sealed memfd that
both map: what goes in at IN, what comes out at OUT. The confined side is not trusted: whatever it says is
checked, and nothing it can do to the arena harms who reads it. Of descriptors it has the socket, the arena,
/dev/null, and a memfd that takes what it prints.
"""

from __future__ import annotations

from typing import Final

MAX_VALUE: Final = 256 << 20
IN, OUT = 0, MAX_VALUE
ARENA_BYTES: Final = 2 * MAX_VALUE
ASSET_ROOM: Final = 128 << 20
"""Of assets' content a confined process keeps at a time, beyond the memory it declares."""
MAX_MESSAGE: Final = 128 << 10
MAX_TEXT: Final = 2000


def aligned(at: int) -> int:
    """Where the next value begins, behind one that ends at `at`."""
    return -(-at // 64) * 64

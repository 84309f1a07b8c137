"""Messages of the Parquet child process: a fixed head, then a payload of the length it gives.

Law: the child sends READ (answered with exactly that many bytes), DATA (of the copy), DONE, or FAILED
(the reason as JSON); the parent checks everything.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator

HEAD: Final = struct.Struct("<cQI")
"""Kind of message, offset in the file (READ), number of bytes."""
READ, DATA, DONE, FAILED = b"R", b"D", b".", b"!"
PIECE: Final = 1 << 20
"""Maximum bytes of one message."""
MAX_TOLD: Final = 400
STARTED: Final = b"started"
"""What the template says of a reader that it has forked; otherwise the number of the error, and at the
reader's end its exit code."""


class Converter(Protocol):
    """What is made of a file in the child process."""

    def convert(self, source: io.IOBase, size: int) -> Iterator[bytes]:
        """Yield pieces of at most PIECE bytes. Raises what pyarrow raises."""
        ...

"""What the process that reads Parquet and its parent say to each other: a head, then so many bytes.

Law: the child speaks (READ: answered with exactly so many bytes; DATA: of the copy; DONE; FAILED: why, as
JSON), the parent believes none of it unchecked.
"""

from __future__ import annotations

import struct
from typing import Final

HEAD: Final = struct.Struct("<cQI")
"""What, where in the file (READ), how many bytes."""
READ, DATA, DONE, FAILED = b"R", b"D", b".", b"!"
PIECE: Final = 1 << 20
"""Bytes of one message at most."""
MAX_TOLD: Final = 400

"""Client of the Parquet child process: starts it and yields the rows of one file.

Law: calls block and end within their time limit, and the child ends with the generator. The child's
output is untrusted; it receives the bytes of its file and no others.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from meshd.transform.parquet.messages import DATA, DONE, FAILED, HEAD, MAX_TOLD, PIECE, READ
from meshd.transform.sandbox.client import ENVIRONMENT, package_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MEMORY: Final = 2 << 30
"""Bytes that the process may use, in addition to pyarrow itself."""
SILENT_SECONDS: Final = 120.0
"""Time after which a silent process is killed."""
_AGAIN, _ENOUGH, _A_READ = 8, 256 << 20, 64  # read budget in bytes: many small reads, some of them twice
_CODE = "from meshd.transform.parquet.child_main import main; main()"
_ARROW = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "ARROW_IO_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


class ParquetError(Exception):
    """The file cannot be read; the message has the reason."""


class ParquetUnsupportedError(Exception):
    """This node cannot read Parquet; the message has the reason."""


def parquet_rows(
    read: Callable[[int, int], bytes],
    size: int,
    *,
    kind: str = "rows",
    memory: int = MEMORY,
    silent: float = SILENT_SECONDS,
) -> Iterator[bytes]:
    """Yield the copy of a file of `size` bytes, as defined in `meshwire.formats.parquet_rows`; for the kind
    "table" (Parquet or Arrow IPC) in `table_rows`, and for "table-3" that of some slices; as JSON for
    "preview" (`row_preview`), and for "statistics" those of its row groups (`group_statistics`).

    The pieces have at most 1 MiB. `read` returns the file's bytes by offset and length. Raises ParquetError,
    ParquetUnsupportedError, and what `read` raises.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    settings = {
        "parent": os.getpid(),
        "socket": theirs.fileno(),
        "size": size,
        "memory": memory,
        "kind": kind,
    }
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", _CODE, json.dumps(settings)],
                env=ENVIRONMENT | _ARROW | {"PYTHONPATH": os.pathsep.join(package_paths())},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        ours.settimeout(silent)
        try:
            yield from _received_pieces(ours, read, size)
        except TimeoutError:
            raise ParquetError(f"its reader sent nothing for {silent:.0f} s") from None
        except (ConnectionError, EOFError):
            raise ParquetError(_ended(process)) from None
        finally:
            process.kill()
            process.wait()


def _received_pieces(ours: socket.socket, read: Callable[[int, int], bytes], size: int) -> Iterator[bytes]:
    left = _AGAIN * size + _ENOUGH  # bytes that the reader may request
    while True:
        what, offset, length = HEAD.unpack(_exactly(ours, HEAD.size))
        if length > PIECE:
            raise ParquetError("its reader sent an invalid message")
        if what == READ and offset + length <= size:
            left -= length + _A_READ
            if left < 0:
                raise ParquetError("its reader requests the same bytes too often")
            ours.sendall(read(offset, length))
        elif what == DATA and length:
            yield _exactly(ours, length)
        elif what == DONE:
            return
        elif what == FAILED:
            raise _failure(_exactly(ours, length))
        else:
            raise ParquetError("its reader sent an invalid message")


def _failure(told: bytes) -> Exception:
    try:
        said = json.loads(told)
        kind, why = str(said["kind"]), _plain(str(said["why"]))
    except (ValueError, TypeError, KeyError):
        return ParquetError("its reader sent an invalid message")
    if kind == "memory":
        return ParquetError(f"a batch of its rows takes more than {MEMORY >> 30} GiB of memory")
    if kind == "missing":
        return ParquetUnsupportedError(f"pyarrow is not installed on this node ({why})")
    return ParquetUnsupportedError(why) if kind == "refused" else ParquetError(why)


def _plain(text: str) -> str:
    """Return untrusted text on one line, with printable characters only."""
    return " ".join("".join(each if each.isprintable() else " " for each in text[:MAX_TOLD]).split())


def _ended(process: subprocess.Popen[bytes]) -> str:
    code = process.wait(10)
    if code == -signal.SIGXCPU:
        return "reading it took too much CPU time"
    return f"its reader crashed ({signal.Signals(-code).name if code < 0 else f'exit {code}'})"


def _exactly(sock: socket.socket, length: int) -> bytes:
    """Receive exactly `length` bytes. Raises EOFError if the other side closes the connection."""
    found = bytearray(length)
    room = memoryview(found)
    while room:
        count = sock.recv_into(room)
        if not count:
            raise EOFError
        room = room[count:]
    return bytes(found)

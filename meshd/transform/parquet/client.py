"""Client of the Parquet reader: starts one and yields the rows of one file.

Law: calls block and end within their time limit, and the reader ends with the generator. The reader's
output is untrusted; it receives the bytes of its file and no others.
"""

from __future__ import annotations

import json
import signal
import socket
from typing import TYPE_CHECKING, Final

from meshd.transform.parquet.messages import DATA, DONE, FAILED, HEAD, MAX_TOLD, PIECE, READ
from meshd.transform.parquet.reader_template import TemplateEndedError, start_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from meshd.transform.parquet.reader_template import Reader

MEMORY: Final = 2 << 30
"""Bytes that the process may use, in addition to pyarrow itself."""
SILENT_SECONDS: Final = 120.0
"""Time after which a silent process is killed."""
_FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM})
_AGAIN, _ENOUGH, _A_READ = 8, 256 << 20, 64  # read budget in bytes: many small reads, some of them twice


class ParquetError(Exception):
    """The file cannot be read; the message has the reason."""


class ParquetUnsupportedError(Exception):
    """This node cannot read Parquet; the message has the reason."""


class ParquetInterruptedError(Exception):
    """The file was not read, for a reason that is not in the file and may pass; the message has it."""


def parquet_rows(
    read: Callable[[int, int], bytes],
    size: int,
    *,
    kind: str = "rows",
    memory: int = MEMORY,
    silent: float = SILENT_SECONDS,
) -> Generator[bytes, None, None]:
    """Yield the copy of a file of `size` bytes, as defined in `meshwire.formats.parquet_rows`; for the kind
    "table" (Parquet or Arrow IPC) in `table_rows`, and for "table-3" that of some slices; as JSON for
    "preview" (`row_preview`), and for "statistics" those of its row groups (`group_statistics`).

    The pieces have at most 1 MiB. `read` returns the file's bytes by offset and length. Raises ParquetError,
    ParquetUnsupportedError, ParquetInterruptedError, and what `read` raises.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with theirs:
            reader = _start(theirs, {"size": size, "memory": memory, "kind": kind}, silent)
        ours.settimeout(silent)
        try:
            yield from _received_pieces(ours, read, size)
        except TimeoutError:
            raise _silent(silent) from None
        except (ConnectionError, EOFError):
            raise _end_error(reader) from None
        finally:
            reader.end()


def _start(link: socket.socket, settings: dict[str, object], silent: float) -> Reader:
    try:
        return start_reader(link, settings, silent)
    except TimeoutError:
        raise ParquetInterruptedError(f"its reader did not start within {silent:.0f} s") from None
    except TemplateEndedError as error:
        if -error.code in _FROM_OUTSIDE:
            raise _interrupted_error(error.code) from None
        raise ParquetUnsupportedError(_crash_text(error.code)) from None


def _silent(seconds: float) -> ParquetError:
    return ParquetError(f"its reader sent nothing for {seconds:.0f} s")


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


def _end_error(reader: Reader) -> Exception:
    try:
        code = reader.exit_code()
    except TemplateEndedError as error:  # which reads no file: it was ended, and its readers with it
        return _interrupted_error(error.code)
    except TimeoutError:
        return ParquetError("its reader closed its socket")
    if code == -signal.SIGXCPU:
        return ParquetError("reading it took too much CPU time")
    return ParquetError(_crash_text(code))


def _interrupted_error(code: int) -> ParquetInterruptedError:
    return ParquetInterruptedError(f"the process that its reader came from ended: {_exit(code)}")


def _crash_text(code: int) -> str:
    return f"its reader crashed ({_exit(code)})"


def _exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


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

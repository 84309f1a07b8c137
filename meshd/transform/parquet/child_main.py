"""Main of the Parquet child process: drops its rights, requests the bytes of one file and sends its rows.

Law: the process handles one file and exits. It loads pyarrow first, because no file can be opened
later, and reads the first byte of the file after the last right is dropped. Invariant: it holds one
batch of rows, and the lengths of all rows.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
from typing import TYPE_CHECKING, Any, Final

from meshd.transform.parquet.messages import DATA, DONE, FAILED, HEAD, MAX_TOLD, PIECE, READ
from meshd.transform.sandbox import restrictions, seccomp
from meshwire.dataset.archive_keys import slices_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.transform.parquet.messages import Converter

_CPU_SECONDS: Final = 1800


def main() -> None:
    """Entry point of the process, run by `python -c` with the settings as the first argument."""
    settings = json.loads(sys.argv[1])
    restrictions.set_parent_death_signal(settings["parent"])
    link = _Link(settings["socket"])
    try:
        converter = _confined(settings["memory"], settings["kind"])
    except ImportError as error:
        link.fail("missing", str(error))
    except OSError as error:
        link.fail("refused", f"this node cannot restrict a process: {error}")
    else:
        _send_rows(link, converter, _Source(link, settings["size"]))


def _confined(memory: int, kind: str) -> Converter:
    """Drop all rights and return the converter. Raises ImportError, OSError."""
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    restrictions.set_resource_limits()
    restrictions.drop_capabilities()
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    sys.meta_path.insert(0, _NotPandas())
    made: type[Converter]
    whole, slices = slices_of(kind)
    if whole == "table":
        from meshd.transform.parquet.table_conversion import TableConverter as made
    elif kind == "statistics":
        from meshd.transform.parquet.group_statistics import StatisticsConverter as made
    elif kind == "preview":
        from meshd.transform.parquet.row_preview import PreviewConverter as made
    else:
        from meshd.transform.parquet.row_conversion import RowConverter as made
    _preload_pyarrow(made, arrow=whole in ("table", "preview"))
    if len(os.listdir("/proc/self/task")) != 1:  # the filter restricts one thread only
        raise restrictions.RestrictionError("pyarrow started a thread")
    seccomp.install_filter(files=False, last=True)
    restrictions.set_memory_limit(statm, memory)
    return made() if not slices else made(slices)  # type: ignore[call-arg]  # only tables have slices


def _preload_pyarrow(converter: type[Converter], *, arrow: bool) -> None:
    """Convert a small Parquet file, and with `arrow` an Arrow file, as the process will do, so that pyarrow
    loads what it loads on first use."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.array(np.zeros(1))  # loads numpy.ma, for members of lists
    table = pa.table({"a": ["x", None], "b": [[1.0], [2.0]], "c": [{"d": b"y"}, None], "e": [True, None]})
    files = [io.BytesIO()]
    pq.write_table(table, files[0], compression="zstd", use_dictionary=["a"])
    for new in (pa.ipc.new_file, pa.ipc.new_stream) if arrow else ():
        files.append(io.BytesIO())
        options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
        with new(files[-1], table.schema, options=options) as writer:
            writer.write_table(table)
    for file in files:
        data = file.getvalue()
        for _ in converter().convert(io.BytesIO(data), len(data)):
            pass


class _NotPandas:
    """Refuses to import pandas: pyarrow would load it, if it is installed, only to ask whether a list is a
    Series. That takes as long as everything else until the first row.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "pandas":
            raise ImportError("pandas is not used here", name=name)


def _send_rows(link: _Link, rows: Converter, source: _Source) -> None:
    try:
        for piece in rows.convert(source, source.size):
            link.send_message(DATA, piece)
        link.send_message(DONE)
    except MemoryError:
        link.fail("memory", "")
    except Exception as error:  # a hostile file can make a library raise anything
        link.fail("bad", str(error) or type(error).__name__)


class _Link:
    """The connection to the parent; plain reads and writes, because nothing else is allowed later."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send_message(self, what: bytes, data: bytes = b"") -> None:
        self._write(HEAD.pack(what, 0, len(data)))
        self._write(data)

    def fail(self, kind: str, why: str) -> None:
        self.send_message(FAILED, json.dumps({"kind": kind, "why": why[:MAX_TOLD]}).encode())

    def request_bytes(self, offset: int, length: int) -> bytes:
        """Return bytes of the file."""
        self._write(HEAD.pack(READ, offset, length))
        found: list[bytes] = []
        while length:
            found.append(os.read(self._fd, length))
            if not found[-1]:
                os._exit(0)  # the parent closed the connection
            length -= len(found[-1])
        return b"".join(found)

    def _write(self, data: bytes) -> None:
        room = memoryview(data)
        while room:
            room = room[os.write(self._fd, room) :]


class _Source(io.RawIOBase):
    """The file as a stream for pyarrow."""

    def __init__(self, link: _Link, size: int) -> None:
        self._link, self.size, self._at = link, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0 if whence == os.SEEK_SET else self._at if whence == os.SEEK_CUR else self.size)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.size - self._at)
        data = b"".join(self._pieces(left if size < 0 else min(size, left)))
        self._at += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, room: Any) -> int:
        data = self.read(len(room))
        room[: len(data)] = data
        return len(data)

    def _pieces(self, length: int) -> Iterator[bytes]:
        for at in range(self._at, self._at + length, PIECE):
            yield self._link.request_bytes(at, min(PIECE, self._at + length - at))

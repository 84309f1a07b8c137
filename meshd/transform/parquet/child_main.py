"""Main of the Parquet template, and of the readers that it forks: a reader drops its rights, requests the
bytes of one file and sends its rows.

Law: the template loads pyarrow and handles no file. A reader handles one file and exits. It opens no file,
because none can be opened later, and reads the first byte of its file after the last right is dropped; of
the template's descriptors it keeps its socket alone. Invariant: it holds one batch of rows, and the lengths
of all rows.
"""

from __future__ import annotations

import gc
import io
import json
import os
import resource
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

from meshd.transform.parquet.messages import DATA, DONE, FAILED, HEAD, MAX_TOLD, PIECE, READ, STARTED
from meshd.transform.sandbox import restrictions, seccomp
from meshwire.dataset.archive_paths import slices_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.transform.parquet.messages import Converter

_CPU_SECONDS: Final = 1800
_MAX_REQUEST: Final = 4096
_LINK: Final = 3
_MAX_FILES: Final = 1 << 20


def main() -> None:
    """Entry point of the template, run by `python -c` with the number of its socket as the first
    argument."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    _Template(requests, _load()).run()


def _load() -> tuple[str, str] | None:
    """Load what readers need. Returns why they cannot run: a kind of failure, and its reason."""
    sys.meta_path.insert(0, _NotPandas())
    try:
        for kind in ("rows", "table", "statistics", "preview"):
            _preload_pyarrow(_converter(kind), arrow=kind in ("table", "preview"))
    except ImportError as error:
        return "missing", str(error)
    if len(os.listdir("/proc/self/task")) != 1:  # a fork has one thread, and the filter restricts one only
        return "refused", _refusal("pyarrow started a thread")
    gc.collect()
    gc.freeze()  # the collector of a reader that looked through it would copy it
    return None


def _refusal(why: object) -> str:
    return f"this node cannot restrict a process: {why}"


class _Template:
    """Forks a reader for each request, tells how it ended, and ends one whose owner has gone; ends when
    nobody can ask any more. `failure`: why no reader can run."""

    def __init__(self, requests: socket.socket, failure: tuple[str, str] | None) -> None:
        self._requests, self._failure = requests, failure
        self._readers: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._woken, waker = socket.socketpair()
        self._waker = waker
        for end in (self._woken, waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    self._reap()
                elif key.fileobj is not self._requests:
                    self._end(key.data)
                elif not self._answer():
                    return  # its readers end with it

    def _answer(self) -> bool:
        """Take one request; returns False if there will be none."""
        text, files, _, _ = socket.recv_fds(self._requests, _MAX_REQUEST, 2)
        if not text:
            return False
        link, owner = files[0], socket.socket(fileno=files[1])
        if self._failure is None:
            self._fork(json.loads(text), link, owner)
        else:
            with owner, suppress(OSError):  # nobody waits any more
                owner.send(STARTED)
                _Link(link).fail(*self._failure)
        os.close(link)
        return True

    def _fork(self, settings: dict[str, Any], link: int, owner: socket.socket) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            with owner, suppress(OSError):
                owner.send(b"%d" % (error.errno or 0))
            return
        if not pid:
            _be_reader(settings, link, parent)
        self._readers[pid] = owner
        self._selector.register(owner, selectors.EVENT_READ, pid)
        with suppress(OSError):
            owner.send(STARTED)

    def _end(self, pid: int) -> None:
        """Nobody wants what this reader does."""
        if pid in self._readers:
            self._selector.unregister(self._readers[pid])
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                owner = self._readers.pop(found[0])
                with suppress(KeyError):  # `_end` did
                    self._selector.unregister(owner)
                with owner, suppress(OSError):
                    owner.send(b"%d" % os.waitstatus_to_exitcode(found[1]))


def _be_reader(settings: dict[str, Any], link: int, parent: int) -> NoReturn:
    """Read one file, from fork to exit; nothing of the template's stack runs after it."""
    code = 1
    try:
        restrictions.set_parent_death_signal(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(link, _LINK)
        os.closerange(_LINK + 1, _MAX_FILES)
        _read_file(_Link(_LINK), settings)
        code = 0
    finally:
        os._exit(code)


def _read_file(link: _Link, settings: dict[str, Any]) -> None:
    try:
        converter = _confine(settings["memory"], settings["kind"])
    except OSError as error:
        link.fail("refused", _refusal(error))
    else:
        _send_rows(link, converter, _Source(link, settings["size"]))


def _confine(memory: int, kind: str) -> Converter:
    """Drop all rights and return the converter. Raises OSError."""
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    restrictions.set_resource_limits()
    restrictions.drop_capabilities()
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    made, slices = _converter(kind), slices_of(kind)[1]
    seccomp.install_filter(files=False, last=True)
    restrictions.set_memory_limit(statm, memory)
    return made() if not slices else made(slices)  # type: ignore[call-arg]  # only tables have slices


def _converter(kind: str) -> type[Converter]:
    """Raises ImportError."""
    made: type[Converter]
    if slices_of(kind)[0] == "table":
        from meshd.transform.parquet.table_conversion import TableConverter as made
    elif kind == "statistics":
        from meshd.transform.parquet.group_statistics import StatisticsConverter as made
    elif kind == "preview":
        from meshd.transform.parquet.row_preview import PreviewConverter as made
    else:
        from meshd.transform.parquet.row_conversion import RowConverter as made
    return made


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

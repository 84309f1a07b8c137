"""A file system that consists of one file: the kernel's requests for it, by the FUSE protocol (7.31).

Law: the standard library alone. One thread takes the requests; its owner answers reads and writes, from any
thread and at any time. Bytes that are read go to the kernel from where they are, without a copy in this
process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES: Final = 1 << 20
"""Of a request: 256 pages, the most that the kernel asks for at a time."""
AT_A_TIME: Final = 64
"""Requests that wait for their answers, at most: more than the queue of a drive holds."""
_DEVICE: Final = "/dev/fuse"
_ROOM: Final = 4096  # for the headers of a request
_IN: Final = struct.Struct("<IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extensions, padding
_OUT: Final = struct.Struct("<IiQ")  # length, error, unique
_INIT_IN: Final = struct.Struct("<IIII")  # major, minor, max_readahead, flags
_INIT_OUT: Final = struct.Struct("<IIIIHHIIHH32x")
_ATTRIBUTES: Final = struct.Struct("<QIIQQQQQQIIIIIIIIII")  # how long they are valid, then fuse_attr
_OPENED: Final = struct.Struct("<QIi")
_MOVED: Final = struct.Struct("<QQI20x")  # handle, offset, size: of a read, and of a write before its bytes
_WRITTEN: Final = struct.Struct("<I4x")
_STATFS: Final = struct.Struct("<QQQQQIIII24x")
_FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _STATFS_CODE = 2, 3, 4, 14, 15, 16, 17
_RELEASE, _FSYNC, _FLUSH, _INIT, _ACCESS, _INTERRUPT, _BATCH_FORGET = 18, 20, 25, 26, 34, 36, 42
_UNANSWERED: Final = frozenset((_FORGET, _INTERRUPT, _BATCH_FORGET))
_EMPTY: Final = frozenset((_RELEASE, _FSYNC, _FLUSH, _ACCESS))
_VERSION: Final = 7, 31
# Asynchronous reads, large writes, asynchronous direct I/O, requests of up to MAX_BYTES.
_FLAGS: Final = 1 << 0 | 1 << 5 | 1 << 15 | 1 << 22
_DIRECT: Final = 1 << 0 | 1 << 6  # not by the page cache, and several writes at a time
_VALID_SECONDS: Final = 3600
_MODE: Final = stat.S_IFREG | 0o600
_NOSUID_NODEV: Final = 2 | 4
_libc = ctypes.CDLL(None, use_errno=True)


class FileOwner(Protocol):
    """Moves the bytes of the file. Both calls return at once, and `answer` is called when it is done."""

    def read(self, call: Call, offset: int, length: int) -> None: ...

    def write(self, call: Call, offset: int, data: memoryview) -> None:
        """`data` is only valid during the call."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A read or a write of the kernel, which waits for its answer."""

    file: FuseFile
    unique: int

    def answer_read(self, data: memoryview) -> None:
        """Hand over the bytes that were asked for."""
        self.file.answer(self.unique, data)

    def answer_write(self, length: int) -> None:
        """Say that so many bytes have been written."""
        self.file.answer(self.unique, _WRITTEN.pack(length))


class FuseFile:
    """The file at `place`, which exists as an empty file, of `size` bytes. `serve` answers until it is
    unmounted. Needs root. Raises OSError."""

    def __init__(self, place: Path, size: int, owner: FileOwner) -> None:
        self._size, self._owner, self._began = size, owner, int(time.time())
        self._fd = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fd},rootmode={stat.S_IFREG:o},user_id=0,group_id=0,allow_other"
        target = os.fsencode(place)
        if _libc.mount(b"drive", target, b"fuse", _NOSUID_NODEV, options.encode()):
            code = ctypes.get_errno()
            os.close(self._fd)
            raise OSError(code, os.strerror(code), str(place))

    def __repr__(self) -> str:
        return f"<FuseFile of {self._size} bytes>"

    def serve(self) -> None:
        """Take requests until the file is unmounted."""
        buffer = bytearray(MAX_BYTES + _ROOM)
        view = memoryview(buffer)
        while True:
            try:
                length = os.readv(self._fd, [buffer])
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # interrupted before it was read
                    continue
                raise
            self._obey(view[:length])

    def answer(self, unique: int, data: bytes | memoryview = b"", error: int = 0) -> None:
        """Answer a request; `error`: an errno."""
        head = _OUT.pack(_OUT.size + len(data), -error, unique)
        try:
            os.writev(self._fd, (head, data))
        except OSError as failed:
            if failed.errno not in (errno.ENOENT, errno.ENODEV):  # nobody waits for it any more
                raise

    def _obey(self, request: memoryview) -> None:
        _, code, unique, *_ = _IN.unpack_from(request)
        body = request[_IN.size :]
        if code in (_READ, _WRITE):
            _, offset, length = _MOVED.unpack_from(body)
            if code == _READ:
                self._owner.read(Call(self, unique), offset, max(0, min(length, self._size - offset)))
            else:
                self._owner.write(Call(self, unique), offset, body[_MOVED.size : _MOVED.size + length])
        elif code in (_GETATTR, _SETATTR):
            self.answer(unique, self._attributes())
        elif code == _INIT:
            self._begin(unique, body)
        elif code == _OPEN:
            self.answer(unique, _OPENED.pack(1, _DIRECT, 0))
        elif code == _STATFS_CODE:
            self.answer(unique, _STATFS.pack(self._size >> 12, 0, 0, 1, 0, 4096, 255, 4096, 0))
        elif code in _EMPTY:
            self.answer(unique)
        elif code not in _UNANSWERED:
            self.answer(unique, error=errno.ENOSYS)

    def _begin(self, unique: int, body: memoryview) -> None:
        major, minor, readahead, flags = _INIT_IN.unpack_from(body)
        if (major, minor) < _VERSION:
            self.answer(unique, error=errno.EPROTO)
            return
        pages = MAX_BYTES // 4096
        limits = AT_A_TIME, AT_A_TIME, MAX_BYTES, 1, pages, 0
        self.answer(unique, _INIT_OUT.pack(*_VERSION, readahead, flags & _FLAGS, *limits))

    def _attributes(self) -> bytes:
        times = (self._began,) * 3
        plain = _MODE, 1, 0, 0, 0, 4096, 0  # mode, links, uid, gid, rdev, block size, flags
        blocks = -(-self._size // 512)
        return _ATTRIBUTES.pack(_VALID_SECONDS, 0, 0, 1, self._size, blocks, *times, 0, 0, 0, *plain)

"""Local handover: frames from a node on the same host arrive as shared memory instead of over TCP.

Law: a node is local if the `id` file of its handover directory is readable here and matches the id in its
responses. Every frame still needs a signed request. A failed handover falls back to TCP and pauses handovers
from that node.
Invariant: a write to a frame is private to this process (copy-on-write); no other job sees it.
"""

from __future__ import annotations

import array
import fcntl
import math
import mmap
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshsdk.client.arena import Lease
from meshsdk.errors import MeshError
from meshwire.http_values.mesh_headers import (
    HANDOVER_ID_FILE,
    is_handover_id,
    parse_handover_block,
    parse_handover_directory,
    parse_handover_ticket,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshsdk.client.arena import Arena
    from meshsdk.client.settings import Endpoint
    from meshwire.http_values.mesh_headers import HandoverBlock, HandoverTicket

LOCAL_VARIABLE: Final = "MESH_LOCAL"
_SHUNNED: Final = 30.0  # seconds
_PATIENCE: Final = 5.0  # seconds; enough, as the node already has the frame
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class HandoverError(MeshError):
    """A frame could not be handed over; the caller requests it again over TCP."""


class LocalHandover:
    """Knows which endpoints are nodes on this host, and receives frames from them.

    `env` may have MESH_LOCAL: `off`, or the path where the nodes' handover directory is mounted here.
    """

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        self._setting = env.get(LOCAL_VARIABLE, "").strip()
        self._heard: dict[Endpoint, str] = {}
        self._shunned: dict[Endpoint, float] = {}
        """By endpoint, until when its frames come over TCP, after a failed handover."""
        self._near: dict[Endpoint, tuple[str, str]] = {}
        """By endpoint of a local node, the id to send and the path of its directory as seen from here."""

    def record_directory(self, endpoint: Endpoint, said: str) -> None:
        """Record the handover directory that a node announced in a response; "" if it announced none."""
        if not said or self._setting == "off":
            return
        if self._heard.get(endpoint) == said and not self._is_over(endpoint):
            return
        self._heard[endpoint] = said
        self._near.pop(endpoint, None)
        place = parse_handover_directory(said)
        if place is not None and _read_id(directory := self._setting or place.directory) == place.id:
            self._near[endpoint] = place.id, directory

    def _is_over(self, endpoint: Endpoint) -> bool:
        """Return whether the pause of an endpoint has just ended, and forget the pause."""
        if self._shunned.get(endpoint, math.inf) > time.monotonic():
            return False
        return self._shunned.pop(endpoint, None) is not None

    def _shun(self, endpoint: Endpoint) -> None:
        self._near.pop(endpoint, None)
        self._shunned[endpoint] = time.monotonic() + _SHUNNED

    def handover_id(self, endpoint: Endpoint) -> str:
        """Return the id to send with a request so that its frame is handed over; "" for a remote node."""
        return self._near.get(endpoint, ("", ""))[0]

    def receive_frames(
        self, endpoint: Endpoint, answer: str, sizes: Sequence[int], arena: Arena, block: str = ""
    ) -> list[Lease]:
        """Receive the frames of these sizes that a response names; () for one. `block`: what the response
        says of the memory that they are in; it is mapped once.

        They stay in the node's shared pages if the arena can adopt them, else they are copied to slots.
        Raises HandoverError; frames of the endpoint then come over TCP for 30 s.
        """
        handed, (_, directory) = parse_handover_ticket(answer), self._near.get(endpoint, ("", ""))
        if handed is None or not directory:
            self._shun(endpoint)
            raise HandoverError(f"{endpoint}: invalid handover ticket: {answer[:80]!r}")
        try:
            return _fetch_frames(
                directory, handed, sizes or (handed.size,), arena, parse_handover_block(block)
            )
        except (OSError, ValueError) as error:
            self._shun(endpoint)
            raise HandoverError(f"{endpoint}: the local handover of a frame failed: {error}") from error

    def __repr__(self) -> str:
        return f"LocalHandover({', '.join(map(str, self._near)) or 'no local node'})"


def _read_id(directory: str) -> str:
    try:
        fd = os.open(f"{directory}/{HANDOVER_ID_FILE}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        found = os.read(fd, 64).decode("latin-1")
    except OSError:
        return ""
    finally:
        os.close(fd)
    return found if is_handover_id(found) else ""


def _fetch_frames(
    directory: str,
    handed: HandoverTicket,
    sizes: Sequence[int],
    arena: Arena,
    block: HandoverBlock | None,
) -> list[Lease]:
    """Fetch frames through the node's socket. Raises OSError, ValueError.

    The connection stays open for as long as the node's memory is in use.
    """
    with _dial(directory, handed.socket) as line:
        fds = _receive_fds(line, handed.ticket, len(sizes) if block is None else 1)
        holds = _Holds(line.detach())
    try:
        if block is not None:
            return _leased_parts(fds[0], sizes, block, arena, holds)
        return [_lease_frame(fd, size, arena, holds) for fd, size in zip(fds, sizes, strict=True)]
    finally:
        for fd in fds:
            os.close(fd)
        holds.release()


class _Holds:
    """Closes a connection when everything that holds it has released it, on any thread; made with one hold.
    Only one thread adds holds, while it has its own. What is collected as garbage closes it, too."""

    def __init__(self, fd: int) -> None:
        self._open = [fd]
        self._left = [None]  # removing an element is atomic, from both

    def __del__(self) -> None:
        self._close()

    def add(self) -> None:
        self._left.append(None)

    def release(self) -> None:
        self._left.pop()
        if not self._left:
            self._close()

    def _close(self, close: Callable[[int], None] = os.close) -> None:
        # At the end of the interpreter, which may come before that of a batch, modules have lost their names.
        try:
            close(self._open.pop())
        except IndexError:
            return


def _check_sealed(fd: int, size: int) -> None:
    """Raise OSError or ValueError unless this is sealed memory of this size."""
    sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    if not sealed or os.fstat(fd).st_size != size:
        raise ValueError(f"the shared memory is not {size} bytes or not sealed")


def _leased_parts(
    fd: int, sizes: Sequence[int], block: HandoverBlock, arena: Arena, holds: _Holds
) -> list[Lease]:
    """Return the frames in a block of shared memory on lease, as `_lease_frame`."""
    _check_sealed(fd, block.size)
    places = [(offset, offset + size) for offset, size in zip(block.offsets, sizes, strict=True)]
    if any(begin % mmap.PAGESIZE or end > block.size for begin, end in places):
        raise ValueError(f"frames at {block.offsets} do not fit the shared memory of {block.size} bytes")
    first, last = min(block.offsets), max(end for _, end in places)
    if arena.can_adopt(last - first):
        pages = _map_frames(fd, last - first, first)
        holds.add()
        view = arena.adopt_pages(pages, holds.release, len(sizes)).view
        return [Lease(view[begin - first : end - first], end - begin) for begin, end in places]
    leases = []
    for begin, end in places:
        lease = arena.acquire_slot(end - begin)
        _fill(fd, lease.view, begin)
        leases.append(lease)
    return leases


def _lease_frame(fd: int, size: int, arena: Arena, holds: _Holds) -> Lease:
    """Return the frame in shared memory on lease: where it lies, or copied. Raises OSError, ValueError."""
    _check_sealed(fd, size)
    if arena.can_adopt(size):
        pages = _map_frames(fd, size)
        holds.add()
        return arena.adopt_pages(pages, holds.release)
    lease = arena.acquire_slot(size)
    _fill(fd, lease.view)
    return lease


def _dial(directory: str, name: str) -> socket.socket:
    """Connect to a socket in the directory.

    The path goes through a descriptor of the directory, because a socket's path is limited to 107 bytes.
    """
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    at = -1
    try:
        at = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        line.settimeout(_PATIENCE)
        line.connect(str(Path("/proc/self/fd", str(at), name)))
    except BaseException:
        line.close()
        raise
    finally:
        if at >= 0:
            os.close(at)
    return line


def _receive_fds(line: socket.socket, ticket: str, count: int) -> list[int]:
    line.sendall(ticket.encode())
    fds = array.array("i")
    _, ancillary, _, _ = line.recvmsg(1, socket.CMSG_SPACE(count * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if len(fds) != count:
        for fd in fds:
            os.close(fd)
        raise ValueError("the node did not accept the ticket")
    return fds.tolist()


def _map_frames(fd: int, size: int, offset: int = 0) -> Any:
    """Map frames privately, so that writes to a batch copy the page and stay in this process.

    The kernel maps pages on first access, sixteen at a time. To have it map all of them now, one by one,
    would take longer and hold the interpreter's lock.
    """
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    pages = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=prot, offset=offset)
    return np.frombuffer(pages, np.uint8)


def _fill(fd: int, view: memoryview, offset: int = 0) -> None:
    at = 0
    while at < len(view):
        got = os.preadv(fd, [view[at:]], offset + at)
        if not got:
            raise ValueError(f"the shared memory ends after {at} of {len(view)} bytes")
        at += got

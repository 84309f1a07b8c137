"""Local handover: frames from a node on the same host arrive as shared memory instead of over TCP.

Law: a node is local when its directory's `id` is readable here and equals the one in its answer; every
frame still needs a signed request. A failed handover falls back to TCP and pauses handovers from that
node.
Invariant: a frame's pages become private to this process on the first write; no other job sees one.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import math
import mmap
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshsdk.errors import MeshError
from meshwire.http_values.mesh_headers import (
    HANDOVER_ID_FILE,
    is_handover_id,
    parse_handover_directory,
    parse_handover_ticket,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshsdk.client.arena import Arena, Lease
    from meshsdk.client.settings import Endpoint
    from meshwire.http_values.mesh_headers import HandoverTicket

LOCAL_VARIABLE: Final = "MESH_LOCAL"
_SHUNNED: Final = 30.0  # seconds
_PATIENCE: Final = 5.0  # seconds; the node has the frame already
_POPULATE_READ: Final = 22  # madvise(2); not named by `mmap`
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class HandoverError(MeshError):
    """A frame that could not be taken over: it is to be asked for once more, over TCP."""


class LocalHandover:
    """Which endpoints are nodes on this host, and where their frames are found. `env`: MESH_LOCAL says `off`,
    or where the nodes' directory is mounted here."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        self._setting = env.get(LOCAL_VARIABLE, "").strip()
        self._heard: dict[Endpoint, str] = {}
        self._shunned: dict[Endpoint, float] = {}
        """Until when frames of an endpoint come over TCP, because one could not be taken over."""
        self._near: dict[Endpoint, tuple[str, str]] = {}
        """Of a node on this host: the id to say, and the directory as seen from here."""

    def record_directory(self, endpoint: Endpoint, said: str) -> None:
        """What an answer said of its node's directory, if anything."""
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
        """Whether an endpoint was shunned for long enough."""
        if self._shunned.get(endpoint, math.inf) > time.monotonic():
            return False
        return self._shunned.pop(endpoint, None) is not None

    def _shun(self, endpoint: Endpoint) -> None:
        self._near.pop(endpoint, None)
        self._shunned[endpoint] = time.monotonic() + _SHUNNED

    def handover_id(self, endpoint: Endpoint) -> str:
        """What to say with a question so that its frame is handed over; empty for a node elsewhere."""
        return self._near.get(endpoint, ("", ""))[0]

    def receive_frame(self, endpoint: Endpoint, answer: str, arena: Arena) -> Lease:
        """The frame that an answer names: in pages of its own, or in a slot, where a device wants that.

        Raises HandoverError; the endpoint is then no neighbour for a while.
        """
        handed, (_, directory) = parse_handover_ticket(answer), self._near.get(endpoint, ("", ""))
        if handed is None or not directory:
            self._shun(endpoint)
            raise HandoverError(f"{endpoint}: not understood: {answer[:80]!r}")
        try:
            return _taken(directory, handed, arena)
        except (OSError, ValueError) as error:
            self._shun(endpoint)
            raise HandoverError(f"{endpoint}: its frame cannot be taken over: {error}") from error

    def __repr__(self) -> str:
        return f"Neighbours({', '.join(map(str, self._near)) or 'none'})"


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


def _taken(directory: str, handed: HandoverTicket, arena: Arena) -> Lease:
    """Raises OSError, ValueError. The connection is open as long as the node's memory is used."""
    line = _dialled(directory, handed.socket)
    try:
        fd = _received(line, handed.ticket)
        try:
            if not _is_settled(fd, handed.size):
                raise ValueError("it is of another size than was said, or could still change")
            if arena.can_adopt(handed.size):
                return arena.adopt_pages(_mapped(fd, handed.size), line.close)
            lease = arena.acquire_slot(handed.size)
            _fill(fd, lease.view)
        finally:
            os.close(fd)
    except BaseException:
        line.close()
        raise
    line.close()
    return lease


def _dialled(directory: str, name: str) -> socket.socket:
    """Through a descriptor of the directory: a socket's path has 107 bytes at most."""
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


def _received(line: socket.socket, ticket: str) -> int:
    line.sendall(ticket.encode())
    fds = array.array("i")
    _, ancillary, _, _ = line.recvmsg(1, socket.CMSG_SPACE(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise ValueError("the ticket was not taken")
    return fds[0]


def _is_settled(fd: int, size: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS and os.fstat(fd).st_size == size


def _mapped(fd: int, size: int) -> Any:
    """Private: who writes into a batch writes into a page of their own."""
    pages = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(OSError):  # before Linux 5.14: pages come as they are read
        pages.madvise(_POPULATE_READ)
    return np.frombuffer(pages, np.uint8)


def _fill(fd: int, view: memoryview) -> None:
    at = 0
    while at < len(view):
        got = os.preadv(fd, [view[at:]], at)
        if not got:
            raise ValueError("it ends early")
        at += got

"""Finished frames for clients on the same host: a file descriptor over a Unix socket instead of TCP.

The signed request that a frame answers authorizes access to it; its ticket works once, for that client,
within seconds. Only sealed memory, which can no longer be written, is handed out, never a file. A frame
counts against the node's memory until its connection ends. The total is bounded; beyond the bound frames go
over TCP.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import secrets
import socket
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.core.frame_address import common_block
from meshd.core.memory_frames import is_sealed
from meshd.rpc.unix_messages import accept_sockets, listen
from meshd.telemetry import metrics
from meshd.util.tenant_limits import Admission, AdmissionRejectedError, current_tenant
from meshd.util.timeouts import timeout
from meshwire.http_values.mesh_headers import (
    HANDOVER_ID_FILE,
    LOCAL_HANDOVER_HEADER,
    TICKET_BYTES,
    HandoverDirectory,
    HandoverTicket,
    is_handover_id,
    parse_handover_directory,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from meshd.core.frame_address import Frame

MIN_FRAME_BYTES: Final = 256 << 10  # below this, TCP is as fast as an extra connection
MIN_SERIES_FRAME_BYTES: Final = 64 << 10  # of each frame of several, which share a connection
TICKET_SECONDS: Final = 10.0  # seconds for which a ticket is valid
_CONNECTIONS: Final = 1024


def load_or_create_host_id(directory: Path) -> str:
    """Return the id in the directory's `id` file, which is created if it is missing."""
    file = directory / HANDOVER_ID_FILE
    if not file.exists():
        draft = directory / f".{HANDOVER_ID_FILE}-{secrets.token_hex(8)}"
        draft.write_text(secrets.token_hex(16))
        draft.chmod(0o444)
        with contextlib.suppress(FileExistsError):  # another process of the node was faster
            os.link(draft, file)
        draft.unlink()
    return file.read_text()


class _Held(msgspec.Struct):
    """Frames that wait for a job, or that a job uses, and their bytes."""

    frames: Sequence[Frame]
    size: int
    account: str
    timer: asyncio.TimerHandle


class LocalFrameService:
    """Hands frames to jobs on this host. One instance per worker. `most`: bytes handed out at a time."""

    def __init__(self, directory: Path, name: str, most: int) -> None:
        """Create the directory and listen in it. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        place = HandoverDirectory(load_or_create_host_id(directory), str(directory.absolute()))
        if not is_handover_id(place.id) or parse_handover_directory(place.to_header()) is None:
            raise OSError(f"{directory} has an unsupported name, or its file {HANDOVER_ID_FILE} is damaged")
        self.location = place
        self._name = f"{name}.sock"
        self._listener = listen(directory / self._name)
        os.chmod(directory / self._name, 0o666)
        self._room = Admission(most)
        self._held: dict[str, _Held] = {}

    def __repr__(self) -> str:
        return f"<LocalFrameService {self._name}, {self._room!r}>"

    @property
    def location_header(self) -> tuple[str, str]:
        """The header that tells jobs where to fetch frames."""
        return LOCAL_HANDOVER_HEADER, self.location.to_header()

    def offer_frames(
        self, frames: Sequence[Frame], asked: str, *, blocks: bool = False
    ) -> HandoverTicket | None:
        """Take over frames that are fetched together by one ticket; `blocks`: whether the client accepts
        frames in a block of memory. Returns None if their bytes must be sent: the client did not ask for
        local handover, a frame is small, its memory cannot be shared, or too much is handed out."""
        size = sum(frame.size for frame in frames)
        if asked != self.location.id or size < MIN_FRAME_BYTES or len(self._held) >= _CONNECTIONS:
            return None
        if any(frame.size < MIN_SERIES_FRAME_BYTES for frame in frames):
            return None
        if any(frame.block for frame in frames):
            block = common_block(frames)
            if not blocks or block is None or not is_sealed(frames[0].fd, block.size):
                return None
        elif not all(is_sealed(frame.fd, frame.size) for frame in frames):
            return None
        who = current_tenant()
        if not self._admit(who, size):
            return None
        ticket = secrets.token_hex(TICKET_BYTES // 2)
        timer = asyncio.get_running_loop().call_later(TICKET_SECONDS, self._expire, ticket)
        self._held[ticket] = _Held(frames, size, who, timer)
        metrics.frames_handed.inc(len(frames))
        metrics.frames_handed_bytes.inc(size)
        return HandoverTicket(self._name, ticket, size)

    def _admit(self, who: str, size: int) -> bool:
        try:
            self._room.admit(who, size)
        except AdmissionRejectedError:
            return False
        return True

    def _expire(self, ticket: str) -> None:
        held = self._held.pop(ticket, None)
        if held is not None:
            self._release(held)

    def _release(self, held: _Held) -> None:
        held.timer.cancel()
        for frame in held.frames:
            frame.close()
        self._room.release(held.account, held.size)
        metrics.frames_handed_bytes.dec(held.size)

    async def serve_forever(self) -> None:
        """Serve until cancelled; jobs keep the frames they have fetched."""
        try:
            await accept_sockets(self._listener, self._serve, most=_CONNECTIONS)
        finally:
            self._listener.close()
            for ticket in list(self._held):
                self._expire(ticket)

    async def _serve(self, sock: socket.socket) -> None:
        """Hand out what a ticket is for: receive it, send the descriptors, then wait until the client
        closes."""
        loop, said = asyncio.get_running_loop(), b""
        async with timeout(TICKET_SECONDS):
            while len(said) < TICKET_BYTES:
                more = await loop.sock_recv(sock, TICKET_BYTES - len(said))
                if not more:
                    return
                said += more
        held = self._held.pop(said.decode("latin-1"), None)
        if held is None:
            return
        held.timer.cancel()
        try:
            shared = held.frames[:1] if common_block(held.frames) else held.frames
            right = array.array("i", [frame.fd for frame in shared])
            sock.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, right)])
            await loop.sock_recv(sock, 1)  # the client sends nothing more: this returns when it closes
        finally:
            self._release(held)

"""Main loop of a transform worker: accept the pool's connection, render slices, reply.

Law: a worker has no state except caches and may die at any moment; the pool retries its rows elsewhere.
A row that exceeds its limits ends the process, so no input can hold a core or memory indefinitely.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.rpc.process_server import serve_blocking
from meshd.rpc.unix_messages import MessageError
from meshd.transform.assets import LoadedAssets
from meshd.transform.compiler import load_program
from meshd.transform.errors import OutOfMemoryError
from meshd.transform.messages import RENDER, Failure, RenderReply, write_progress
from meshd.transform.resource_limits import RowLimits, RowWatchdog, keep_heap
from meshd.transform.slice_renderer import SliceRenderer
from meshd.transform.source_files import SourceFiles, SourceGoneError
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from meshd.transform.compiler import Program
    from meshd.transform.messages import FailureKind, RenderRequest

_log = logging.getLogger(__name__)
_USUAL = RowLimits()
MAX_PROGRAMS = 64  # compiled programs to keep; the pool resends a program's text after at most half as many


class WornOutError(Exception):
    """The process retains too much memory to judge another row and must be replaced."""


def main(listener: socket.socket, limits: RowLimits = _USUAL) -> None:
    """Serve the pool on `listener` (a Unix socket), one connection at a time.

    Returns when the process must be replaced.
    """
    keep_heap(limits.memory)
    watch = RowWatchdog(limits)
    while True:
        sock, _ = listener.accept()
        try:
            _PoolConnection(watch).serve(sock)
        except MessageError:
            pass
        except WornOutError as error:
            _log.info("%s", error)
            return
        except (MemoryError, OutOfMemoryError):
            _log.warning("a row needs more memory than this process has left; it is retried in a new process")
            return


def program_key(text: str) -> str:
    """Return the key that identifies a program on a connection."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _broken(request: RenderRequest, error: Exception) -> RenderReply:
    """Return the reply if the renderer itself failed rather than a row.

    That is a defect, which no bad-sample policy covers, or an asset that has moved.
    """
    reason = f"{type(error).__name__}: {error}"[:300]
    kind: FailureKind = "read" if isinstance(error, SourceGoneError) else "op"
    failures = tuple(Failure(row.row, 0, kind, "renderer", reason) for row in request.rows)
    return RenderReply(request.number, (), failures, (), (), 0.0)


class _PoolConnection:
    def __init__(self, watch: RowWatchdog) -> None:
        self._watch = watch
        self._files = SourceFiles()
        self._assets = LoadedAssets(self._files)
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._programs: OrderedDict[str, Program] = OrderedDict()
        self._clock = SystemClock()

    def serve(self, sock: socket.socket) -> None:
        """Answer until the pool disconnects. Raises WornOutError, OutOfMemoryError, MessageError."""
        try:
            serve_blocking(sock, RENDER, self._answer)
        finally:
            self._watch.end_row()
            self._files.close()

    def _answer(self, request: RenderRequest, fds: Sequence[int]) -> tuple[RenderReply, Sequence[int]]:
        frame_fd, progress_fd = fds
        clock = self._clock.monotonic
        began = clock()
        self._check_room(request)
        begin = self._watch.begin_row

        def before_row(row: int) -> None:
            write_progress(progress_fd, request.number, row)
            begin()

        renderer = SliceRenderer(self._files, before_row, clock, self._watch.is_worn)
        try:
            reply, scratch = renderer.render(self._program(request), request, frame_fd)
        except OutOfMemoryError:
            raise
        except Exception as error:
            _log.exception("the renderer failed on a slice of rows")
            reply, scratch = _broken(request, error), None
        self._watch.end_row()
        reply = msgspec.structs.replace(reply, seconds=clock() - began)
        return reply, () if scratch is None else (scratch,)

    def _check_room(self, request: RenderRequest) -> None:
        """Exit before a row begins with too little memory; the pool gives the slice to another process."""
        if self._watch.is_worn() or (request.last and not self._watch.is_fresh()):
            raise WornOutError(f"{self._watch.used_bytes()} bytes are retained; restarting to free them")

    def _program(self, request: RenderRequest) -> Program:
        known: Any = self._programs.get(request.program)
        if known is None:
            known = self._programs[request.program] = self._compiled(request)
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(request.program)
        return known  # type: ignore[no-any-return]  # OrderedDict.get of a known key

    def _compiled(self, request: RenderRequest) -> Program:
        """Compile a program and keep its text: the text is not resent if an asset cannot be read at once."""
        text = self._texts[request.program] = request.program_text or self._texts[request.program]
        self._texts.move_to_end(request.program)
        if len(self._texts) > MAX_PROGRAMS:
            self._texts.popitem(last=False)
        places = {digest: request.places(pieces) for digest, pieces in request.assets}
        return load_program(text, self._assets.loader(places))

"""The body of a transform process: accept the pool's connection, render slices, answer, for ever.

Law: no state but caches. Dying is allowed at any moment: the pool retries the rows elsewhere. A row that
takes longer than ROW_SECONDS kills the process (SIGALRM), so that no input can hold a core for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.kit.clock import SystemClock
from meshd.net.unixmessages import BlockingMessageStream, MessageError, StreamClosedError
from meshd.transform.assets import LoadedAssets
from meshd.transform.messages import Failure, RenderReply, RenderRequest, write_progress
from meshd.transform.programs import load_program
from meshd.transform.reading import SourceFiles, SourceGoneError
from meshd.transform.rendering import SliceRenderer

if TYPE_CHECKING:
    import socket

    from meshd.transform.messages import FailureKind
    from meshd.transform.programs import Program

_log = logging.getLogger(__name__)
ROW_SECONDS = 60.0
PROGRAMS = 64  # kept compiled; the pool re-sends a program's text after at most half as many others


def main(listener: socket.socket) -> None:
    """Serve the pool on `listener` (a Unix socket), one connection at a time. Never returns."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    while True:
        sock, _ = listener.accept()
        stream = BlockingMessageStream(sock)
        with contextlib.suppress(StreamClosedError, MessageError):
            _Serving(stream).run()
        stream.close()


def _begin(progress_fd: int, number: int, row: int) -> None:
    write_progress(progress_fd, number, row)
    signal.setitimer(signal.ITIMER_REAL, ROW_SECONDS)


def program_key(text: str) -> str:
    """The name by which a connection knows a program."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _broken(request: RenderRequest, error: Exception) -> RenderReply:
    """What is answered when not a row but the renderer failed: a defect, which no bad-sample policy
    covers, or an asset that lies elsewhere now.
    """
    reason = f"{type(error).__name__}: {error}"[:300]
    kind: FailureKind = "read" if isinstance(error, SourceGoneError) else "op"
    failures = tuple(Failure(row.row, 0, kind, "renderer", reason) for row in request.rows)
    return RenderReply(request.number, (), failures, (), (), 0.0)


class _Serving:
    def __init__(self, stream: BlockingMessageStream) -> None:
        self._stream = stream
        self._files = SourceFiles()
        self._assets = LoadedAssets(self._files)
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._programs: OrderedDict[str, Program] = OrderedDict()
        self._clock = SystemClock()

    def run(self) -> None:
        try:
            while True:
                body, fds = self._stream.receive()
                try:
                    self._answer(msgspec.convert(body, RenderRequest), fds[0], fds[1])
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    for fd in fds:
                        os.close(fd)
        finally:
            self._files.close()

    def _answer(self, request: RenderRequest, frame_fd: int, progress_fd: int) -> None:
        clock = self._clock.monotonic
        began = clock()
        renderer = SliceRenderer(self._files, lambda row: _begin(progress_fd, request.number, row), clock)
        try:
            reply, scratch = renderer.render(self._program(request), request, frame_fd)
        except Exception as error:
            _log.exception("a slice of rows broke the renderer")
            reply, scratch = _broken(request, error), None
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply = msgspec.structs.replace(reply, seconds=clock() - began)
        self._send(reply, scratch)

    def _send(self, reply: RenderReply, scratch: int | None) -> None:
        try:
            self._stream.send(reply, () if scratch is None else (scratch,))
        finally:
            if scratch is not None:
                os.close(scratch)

    def _program(self, request: RenderRequest) -> Program:
        known: Any = self._programs.get(request.program)
        if known is None:
            known = self._programs[request.program] = self._compiled(request)
            if len(self._programs) > PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(request.program)
        return known  # type: ignore[no-any-return]  # OrderedDict.get of a known key

    def _compiled(self, request: RenderRequest) -> Program:
        """Kept with its text, which does not come again if an asset cannot be read at once."""
        text = self._texts[request.program] = request.program_text or self._texts[request.program]
        self._texts.move_to_end(request.program)
        if len(self._texts) > PROGRAMS:
            self._texts.popitem(last=False)
        places = {
            digest: [(request.paths[path], offset, length) for path, offset, length in pieces]
            for digest, pieces in request.assets
        }
        return load_program(text, self._assets.loader(places))

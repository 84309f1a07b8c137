"""The sessions of a node, in its coordinator; and how other processes and nodes reach them.

Law: a session runs as long as its job asks for it, and ends soon after the last request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.batches.warm_up.messages import WARM_UP, WARM_UP_HERE, WarmUpStatus
from meshd.batches.warm_up.session import WarmUpSession
from meshd.core.api_errors import BatchError, busy
from meshd.rpc.peer_rpc import handler
from meshd.rpc.process_client import ProcessClient
from meshd.rpc.process_rpc import ErrorTypes
from meshd.util.admission import tenant_scope
from meshd.util.async_tasks import BackgroundTasks

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.batches.warm_up.messages import WarmUpRequest
    from meshd.batches.warm_up.session import WarmUpContext
    from meshd.rpc.peer_rpc import CallContext
    from meshd.rpc.process_server import ProcessServer, ServerCall

POLL_SECONDS: Final = 1.0
"""Seconds after which a request is answered, if its session has not ended before."""
IDLE_SECONDS: Final = 10.0
"""Seconds without a request after which a session is ended."""
MAX_SESSIONS: Final = 16
_RPC_ERRORS: Final = ErrorTypes(
    [BatchError],
    unexpected=lambda: BatchError("InternalError", "the warm-up failed; the node's log says why"),
    lost=lambda _: busy("the node's coordinator is restarting"),
)


class Warmer:
    """Runs the sessions of a node. Use on one event loop only; `aclose` at the end."""

    def __init__(self, context: WarmUpContext) -> None:
        self._context = context
        self._sessions: dict[str, tuple[WarmUpSession, asyncio.Task[None]]] = {}
        self._expiry: dict[str, asyncio.TimerHandle] = {}
        self._tasks = BackgroundTasks("warm-up")

    def __repr__(self) -> str:
        return f"<Warmer {[session for session, _ in self._sessions.values()]}>"

    async def warm_up(self, request: WarmUpRequest) -> WarmUpStatus:
        """Begin a session or continue it. Returns its totals when it has ended, or after POLL_SECONDS.

        Raises BatchError Busy.
        """
        name = request.session
        if request.stop:
            self._end(name)
            return WarmUpStatus(done=True)
        found = self._sessions.get(name)
        if found is None or _differs(found[0].request, request):
            self._end(name)
            found = self._begin(request)
        session, task = found
        session.rate = request.rate
        self._expire_later(name)
        await asyncio.wait((task,), timeout=POLL_SECONDS)
        return session.status

    def _begin(self, request: WarmUpRequest) -> tuple[WarmUpSession, asyncio.Task[None]]:
        if len(self._sessions) >= MAX_SESSIONS:
            raise busy(f"{len(self._sessions)} warm-ups run on this node already")
        session = WarmUpSession(self._context, request)
        with tenant_scope(request.account):
            task = self._tasks.spawn(session.run(), request.session)
        self._sessions[request.session] = session, task
        return session, task

    def _expire_later(self, name: str) -> None:
        if (timer := self._expiry.pop(name, None)) is not None:
            timer.cancel()
        self._expiry[name] = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end, name)

    def _end(self, name: str) -> None:
        if (timer := self._expiry.pop(name, None)) is not None:
            timer.cancel()
        found = self._sessions.pop(name, None)
        if found is not None:
            found[1].cancel()

    async def aclose(self) -> None:
        """End all sessions."""
        for name in list(self._sessions):
            self._end(name)
        await self._tasks.aclose()

    def register(self, server: ProcessServer) -> None:
        """Let the node's other processes call it."""

        async def warm_up(request: WarmUpRequest, call: ServerCall) -> WarmUpStatus:
            del call
            return await self.warm_up(request)

        server.register(WARM_UP_HERE, warm_up)


def _differs(one: WarmUpRequest, other: WarmUpRequest) -> bool:
    """Return whether two requests of a session want different work."""
    return msgspec.structs.replace(one, rate=0) != msgspec.structs.replace(other, rate=0)


class WarmUpHandlers:
    """Passes the calls of other nodes on to the coordinator behind `socket`. One instance per process."""

    def __init__(self, socket: Path) -> None:
        self._client = ProcessClient(socket, _RPC_ERRORS)

    @handler(WARM_UP)
    async def warm_up(self, request: WarmUpRequest, context: CallContext) -> WarmUpStatus:
        del context
        return await self._client.call(WARM_UP_HERE, request)

"""Node tasks: one node's share of a background job, run by the node's coordinator.

Law: a task runs while its job keeps requesting it, and ends soon after the last request. The job repeats the
request for as long as it runs: the first one starts the task, and each response has the totals so far. A
request that ends a task is answered once the task has ended, or after STOP_SECONDS.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec

from meshd.core.api_errors import BatchError, busy
from meshd.rpc.process_rpc import ErrorTypes
from meshd.store.errors import DiskFullError, StoreError
from meshd.util.async_tasks import BackgroundTasks
from meshd.util.tenant_limits import tenant_scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.core.api_errors import Code
    from meshd.rpc.process_rpc import Method
    from meshd.rpc.process_server import ProcessServer, ServerCall

_log = logging.getLogger("meshd.node_tasks")
POLL_SECONDS: Final = 1.0
"""Seconds after which a request is answered, if its task has not ended before."""
IDLE_SECONDS: Final = 10.0
"""Seconds without a request after which a task is ended."""
STOP_SECONDS: Final = 8.0
"""Seconds after which a request that ends a task is answered, if the task has not ended before."""
MAX_TASKS: Final = 16
RPC_ERRORS: Final = ErrorTypes(
    [BatchError],
    unexpected=lambda: BatchError("InternalError", "the node's part of the job failed; its log says why"),
    lost=lambda _: busy("the node's coordinator is restarting"),
)


class NodeTaskRequest(Protocol):
    """What a job asks a node to do. `session`: names the job's run; `account`: whose share of the node to
    use; `rate`: bytes a second, 0 for no limit; `stop`: end the task."""

    @property
    def session(self) -> str: ...
    @property
    def account(self) -> str: ...
    @property
    def rate(self) -> int: ...
    @property
    def stop(self) -> bool: ...


class NodeTaskStatus(Protocol):
    """The totals of a task. `done`: it has ended; `code`, `error`: why it failed, "" if it did not."""

    done: bool
    code: Code | Literal[""]
    error: str


RequestT = TypeVar("RequestT", bound=NodeTaskRequest)
StatusT = TypeVar("StatusT", bound=NodeTaskStatus)


class NodeTask(Protocol[RequestT, StatusT]):
    """Does the node's part of a job; `status` has the totals at any time. `rate` may change meanwhile."""

    request: RequestT
    status: StatusT
    rate: int

    async def run(self) -> None:
        """Work to the end. Raises BatchError, StoreError."""
        ...


class NodeTasks(Generic[RequestT, StatusT]):
    """Runs the tasks of one kind of job on a node. Use on one event loop only; `aclose` at the end.

    `make`: makes a task; `stopped`: the answer to a request that ends one; `method`: how the node's other
    processes call it.
    """

    def __init__(
        self,
        make: Callable[[RequestT], NodeTask[RequestT, StatusT]],
        stopped: StatusT,
        method: Method[Any, Any],
    ) -> None:
        self._make, self._stopped, self._method = make, stopped, method
        self._running: dict[str, tuple[NodeTask[RequestT, StatusT], asyncio.Task[None]]] = {}
        self._expiry: dict[str, asyncio.TimerHandle] = {}
        self._background = BackgroundTasks("node-tasks")

    def __repr__(self) -> str:
        return f"<NodeTasks {[task for task, _ in self._running.values()]}>"

    async def answer(self, request: RequestT) -> StatusT:
        """Begin a task or continue it. Returns its totals when it has ended, or after POLL_SECONDS.

        Raises BatchError Busy.
        """
        name = request.session
        if request.stop:
            if (ending := self._end(name)) is not None:
                await asyncio.wait((ending,), timeout=STOP_SECONDS)
            return self._stopped
        found = self._running.get(name)
        if found is None or _differs(found[0].request, request):
            self._end(name)
            found = self._begin(request)
        task, running = found
        task.rate = request.rate
        self._expire_later(name)
        await asyncio.wait((running,), timeout=POLL_SECONDS)
        return task.status

    def _begin(self, request: RequestT) -> tuple[NodeTask[RequestT, StatusT], asyncio.Task[None]]:
        if len(self._running) >= MAX_TASKS:
            raise busy(f"{len(self._running)} jobs of this kind run on this node already")
        task = self._make(request)
        with tenant_scope(request.account):
            running = self._background.spawn(self._run(task), request.session)
        self._running[request.session] = task, running
        return task, running

    async def _run(self, task: NodeTask[RequestT, StatusT]) -> None:
        """Run a task, and record in its status how it ended."""
        status = task.status
        try:
            await task.run()
        except BatchError as error:
            status.code, status.error = error.code, error.message
        except DiskFullError as error:
            status.code, status.error = "TooLarge", str(error)
        except StoreError as error:
            status.code, status.error = "Busy", str(error)
        except Exception:
            _log.exception("the node's part of a job failed", extra={"kind": self._method.name})
            status.code, status.error = "InternalError", "unexpected error; the node's log has the details"
        status.done = True

    def _expire_later(self, name: str) -> None:
        if (timer := self._expiry.pop(name, None)) is not None:
            timer.cancel()
        self._expiry[name] = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end, name)

    def _end(self, name: str) -> asyncio.Task[None] | None:
        """Cancel a task. Returns what runs it, which may take a moment to end; None if there is none."""
        if (timer := self._expiry.pop(name, None)) is not None:
            timer.cancel()
        found = self._running.pop(name, None)
        if found is None:
            return None
        found[1].cancel()
        return found[1]

    async def aclose(self) -> None:
        """End all tasks."""
        for name in list(self._running):
            self._end(name)
        await self._background.aclose()

    def register(self, server: ProcessServer) -> None:
        """Let the node's other processes call it."""

        async def answer(request: RequestT, call: ServerCall) -> StatusT:
            return await self.answer(request)

        server.register(self._method, answer)


def _differs(one: Any, other: Any) -> bool:
    """Return whether two requests of a task want different work."""
    return bool(msgspec.structs.replace(one, rate=0) != msgspec.structs.replace(other, rate=0))

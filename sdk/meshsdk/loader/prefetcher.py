"""Prefetcher: a thread that requests frames ahead, receives them into the arena and puts them in order.

Law: every frame has an address, so a damaged one is discarded and requested again. A request is sent only if
leased and requested bytes stay within the arena's budget.
Invariant: frames come out in step order, each once. After `close` no thread or socket remains; an abandoned
prefetcher closes itself.
"""

from __future__ import annotations

import operator
import os
import threading
import time
import weakref
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshsdk.client.arena import Waker
from meshsdk.client.error_responses import read_error
from meshsdk.client.local_handover import HandoverError
from meshsdk.client.retry import ABSENT, SUSPICIOUS, RetryQueue
from meshsdk.client.tracing import start_batch_traces
from meshsdk.client.transport import InFlightRequests
from meshsdk.datasets.batch import Frame, open_frame
from meshsdk.errors import ClosedError, ConnectError, CorruptFrameError, MeshError
from meshsdk.loader import interpreter_exit
from meshsdk.loader.remaining_reports import report_rest
from meshsdk.loader.split_frames import SplitPlanner
from meshsdk.loader_stats import Arrival, Tally, without_report
from meshwire.http_values.mesh_headers import HANDOVER_TICKET_HEADER, parse_timing
from meshwire.http_values.mesh_headers import LOCAL_HANDOVER_HEADER as LOCAL
from meshwire.http_values.mesh_headers import SERVER_TIMING_HEADER as TIMING

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.client.arena import Arena
    from meshsdk.client.http_connection import Response
    from meshsdk.client.request import Request
    from meshsdk.client.settings import Endpoint
    from meshsdk.client.tracing import BatchTraces
    from meshsdk.client.transport import InFlightRequest, Transport
    from meshsdk.loader.split_frames import SplitFrame, SplitRequest
    from meshwire.cluster import ClusterMap

    Flight = InFlightRequest["WantedFrame"]


@dataclass(frozen=True, slots=True)
class FetchSpec:
    """What to fetch.

    Attributes:
        ask: returns the request for a step.
        steps: an ascending range of any stride.
        expected: bytes of a frame if known, else 0.
        verify: whether to verify the checksums of received frames; "all" includes those in shared memory.
        connections: maximum number of frames in flight.
        deadline: seconds for which a step is retried.
        named: returns the step number that the frame of a step carries.
        parts: how to request frames in parts; None to request whole frames.
        report: returns a request that only reports, if that is due; for when no frame is left to request,
            and for the end of the loop, at which it is due (True).
    """

    ask: Callable[[int], Request]
    steps: range
    expected: int = 0
    verify: Literal[True, False, "all"] = True
    connections: int = 4
    deadline: float = 600.0
    named: Callable[[int], int] = operator.index
    parts: SplitRequest | None = None
    report: Callable[[bool], Request | None] | None = None


class WantedFrame(NamedTuple):
    """What a request in flight is for: the frame of a step, or a part of it if the frame is split."""

    step: int
    joint: SplitFrame | None


class PrefetchWorker:
    """The body of the prefetch thread; other threads use only `out`, `waker`, `taken`, `closing`, `tally` and
    `flights.abort`."""

    def __init__(self, transport: Transport, order: FetchSpec, arena: Arena) -> None:
        self.out: SimpleQueue[Frame | BaseException] = SimpleQueue()
        self.waker = Waker()
        self.tally = Tally()
        self.closing = False
        self.taken = 0
        self._timeout = transport.settings.timeout
        self.flights: InFlightRequests[WantedFrame] = InFlightRequests(
            transport, self.waker, min(self._timeout, max(SUSPICIOUS, order.deadline / 2))
        )
        self._transport = transport
        self._order = order
        self._arena = arena
        self._expected = order.expected
        self._directory = transport.router.directory
        self.traces = start_batch_traces()
        self._splitting: SplitPlanner | None = None
        if order.parts is not None:
            self._splitting = SplitPlanner(order.parts, self._directory, arena)
        self._joints: dict[int, SplitFrame] = {}
        self._attempts = RetryQueue(transport.router, transport.keys, order.deadline)
        self._looked = -SUSPICIOUS  # when silent nodes were last checked
        self._done: dict[int, Frame | MeshError] = {}
        self._asked = self._given = order.steps.start
        self._stop, self._stride = order.steps.stop, order.steps.step

    def run(self) -> None:
        try:
            while not self.closing and self._given < self._stop:
                self._send_ahead()
                self._receive(self._wait())
                self.tally.cpu = time.thread_time()
            if self._order.report is not None:
                report_rest(self, self._transport, self._order.report, len(self._order.steps))
        except BaseException as error:  # noqa: BLE001, RUF100 - passed to the consumer, which raises it
            self.out.put(error)
        finally:
            self.flights.close()
            self._joints.clear()
            self.tally.cpu = time.thread_time()

    # --- requests ---------------------------------------------------------------------------------

    def _send_ahead(self) -> None:
        now = time.monotonic()
        while (due := self._attempts.next_due) is not None and due <= now:
            if self._under_way() >= self._order.connections:
                break
            self._send(self._attempts.pop())
        while self._may_ask():
            self._asked += self._stride
            step = self._asked - self._stride
            cluster = None if self._splitting is None else self._directory.current()
            if cluster is None or not self._send_parts(step, cluster):
                self._send(step)

    def _under_way(self) -> int:
        """Return the number of frames that were requested and have not arrived."""
        alone = sum(flight.tag.joint is None for flight in self.flights)
        return alone + len(self._joints)

    def _may_ask(self) -> bool:
        """Return whether to request the next frame: it fits in the budget, or nothing else will arrive."""
        asked = self._under_way() + len(self._attempts)
        if self._asked >= self._stop or asked >= self._order.connections:
            return False
        if asked == 0 and self._asked - self._order.steps.start == self.taken * self._stride:
            return True
        begun = sum(joint.joining.started for joint in self._joints.values())  # these already have memory
        needed = (asked - begun + 1) * self._arena.memory.capacity(self._expected)
        return self._expected > 0 and self._arena.free_bytes() >= needed

    def _send_parts(self, step: int, cluster: ClusterMap) -> bool:
        """Request the parts of a frame from the storing nodes; return False if it must be requested whole."""
        assert self._splitting is not None
        begun = self._splitting.begin_split(step, cluster, time.monotonic())
        if begun is None:
            return False
        joint, request, endpoints = begun
        self._joints[step] = joint
        for endpoint in endpoints:
            self._put(step, request, endpoint, joint)
            request = without_report(request)  # a report counts at one node
            if step not in self._joints:  # a node failed, and the frame is no longer split
                break
        return True

    def _send(self, step: int) -> None:
        request, transport = self._order.ask(step), self._transport
        endpoint = transport.router.choose_endpoint(request, self._attempts.tried_endpoints(step))
        self._put(step, request, endpoint)

    def _put(self, step: int, request: Request, endpoint: Endpoint, joint: SplitFrame | None = None) -> None:
        """Send a request to a node for a frame, or for its part of one."""
        if joint is None and (word := self._transport.local_handover.handover_id(endpoint)):
            request = replace(request, headers={**request.headers, LOCAL: word})
        if self.traces is not None:
            request = self.traces.begin_request(step, request, str(endpoint))
        try:
            self.flights.send_request(WantedFrame(step, joint), request, endpoint)
        except MeshError as error:
            self._failed(step, error, request, endpoint)

    # --- receiving --------------------------------------------------------------------------------

    def _wait(self) -> list[Flight]:
        """Wait for a response, for free memory or for a retry; return the answered requests in step order."""
        now = time.monotonic()
        until = [] if self._attempts.next_due is None else [self._attempts.next_due]
        if self.flights:
            due = min(flight.sent + self._silence(flight) for flight in self.flights)
            until.append(max(due, self._looked + SUSPICIOUS))
        answered = self.flights.answered(min(until) - now if until else None)
        if answered is None:
            self._drop_silent()
            return []
        return sorted(answered, key=lambda flight: flight.tag.step)

    def _silence(self, flight: Flight) -> float:
        """Return the seconds without a response after which to check a request."""
        seconds = self._attempts.silence_limit(flight.tag.step, flight.sent, self._timeout)
        return seconds if self._transport.router.directory.map is None else min(seconds, SUSPICIOUS)

    def _drop_silent(self) -> None:
        """Drop requests to nodes that were silent for too long, are dead, or are away by the cluster map.

        A request that a live node is still working on is kept.
        """
        now, directory = time.monotonic(), self._transport.router.directory
        silent = [flight for flight in self.flights if now - flight.sent >= self._silence(flight)]
        if not silent:
            return
        self._looked = now
        there: dict[Endpoint, bool] = {}
        if directory.map is not None:
            directory.refresh()
        for flight in silent:
            endpoint = flight.connection.endpoint
            if flight not in self.flights:
                continue
            if now - flight.sent >= self._timeout:
                self.flights.finish_request(flight)
                why = f"no answer within {self._timeout:g} s"
                self._failed(flight.tag.step, ConnectError(why), flight.request, endpoint)
            elif directory.state(endpoint) in ("away", "down"):
                self.flights.finish_request(flight)
                error = ConnectError(f"{endpoint}: the cluster map says that this node is away")
                self._failed(flight.tag.step, error, flight.request, endpoint)
            elif not self._is_there(flight, now, there):
                self.flights.finish_request(flight)
                error = ConnectError(f"{endpoint}: {ABSENT}")
                self._failed(flight.tag.step, error, flight.request, endpoint, flight.sent)
                self._looked = -SUSPICIOUS  # the next node may be away as well

    def _is_there(self, flight: Flight, now: float, there: dict[Endpoint, bool]) -> bool:
        """Return whether the node of a request seems alive; `there` has the endpoints already checked."""
        endpoint = flight.connection.endpoint
        if now - flight.sent < self._attempts.silence_limit(flight.tag.step, flight.sent, self._timeout):
            return True
        if endpoint not in there:
            there[endpoint] = self._transport.answers(endpoint)
        return there[endpoint]

    def _receive(self, answered: list[Flight]) -> None:
        for flight in answered:
            if self.closing:
                return
            if flight not in self.flights:  # dropped, because another part of its frame failed
                continue
            try:
                frame = self._read(flight)
            except HandoverError as error:
                self._end_trace(flight.tag.step, flight.connection.endpoint, error)
                self.tally.retries += 1
                self._attempts.schedule_retry(flight.tag.step, time.monotonic())
                continue
            except MeshError as error:
                self._failed(flight.tag.step, error, flight.request, flight.connection.endpoint)
                continue
            self._end_trace(flight.tag.step, flight.connection.endpoint)
            if frame is not None:
                self._attempts.record_success(flight.tag.step)
                self._finish(flight.tag.step, frame)

    def _read(self, flight: Flight) -> Frame | None:
        """Receive a response and return its frame; None while parts of the frame are missing."""
        response = None
        try:
            response = self._transport.receive(flight.connection, flight.request)
            if response.status != 200:
                raise read_error(response, flight.request)
            if flight.tag.joint is not None:
                return self._read_part(flight.tag.joint, response)
            return self._read_frame(flight, response)
        finally:
            self.flights.finish_request(flight, keep=response is not None and response.reusable)

    def _read_frame(self, flight: Flight, response: Response) -> Frame:
        """Receive a frame from the socket into its slot, or adopt it from the node's shared memory.

        It is not copied afterwards.
        """
        step, began, verify = self._order.named(flight.tag.step), time.monotonic(), bool(self._order.verify)
        handed = response.headers.get(HANDOVER_TICKET_HEADER, "")
        if handed and response.length == 0:
            lease = self._transport.local_handover.receive_frame(
                flight.connection.endpoint, handed, self._arena
            )
            self.tally.local += 1
            verify = self._order.verify == "all"  # sealed since the node wrote it, and never on a network
        elif response.length:
            lease = self._arena.acquire_slot(response.length)
            response.readinto(lease.view)
        else:
            raise CorruptFrameError(f"step {step}: the response has no Content-Length")
        origin = response.headers.get("x-mesh-frame", "")
        frame = open_frame(lease.view, step, verify=verify, origin=origin)
        timing = parse_timing(response.headers.get(TIMING, ""))
        done = time.monotonic()
        frame = replace(frame, arrival=Arrival(flight.sent, began, done, timing))
        self._count(frame, frame.nbytes)
        return frame

    def _read_part(self, joint: SplitFrame, response: Response) -> Frame | None:
        """Receive a part from the socket into its rows of the frame's slot; None while parts are missing."""
        timing = parse_timing(response.headers.get(TIMING, ""))
        joint.add_part(response, timing, time.monotonic(), verify=bool(self._order.verify))
        if joint.left:
            return None
        arrays, size = joint.views()
        del self._joints[joint.step]
        if self._splitting is not None:
            self._splitting.resume_splitting()
        self.tally.parted += 1
        frame = Frame(joint.step, arrays, size, joint.origin, joint.arrival(time.monotonic()))
        self._count(frame, joint.bytes)
        return frame

    def _count(self, frame: Frame, size: int) -> None:
        tally, arrival, origin = self.tally, frame.arrival, frame.origin
        if arrival is not None:
            tally.receiving += arrival.done - arrival.began
        self._expected = max(self._expected, frame.nbytes)
        tally.bytes += size
        tally.origins[origin] = tally.origins.get(origin, 0) + 1

    # --- bookkeeping ------------------------------------------------------------------------------

    def _failed(
        self, step: int, error: MeshError, request: Request, endpoint: Endpoint, since: float | None = None
    ) -> None:
        """Schedule a retry of a step, or end the iteration at this step if a retry cannot help.

        `since`: when the node became unavailable, if before now.
        """
        self._end_trace(step, endpoint, error)
        if self.closing:
            return
        now = time.monotonic()
        if self._joints.pop(step, None) is not None:
            self._give_up_parts(step, error, endpoint, now)
            return
        try:
            self._attempts.record_failure(step, error, request, endpoint, now, since)
        except MeshError as final:
            self._stop = min(self._stop, step + 1)
            self._finish(step, final.with_traceback(None))  # the traceback is that of the consumer's loop
        else:
            self.tally.retries += 1

    def _end_trace(self, step: int, endpoint: Endpoint, error: MeshError | None = None) -> None:
        if self.traces is not None:
            self.traces.end_request(step, str(endpoint), error)

    def _give_up_parts(self, step: int, error: MeshError, endpoint: Endpoint, now: float) -> None:
        """Drop the parts of a frame and request it whole, from one node."""
        for flight in self.flights:
            if flight.tag.step == step:
                self.flights.finish_request(flight)
        directory = self._transport.router.directory
        if isinstance(error, ConnectError):
            directory.mark_failed(endpoint)
            directory.refresh()
        if self._splitting is not None:
            self._splitting.pause_splitting()
        self.tally.retries += 1
        self._attempts.schedule_retry(step, now)

    def _finish(self, step: int, result: Frame | MeshError) -> None:
        self._done[step] = result
        while self._given in self._done:
            self.out.put(self._done.pop(self._given))
            self._given += self._stride


def _shut(reader: PrefetchWorker, thread: threading.Thread, pid: int) -> None:
    """End the thread; a forked child has none, and its sockets belong to the parent."""
    if pid != os.getpid():
        reader.waker.close()
        return
    reader.closing = True
    reader.waker.wake()
    reader.flights.abort()
    if thread is not threading.current_thread():  # garbage collection may run on the prefetch thread itself
        thread.join()
    reader.waker.close()
    reader.out.put(ClosedError("this iteration is closed: iterate over the loader again"))


class Prefetcher:
    """A running prefetch of `order.steps`; call `next_frame` once per step. For one consumer at a time."""

    def __init__(self, transport: Transport, order: FetchSpec, arena: Arena) -> None:
        self._reader = reader = PrefetchWorker(transport, order, arena)
        self._arena = arena
        self._pid = os.getpid()
        arena.on_return = reader.waker.wake
        # The thread references the worker, not this object, so an abandoned prefetcher is collected.
        self._thread = threading.Thread(target=reader.run, name="mesh-reader", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _shut, reader, self._thread, self._pid)
        self._finalizer.atexit = False  # at exit its epoch iterator closes it

    def next_frame(self) -> Frame:
        """Return the next frame, waiting for it. Raises the MeshError with which its step failed."""
        if self.forked:
            raise ClosedError("this iteration belongs to the parent process: start a new one after a fork")
        result = self._reader.out.get()
        if isinstance(result, BaseException):
            self.close()
            interpreter_exit.check_not_exiting()
            raise result
        self._reader.taken += 1
        self._reader.waker.wake()
        return result

    def is_ready(self) -> bool:
        """Return whether `next_frame` would return immediately."""
        return not self._reader.out.empty()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that started the prefetcher."""
        return self._pid != os.getpid()

    @property
    def tally(self) -> Tally:
        return self._reader.tally

    @property
    def traces(self) -> BatchTraces | None:
        return self._reader.traces

    def close(self) -> None:
        """End the thread and close the sockets. Idempotent; frames already returned stay valid."""
        self._finalizer()
        self._arena.on_return = None

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "closed"
        return f"Prefetcher({state}, {len(self._reader.flights)} in flight)"

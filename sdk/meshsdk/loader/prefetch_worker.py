"""The prefetch thread: requests frames ahead, receives them into the arena and puts them in order.

Law: every frame has an address, so a damaged one is discarded and requested again. A request is sent only if
leased and requested bytes stay within the arena's budget. Small frames of several steps come in one response,
if one node is assigned all of them.
Invariant: frames come out in step order, each once.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import takewhile
from queue import SimpleQueue
from typing import TYPE_CHECKING

from meshsdk.client.arena import Waker
from meshsdk.client.error_responses import read_error
from meshsdk.client.local_handover import HandoverError
from meshsdk.client.retry import ABSENT, SUSPICIOUS, RetryQueue
from meshsdk.client.tracing import start_batch_traces
from meshsdk.client.transport import InFlightRequests
from meshsdk.datasets.batch import Frame, open_frame
from meshsdk.errors import ConnectError, CorruptFrameError, MeshError
from meshsdk.loader.fetch_spec import WantedFrame
from meshsdk.loader.remaining_reports import report_rest
from meshsdk.loader.series_planner import MemoryWait, SeriesPlanner
from meshsdk.loader.split_frame_requests import SplitPlanner
from meshsdk.loader_stats import Arrival, Tally, without_report
from meshwire.http_values.mesh_headers import (
    FRAME_BLOCK_HEADER,
    FRAME_SERIES_HEADER,
    FRAME_SIZES_HEADER,
    HANDOVER_TICKET_HEADER,
    parse_frame_sizes,
    parse_timing,
)
from meshwire.http_values.mesh_headers import LOCAL_HANDOVER_HEADER as LOCAL
from meshwire.http_values.mesh_headers import SERVER_TIMING_HEADER as TIMING

if TYPE_CHECKING:
    from meshsdk.client.arena import Arena
    from meshsdk.client.http_connection import Response
    from meshsdk.client.request import Request
    from meshsdk.client.settings import Endpoint
    from meshsdk.client.transport import InFlightRequest, Transport
    from meshsdk.loader.fetch_spec import FetchSpec
    from meshsdk.loader.split_frame_requests import SplitFrame
    from meshwire.cluster import ClusterMap

    Flight = InFlightRequest["WantedFrame"]


class PrefetchWorker:
    """The body of the prefetch thread; other threads use only `out`, `waker`, `taken`, `closing`, `tally` and
    `flights.abort`."""

    def __init__(self, transport: Transport, order: FetchSpec, arena: Arena) -> None:
        self.out: SimpleQueue[Frame | BaseException] = SimpleQueue()
        self.waker = Waker()
        self.tally = Tally()
        self.closing = False
        self.taken = 0
        self.memory = MemoryWait(self.waker)
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
        alone = order.series is None or order.steps.step != 1 or self.traces is not None
        self._series = SeriesPlanner(enabled=not alone)
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
            self.memory.slots = 1
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
        while count := self._steps_to_ask():
            step, count = self._asked, self._steps_of_one_node(self._asked, count)
            self._asked += count * self._stride
            cluster = None if self._splitting is None else self._directory.current()
            if cluster is None or not self._send_parts(step, cluster):
                self._send(step, count)

    def _under_way(self) -> int:
        """Return the number of requests without an answer; those for parts of a frame count as one."""
        alone = sum(flight.tag.joint is None for flight in self.flights)
        return alone + len(self._joints)

    def _steps_to_ask(self) -> int:
        """Return for how many steps to send the next request: their frames fit in the budget, or nothing
        else will arrive; 0 for none."""
        self.memory.slots = 1  # before looking, so that no return is missed
        asked, waiting = self._under_way() + len(self._attempts), len(self._attempts)
        if self._asked >= self._stop or asked >= self._order.connections:
            self.memory.slots = 0
            return 0
        if asked == 0 and self._asked - self._order.steps.start == self.taken * self._stride:
            return self._steps_that_fit(0) or 1
        begun = sum(joint.joining.started for joint in self._joints.values())  # these already have memory
        alone = sum(flight.tag.steps for flight in self.flights if flight.tag.joint is None)
        return self._steps_that_fit(alone + len(self._joints) + waiting - begun)

    def _steps_that_fit(self, due: int) -> int:
        """Return for how many steps to ask while `due` frames are due to arrive; 0 until slots return."""
        if self._expected <= 0:
            return 0
        arena, size = self._arena, self._arena.memory.capacity(self._expected)
        room = arena.free_bytes() // size - due
        left = -(-(self._stop - self._asked) // self._stride)
        # In a mesh that sends frames in parts, each node has rows of every step.
        parted = self._splitting is not None and self._directory.current() is not None
        wanted = 1 if parted else self._series.wanted(self._asked, left, size, arena.budget)
        if room < wanted:
            self.memory.slots = wanted - room
            return 0
        self.memory.slots = 0
        return wanted

    def _steps_of_one_node(self, step: int, count: int) -> int:
        """Return how many of `count` steps from `step` on go to the node of the first. A longer series would
        have frames built by a node that they are not assigned to, besides the one that other jobs ask."""
        request = self._order.series
        if count == 1 or request is None or self._directory.current() is None:
            return count
        endpoints = (self._transport.router.choose_endpoint(request(step + n), set()) for n in range(count))
        first = next(endpoints)
        return 1 + sum(1 for _ in takewhile(first.__eq__, endpoints))

    def _send_parts(self, step: int, cluster: ClusterMap) -> bool:
        """Request the parts of a frame from the storing nodes; return False if it must be requested whole."""
        assert self._splitting is not None
        begun = self._splitting.begin_split(step, cluster, time.monotonic())
        if begun is None:
            return False
        joint, request, endpoints = begun
        self._joints[step] = joint
        for endpoint in endpoints:
            self._put(WantedFrame(step, joint), request, endpoint)
            request = without_report(request)  # a report counts at one node
            if step not in self._joints:  # a node failed, and the frame is no longer split
                break
        return True

    def _send(self, step: int, count: int = 1) -> None:
        request, transport = self._order.ask(step), self._transport
        if count > 1:
            request = replace(request, headers={**request.headers, FRAME_SERIES_HEADER: str(count)})
        endpoint = transport.router.choose_endpoint(request, self._attempts.tried_endpoints(step))
        self._put(WantedFrame(step, steps=count), request, endpoint)

    def _put(self, wanted: WantedFrame, request: Request, endpoint: Endpoint) -> None:
        """Send a request to a node for frames, or for its part of one."""
        step, joint, _ = wanted
        if joint is None and (word := self._transport.local_handover.handover_id(endpoint)):
            request = replace(request, headers={**request.headers, LOCAL: word, FRAME_BLOCK_HEADER: "1"})
        if self.traces is not None:
            request = self.traces.begin_request(step, request, str(endpoint))
        try:
            self.flights.send_request(wanted, request, endpoint)
        except MeshError as error:
            self._retry_or_end(step, error, request, endpoint)
            self._ask_again(wanted, 1)

    # --- receiving --------------------------------------------------------------------------------

    def _wait(self) -> list[Flight]:
        """Wait for a response, for free memory or for a retry; return the answered requests in step order."""
        now, until = time.monotonic(), list[float]()
        if self._attempts.next_due is not None and self._under_way() < self._order.connections:
            until.append(self._attempts.next_due)
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
                self._note_lost(flight, f"no answer within {self._timeout:g} s")
            elif directory.state(endpoint) in ("away", "down"):
                self.flights.finish_request(flight)
                self._note_lost(flight, f"{endpoint}: the cluster map says that this node is away")
            elif not self._is_there(flight, now, there):
                self.flights.finish_request(flight)
                self._note_lost(flight, f"{endpoint}: {ABSENT}", flight.sent)
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
            wanted, endpoint = flight.tag, flight.connection.endpoint
            frames: list[Frame] = []
            error = self._read(flight, frames)
            for step, frame in enumerate(frames, wanted.step):
                self._attempts.record_success(step)
                self._finish(step, frame)
            if wanted.joint is not None and error is None:
                continue  # parts of the frame may be missing
            step = wanted.step + len(frames)
            if isinstance(error, HandoverError):
                self._end_trace(step, endpoint, error)
                self.tally.retries += 1
                self._ask_again(wanted, len(frames))
            elif error is not None:
                self._retry_or_end(step, error, flight.request, endpoint)
                self._ask_again(wanted, len(frames) + 1)
            else:
                self._ask_again(wanted, len(frames))

    def _read(self, flight: Flight, frames: list[Frame]) -> MeshError | None:
        """Receive a response, and append its frames; none while parts of a frame are missing. Return what
        failed."""
        response = None
        try:
            response = self._transport.receive(flight.connection, flight.request)
            if response.status != 200:
                raise read_error(response, flight.request)
            if flight.tag.joint is not None:
                frame = self._read_part(flight.tag.joint, response)
                frames += [] if frame is None else [frame]
            else:
                self._read_frames(flight, response, frames)
        except MeshError as error:
            self._series.record_failure(flight.tag.steps)
            return error
        finally:
            self.flights.finish_request(flight, keep=response is not None and response.reusable)
        self._end_trace(flight.tag.step, flight.connection.endpoint)
        return None

    def _read_frames(self, flight: Flight, response: Response, frames: list[Frame]) -> None:
        """Receive frames from the socket into their slots, or adopt them from the node's shared memory, and
        append them. They are not copied afterwards."""
        tag, headers, began = flight.tag, response.headers, time.monotonic()
        sizes = parse_frame_sizes(headers.get(FRAME_SIZES_HEADER, "")) if tag.steps > 1 else ()
        if not (handed := headers.get(HANDOVER_TICKET_HEADER, "")) and not response.length:
            raise CorruptFrameError(f"step {tag.step}: the response has no Content-Length")
        if len(sizes) > tag.steps or not (handed or sum(sizes) in (0, response.length)):
            raise CorruptFrameError(f"step {tag.step}: the response has other frames than were requested")
        verify, leases = bool(self._order.verify), []
        if handed and response.length == 0:
            endpoint, block = flight.connection.endpoint, headers.get(FRAME_BLOCK_HEADER, "")
            local = self._transport.local_handover
            leases = local.receive_frames(endpoint, handed, sizes, self._arena, block)
            verify = self._order.verify == "all"  # sealed since the node wrote it, and never on a network
        origins = headers.get("x-mesh-frame", "").split(",")
        timing = parse_timing(headers.get(TIMING, ""))
        for number, size in enumerate(sizes or (response.length or 0,)):
            if leases:
                lease = leases[number]
                self.tally.local += 1
            else:
                lease = self._arena.acquire_slot(size)
                response.fill(lease.view)
            step = self._order.named(tag.step + number)
            origin = origins[number] if number < len(origins) else ""
            frame = open_frame(lease.view, step, verify=verify, origin=origin)
            done = time.monotonic()
            frame = replace(frame, arrival=Arrival(flight.sent, began, done, timing))
            self._count(frame, frame.nbytes)
            frames.append(frame)
            began = done
        self._series.record_response(tag.steps, len(frames), timing.total)

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

    def _retry_or_end(
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

    def _note_lost(self, flight: Flight, why: str, since: float | None = None) -> None:
        """Note that a request will not be answered; see `_retry_or_end`."""
        self._series.record_failure(flight.tag.steps)
        endpoint = flight.connection.endpoint
        self._retry_or_end(flight.tag.step, ConnectError(why), flight.request, endpoint, since)
        self._ask_again(flight.tag, 1)

    def _ask_again(self, wanted: WantedFrame, first: int) -> None:
        """Request each step of a series alone, without those before its `first`: they have arrived or failed
        themselves."""
        for number in range(first, wanted.steps):
            self._attempts.schedule_retry(wanted.step + number, time.monotonic())

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

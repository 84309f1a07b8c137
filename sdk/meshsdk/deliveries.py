"""Frames ahead of need: one thread asks, receives into the arena and puts in order; the consumer takes.

Law: a frame is addressed, so whatever breaks is dropped and asked for again. Requests are sent only
against credit: what is under lease plus what was asked for stays within the arena's budget.
Invariant: frames come out in step order, each once; after `close` no thread or socket of it remains.
"""

from __future__ import annotations

import heapq
import operator
import os
import select
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from meshsdk.arenas import Waker
from meshsdk.errors import ClosedError, ConnectError, CorruptFrameError, MeshError
from meshsdk.maps import MAP_HEADER
from meshsdk.neighbours import HandoverError
from meshsdk.parts import Parting
from meshsdk.retrying import BackOff, Patience
from meshsdk.stalls import Arrival
from meshsdk.transport import failed, read_error
from meshwire import frames
from meshwire.handovers import HANDED
from meshwire.handovers import HEADER as LOCAL
from meshwire.servertimings import HEADER as TIMING
from meshwire.servertimings import parse_timing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from meshsdk.arenas import Arena
    from meshsdk.connections import Connection, Response
    from meshsdk.parts import Joint, Parts
    from meshsdk.settings import Endpoint
    from meshsdk.transport import Request, Transport

_SUSPICIOUS = 5.0  # seconds of silence after which the mesh is asked about a node


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame: `arrays` are views of its lease. `origin` is how the node came by it: hit, joined,
    miss; `arrival` tells when what happened.
    """

    step: int
    arrays: Mapping[str, npt.NDArray[Any]]
    nbytes: int
    origin: str = ""
    arrival: Arrival | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """What to deliver: `ask(step)` for each of `steps`, an ascending range of any stride. `expected` bytes a
    frame if known beforehand, else 0. `named`: the step its frame says it is of. `parts`: how frames may be
    asked for in parts.
    """

    ask: Callable[[int], Request]
    steps: range
    expected: int = 0
    verify: bool = True
    connections: int = 4
    deadline: float = 600.0
    named: Callable[[int], int] = operator.index
    parts: Parts | None = None


@dataclass(slots=True)
class Tally:
    """What a reader has done so far; written by its thread only. `latency`: seconds until answers began,
    without what the nodes took; `receiving`: until they were in place; `parted`: frames that came in
    parts; `local`: those taken over from a node on this host."""

    retries: int = 0
    bytes: int = 0
    local: int = 0
    cpu: float = 0.0
    latency: float = 0.0
    receiving: float = 0.0
    parted: int = 0
    origins: dict[str, int] = field(default_factory=dict)


def open_frame(view: memoryview, step: int, *, verify: bool, origin: str = "") -> Frame:
    """The frame in `view`; raises CorruptFrameError when its layout, length or a checksum is wrong."""
    try:
        header = frames.parse_header(view)
        if header.size != len(view) or header.metadata.get("step", str(step)) != str(step):
            raise CorruptFrameError(f"step {step}: a frame of another size or step than was asked for")
        if verify:
            frames.verify(view, header)  # awscrt lets other threads run meanwhile
        return Frame(step, frames.views(view, header), len(view), origin)
    except frames.FrameError as error:
        raise CorruptFrameError(f"step {step}: {error}") from error


@dataclass(slots=True)
class _Flight:
    step: int
    connection: Connection
    sent: float
    request: Request
    joint: Joint | None = None


class _Reader:
    """The body of the reader thread. Everything here runs on it, except `wake`, `taken` and `closing`."""

    def __init__(self, transport: Transport, order: Order, arena: Arena) -> None:
        self.out: SimpleQueue[Frame | BaseException] = SimpleQueue()
        self.waker = Waker()
        self.tally = Tally()
        self.closing = False
        self.taken = 0
        self.flights: dict[int, _Flight] = {}
        self._transport = transport
        self._order = order
        self._arena = arena
        self._expected = order.expected
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._parting = Parting(order.parts, transport.router.directory, arena)
        self._joints: dict[int, Joint] = {}
        self._tried: dict[int, set[Endpoint]] = {}
        self._looked = -_SUSPICIOUS  # when silent nodes were last looked at
        self._patience: dict[int, Patience] = {}
        self._due: list[tuple[float, int]] = []
        self._done: dict[int, Frame | MeshError] = {}
        self._asked = self._given = order.steps.start
        self._stop, self._stride = order.steps.stop, order.steps.step
        self._poll = select.poll()

    def run(self) -> None:
        try:
            self._poll.register(self.waker, select.POLLIN)
            while not self.closing and self._given < self._stop:
                self._send_ahead()
                self._receive(self._wait())
                self.tally.cpu = time.thread_time()
        except BaseException as error:  # noqa: BLE001, RUF100 - handed to the consumer, who raises it
            self.out.put(error)
        finally:
            self._hang_up()

    # --- asking -----------------------------------------------------------------------------------

    def _send_ahead(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now and self._under_way() < self._order.connections:
            self._send(heapq.heappop(self._due)[1])
        while self._may_ask():
            self._asked += self._stride
            step = self._asked - self._stride
            if not self._send_parts(step):
                self._send(step)

    def _under_way(self) -> int:
        """Frames that were asked for and are not here."""
        alone = sum(flight.joint is None for flight in self.flights.values())
        return alone + len(self._joints)

    def _may_ask(self) -> bool:
        """Whether the next step's frame has a place: in the budget, or anywhere if nothing else is coming."""
        asked = self._under_way() + len(self._due)
        if self._asked >= self._stop or asked >= self._order.connections:
            return False
        if asked == 0 and self._asked - self._order.steps.start == self.taken * self._stride:
            return True
        begun = sum(joint.joining.begun for joint in self._joints.values())  # these have their memory
        needed = (asked - begun + 1) * self._arena.memory.capacity(self._expected)
        return self._expected > 0 and self._arena.room() >= needed

    def _send_parts(self, step: int) -> bool:
        """Asks each node that stores for its part of a frame, where that may be done."""
        begun = self._parting.begin(step, time.monotonic())
        if begun is None:
            return False
        joint, request, endpoints = begun
        self._joints[step] = joint
        for endpoint in endpoints:
            self._put(step, request, endpoint, joint)
            if step not in self._joints:  # one was not to be had
                break
        return True

    def _send(self, step: int) -> None:
        request, transport = self._order.ask(step), self._transport
        endpoint = transport.router.choose(request, self._tried.get(step, set()))
        self._put(step, request, endpoint)

    def _put(self, step: int, request: Request, endpoint: Endpoint, joint: Joint | None = None) -> None:
        """A question to a node: for a frame, or for its part of one."""
        if joint is None and (word := self._transport.neighbours.word(endpoint)):
            request = replace(request, headers={**request.headers, LOCAL: word})
        line, idle = self._transport.line(endpoint), self._idle.get(endpoint)
        try:
            connection = idle.pop() if idle else line.pool.dial()
        except MeshError as error:
            self._failed(step, error, request, endpoint)
            return
        flight = _Flight(step, connection, time.monotonic(), request, joint)
        self.flights[connection.fileno()] = flight
        self._poll.register(connection, select.POLLIN)
        try:
            connection.send([line.signer.head(request), request.body])
        except MeshError as error:
            self._drop(flight)
            self._failed(step, error, request, endpoint)

    # --- receiving --------------------------------------------------------------------------------

    def _wait(self) -> list[_Flight]:
        """Flights whose answer has begun, in step order; waits for one, for credit or for a retry's time."""
        now = time.monotonic()
        until = [when for when, _ in self._due[:1]]
        if self.flights:
            since = min(flight.sent for flight in self.flights.values())
            until.append(max(since + self._silence(), self._looked + _SUSPICIOUS))
        events = self._poll.poll(max(min(until) - now, 0.0) * 1000 + 1 if until else None)
        self.waker.drain()
        if not events:
            self._drop_silent()
        readable = [self.flights[fd] for fd, _ in events if fd in self.flights]
        begun = [flight for flight in readable if flight.connection.began()]
        return sorted(begun, key=lambda flight: flight.step)

    def _silence(self) -> float:
        """Seconds without an answer after which something is done about it."""
        timeout = self._transport.settings.timeout
        return timeout if self._transport.router.directory.map is None else min(timeout, _SUSPICIOUS)

    def _drop_silent(self) -> None:
        """Gives up who said nothing for too long, and whom the mesh has given up. Work that takes its time is
        left alone."""
        now, directory = time.monotonic(), self._transport.router.directory
        self._looked = now
        silent = [flight for flight in self.flights.values() if now - flight.sent >= self._silence()]
        if silent and directory.map is not None:
            directory.refresh()
        for flight in silent:
            endpoint = flight.connection.endpoint
            if not self._is_flying(flight):
                continue
            if now - flight.sent >= self._transport.settings.timeout:
                self._drop(flight)
                why = f"no answer within {self._transport.settings.timeout:g} s"
                self._failed(flight.step, ConnectError(why), flight.request, endpoint)
            elif directory.state(endpoint) in ("away", "down"):
                self._drop(flight)
                error = ConnectError(f"{endpoint}: its node went away")
                self._failed(flight.step, error, flight.request, endpoint)

    def _receive(self, answered: list[_Flight]) -> None:
        for flight in answered:
            if self.closing:
                return
            if not self._is_flying(flight):  # another part of its frame failed
                continue
            try:
                frame = self._read(flight)
            except HandoverError:
                self.tally.retries += 1
                heapq.heappush(self._due, (time.monotonic(), flight.step))
                continue
            except MeshError as error:
                self._failed(flight.step, error, flight.request, flight.connection.endpoint)
                continue
            if frame is not None:
                self._patience.pop(flight.step, None)
                self._tried.pop(flight.step, None)
                self._finish(flight.step, frame)

    def _is_flying(self, flight: _Flight) -> bool:
        return any(other is flight for other in self.flights.values())

    def _read(self, flight: _Flight) -> Frame | None:
        """What came; None while other parts are to come."""
        response = None
        try:
            response = flight.connection.receive()
            directory = self._transport.router.directory
            directory.worked(flight.connection.endpoint)
            directory.heard(response.headers.get(MAP_HEADER, ""))
            said = response.headers.get(LOCAL, "")
            self._transport.neighbours.heard(flight.connection.endpoint, said)
            if response.status != 200:
                raise read_error(response)
            if flight.joint is not None:
                return self._read_part(flight.joint, response)
            return self._read_frame(flight, response)
        finally:
            self._drop(flight, keep=response is not None and response.reusable)

    def _read_frame(self, flight: _Flight, response: Response) -> Frame:
        """The body goes from the socket into its slot, or stays where the node has it; nothing copies it
        afterwards."""
        step, began = self._order.named(flight.step), time.monotonic()
        handed = response.headers.get(HANDED, "")
        if handed and response.length == 0:
            lease = self._transport.neighbours.take(flight.connection.endpoint, handed, self._arena)
            self.tally.local += 1
        elif response.length:
            lease = self._arena.lease(response.length)
            response.readinto(lease.view)
        else:
            raise CorruptFrameError(f"step {step}: the answer has no Content-Length")
        origin = response.headers.get("x-mesh-frame", "")
        frame = open_frame(lease.view, step, verify=self._order.verify, origin=origin)
        timing = parse_timing(response.headers.get(TIMING, ""))
        done = time.monotonic()
        frame = replace(frame, arrival=Arrival(flight.sent, began, done, timing))
        self._count(frame, frame.nbytes)
        return frame

    def _read_part(self, joint: Joint, response: Response) -> Frame | None:
        """Its rows go from the socket to their places in the frame's slot."""
        timing = parse_timing(response.headers.get(TIMING, ""))
        joint.take(response, timing, time.monotonic(), verify=self._order.verify)
        if joint.left:
            return None
        arrays, size = joint.views()
        del self._joints[joint.step]
        self._parting.worked()
        self.tally.parted += 1
        frame = Frame(joint.step, arrays, size, joint.origin, joint.arrival(time.monotonic()))
        self._count(frame, joint.bytes)
        return frame

    def _count(self, frame: Frame, size: int) -> None:
        tally, arrival, origin = self.tally, frame.arrival, frame.origin
        if arrival is not None:
            tally.latency += max(arrival.began - arrival.asked - arrival.server.total, 0.0)
            tally.receiving += arrival.done - arrival.began
        self._expected = max(self._expected, frame.nbytes)
        tally.bytes += size
        tally.origins[origin] = tally.origins.get(origin, 0) + 1

    # --- book-keeping -----------------------------------------------------------------------------

    def _failed(self, step: int, error: MeshError, request: Request, endpoint: Endpoint) -> None:
        """Asks another node now or this one later, or ends the pass at this step."""
        if self.closing:
            return
        now = time.monotonic()
        if self._joints.pop(step, None) is not None:
            self._give_up_parts(step, error, endpoint, now)
            return
        tried = self._tried.setdefault(step, set())
        if failed(self._transport.router, request, tried, endpoint, error):
            heapq.heappush(self._due, (now, step))
            self.tally.retries += 1
            return
        tried.clear()
        patience = self._patience.setdefault(step, Patience(BackOff(self._order.deadline), started=now))
        try:
            heapq.heappush(self._due, (now + patience.delay(error, now), step))
        except MeshError as final:
            self._stop = min(self._stop, step + 1)
            self._finish(step, final)
        else:
            self.tally.retries += 1

    def _give_up_parts(self, step: int, error: MeshError, endpoint: Endpoint, now: float) -> None:
        """All of it is asked for, of one node."""
        for flight in [flight for flight in self.flights.values() if flight.step == step]:
            self._drop(flight)
        directory = self._transport.router.directory
        if isinstance(error, ConnectError):
            directory.failed(endpoint)
            directory.refresh()
        self._parting.failed()
        self.tally.retries += 1
        heapq.heappush(self._due, (now, step))

    def _finish(self, step: int, result: Frame | MeshError) -> None:
        self._done[step] = result
        while self._given in self._done:
            self.out.put(self._done.pop(self._given))
            self._given += self._stride

    def _drop(self, flight: _Flight, *, keep: bool = False) -> None:
        descriptor = next((fd for fd, other in self.flights.items() if other is flight), -1)
        self._poll.unregister(descriptor)
        del self.flights[descriptor]
        if keep:
            self._idle.setdefault(flight.connection.endpoint, []).append(flight.connection)
        else:
            flight.connection.close()

    def _hang_up(self) -> None:
        idle = [connection for kept in self._idle.values() for connection in kept]
        for connection in [*idle, *(flight.connection for flight in self.flights.values())]:
            connection.close()
        self._idle.clear()
        self.flights.clear()
        self._joints.clear()
        self.tally.cpu = time.thread_time()


def _shut(reader: _Reader, thread: threading.Thread, pid: int) -> None:
    """Ends the thread; in a forked child there is none, and its sockets are the parent's."""
    if pid != os.getpid():
        reader.waker.close()
        return
    reader.closing = True
    reader.waker.wake()
    for flight in list(reader.flights.values()):
        flight.connection.abort()
    if thread is not threading.current_thread():  # garbage may be collected on the reader itself
        thread.join()
    reader.waker.close()
    reader.out.put(ClosedError("this pass over the loader is closed: iterate the loader again"))


class Delivery:
    """A running delivery of `order.steps`; `take` once a step. One consumer at a time."""

    def __init__(self, transport: Transport, order: Order, arena: Arena) -> None:
        self._reader = reader = _Reader(transport, order, arena)
        self._arena = arena
        self._pid = os.getpid()
        arena.on_return = reader.waker.wake
        # The thread knows the reader, not this object: an abandoned delivery is collected, and shuts itself.
        self._thread = threading.Thread(target=reader.run, name="mesh-reader", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _shut, reader, self._thread, self._pid)

    def take(self) -> Frame:
        """The next frame, waiting for it; raises what its step ended with (MeshError)."""
        if self._pid != os.getpid():
            raise ClosedError("this pass belongs to the parent process: iterate the loader anew after a fork")
        result = self._reader.out.get()
        if isinstance(result, BaseException):
            self.close()
            raise result
        self._reader.taken += 1
        self._reader.waker.wake()
        return result

    def ready(self) -> bool:
        """Whether `take` would return at once."""
        return not self._reader.out.empty()

    @property
    def tally(self) -> Tally:
        return self._reader.tally

    def close(self) -> None:
        """Ends the thread and closes the sockets. Idempotent; frames already taken stay valid."""
        self._finalizer()
        self._arena.on_return = None

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "closed"
        return f"Delivery({state}, {len(self._reader.flights)} in flight)"

"""Reports that no frame request can carry: every frame has arrived, or the loop has ended.

Law: a report is sent once. A failed report is not an error; the next one includes its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from meshsdk.client.arena import Waker
from meshsdk.client.transport import InFlightRequests
from meshsdk.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.client.request import Request
    from meshsdk.client.transport import Transport

_ANSWER: Final = 1.0  # seconds that the end of a loop may wait
_AFTER_LAST: Final = 1.0  # seconds in which the loop may use its last frame


class Worker(Protocol):
    """The prefetch thread: `taken` frames went to the loop."""

    flights: InFlightRequests[Any]
    closing: bool
    taken: int


def report_rest(
    worker: Worker, transport: Transport, report: Callable[[bool], Request | None], count: int
) -> None:
    """Report until the loop has taken all of its `count` frames, or the worker is closing."""
    last = False
    while not worker.closing and not last:
        last = worker.taken >= count
        for flight in worker.flights.answered(_AFTER_LAST if last else None) or ():
            _finish(worker.flights, transport, flight)
        if not worker.closing and not worker.flights and (request := report(False)) is not None:
            try:
                worker.flights.send_request(None, request, transport.router.choose_endpoint(request, set()))
            except MeshError:
                continue


def report_end(transport: Transport, request: Request | None) -> None:
    """Report what a loop did since the last report; gives up after a second."""
    if request is None:
        return
    waker = Waker()
    flights = InFlightRequests[None](transport, waker, _ANSWER)
    try:
        flights.send_request(None, request, transport.router.choose_endpoint(request, set()))
        for flight in flights.answered(_ANSWER) or ():
            _finish(flights, transport, flight)
    except MeshError:
        pass
    finally:
        flights.close()
        waker.close()


def _finish(flights: InFlightRequests[Any], transport: Transport, flight: Any) -> None:
    keep = False
    try:
        response = transport.receive(flight.connection, flight.request)
        response.read()
        keep = response.reusable
    except MeshError:
        pass
    finally:
        flights.finish_request(flight, keep=keep)

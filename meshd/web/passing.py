"""A request that another node answers without a task of this one: handed over in the callback that brought
it, and its answer in those that bring it.

Law: only for requests that do no harm when they are asked twice: if nothing of an answer came, the request
takes the ordinary way, which knows other nodes. Invariant: what the client sends meanwhile is kept, in
order, and little of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.telemetry import metrics
from meshd.web.mending import Holding
from meshd.web.misdirecting import asks_elsewhere
from meshd.web.relaying import Relay
from meshd.web.settling import CLIENT_GONE

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from typing import Any

    from meshd.net.wires import Wire
    from meshd.web.settling import Trace

_FIRST_BYTE: Final = 2.0  # seconds of silence until the request takes the ordinary way


class PassedOn(Holding):
    """`data` is the client's only request, as it came on `protocol`. `ended` is called once, on a turn of the
    loop of its own, when the answer is out, none came, or the client is gone."""

    def __init__(
        self, protocol: Any, wire: Wire, data: bytes, trace: Trace, ended: Callable[[PassedOn], None]
    ) -> None:
        super().__init__(protocol, data)
        self._wire, self._trace, self._ended = wire, trace, ended
        self.relay = Relay(protocol, wire, self._word, asks_elsewhere)

    def __repr__(self) -> str:
        return f"<PassedOn {self.relay!r}, {len(self.held)} bytes held>"

    @property
    def answered(self) -> bool:
        return self.relay.head is not None

    @property
    def closing(self) -> bool:
        return self.relay.closing

    def start(self, sent: bytes, *, head_only: bool) -> None:
        """Ask with `sent`."""
        self.relay.outcome.add_done_callback(self._done)
        self._wire.start(self.relay, sent, patience=_FIRST_BYTE, head_only=head_only)

    def _word(self) -> str:
        return "close" if self.last and not self.held else ""

    def _done(self, _: asyncio.Future[Any]) -> None:
        transport, trace, head = self._protocol.transport, self._trace, self.relay.head
        trace.sent += self.relay.sent
        gone = transport is None or transport.is_closing()
        if head is None and not gone:
            trace.drop()
        else:
            trace.finish(CLIENT_GONE if gone or head is None else head.status, later=True)
        if head is not None:
            metrics.forwarded.labels("broken" if self.relay.broken else "answered").inc()
        if not gone:
            self._read_on()
        self._ended(self)

"""What a wait for a frame was spent on: the network and copying, the node's preprocessing, its fetching.

Law: pure. A wait is cut at the moments that are known of the frame it was for; the time between question and
answer is divided as the node's own clock divides it, and what is left of it is the network's.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwire.servertimings import ServerTiming, Took

_UNKNOWN = ServerTiming(Took(), 0.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a frame came: monotonic seconds when it was asked for, its answer began, its last byte was in
    place; and what the node says of the time in between."""

    asked: float
    began: float
    done: float
    server: ServerTiming = _UNKNOWN


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds of waiting by what they were spent on; `network`: with copying and checking."""

    network: float = 0.0
    preprocessing: float = 0.0
    fetch: float = 0.0

    def __add__(self, other: Stall) -> Stall:
        return Stall(
            self.network + other.network,
            self.preprocessing + other.preprocessing,
            self.fetch + other.fetch,
        )

    @property
    def seconds(self) -> float:
        return self.network + self.preprocessing + self.fetch


def divided(since: float, until: float, arrival: Arrival) -> Stall:
    """A wait from `since` to `until` for a frame that came so."""
    waited = max(until - since, 0.0)
    answering = max(arrival.began - arrival.asked, 0.0)
    within = max(min(until, arrival.began) - max(since, arrival.asked), 0.0)
    server = arrival.server
    if within <= 0.0 or server.total <= 0.0:
        return Stall(waited)
    share = within / max(answering, server.total)
    preprocessing, fetch = share * server.preprocessing, share * server.fetch
    return Stall(max(waited - preprocessing - fetch, 0.0), preprocessing, fetch)

"""Checks of other nodes: health probe, certificate and clock survey, and comparison of `--domain` settings.

Law: the probe does not authenticate (`meshd.rpc.peer_client` does) and ignores certificates: a node with
an expired certificate is not away, and a wrong local clock makes certificates look expired. The survey
opens its own connections, because open ones reveal neither clocks nor certificates; it changes no state.
Every node publishes its domains (`told/NODE` in the control store). Nodes that differ from the majority
appear in the log and in the status, but are not refused: an operator changes the setting node by node.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from meshd.util.timeouts import timeout
from meshwire.http_values.dates import parse_http

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.control_api import ControlStore
    from meshd.rpc.peer_client import PeerClient
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap, Node


PROBE_TIMEOUT: Final = 1.5
SURVEYED_AT_ONCE: Final = 256
MAP_VERSION_HEADER: Final = "x-mesh-map"
MAP_FORMAT_HEADER: Final = "x-mesh-map-format"
MAP_FORMAT: Final = 2
"""The newest form of a cluster map that this release reads. 2: with `base_slots`."""
_REQUEST = "GET /-/healthy HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n"
_MAX_HEAD: Final = 8192
_STEPS: Final = 6  # of a probe
_NO_ANSWER: Final = (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)


class ProbeResult(msgspec.Struct, frozen=True):
    """A node's answer to a probe: the `version` of its map (0 if not sent), the time of its `clock` in
    whole seconds since 1970 (None if not sent), and the newest `map_format` that it reads."""

    version: int
    clock: int | None
    map_format: int = 1


async def probe_map_version(node: Node) -> int | None:
    """Returns the map version of a node (0 if it does not send one); None if it does not answer.

    Time in which this process stood still says nothing about the node: its answer may be there, unread."""
    probe = asyncio.ensure_future(_probe(node))
    answer: ProbeResult | None = None
    try:
        await _wait_awake(probe, PROBE_TIMEOUT)
        if probe.done():
            answer = probe.result()
    except (OSError, *_NO_ANSWER):
        return None
    finally:
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
    return None if answer is None else answer.version


async def _wait_awake(work: asyncio.Future[ProbeResult | None], max_wait: float) -> None:
    """Waits for work in short steps; those that end late do not count, as often as others do."""
    loop, step = asyncio.get_running_loop(), max_wait / _STEPS
    counted = late = 0
    while counted < _STEPS and not work.done():
        began = loop.time()
        await asyncio.wait([work], timeout=step)
        if loop.time() - began > 2 * step and late < _STEPS:
            late += 1
        else:
            counted += 1


async def probe_map_format(node: Node) -> int | None:
    """Returns the newest form of a map that a node reads; None if it does not answer."""
    with suppress(ConnectionRefusedError):
        answer = await _probe_within(node, PROBE_TIMEOUT)
        return None if answer is None else answer.map_format
    return None


async def _probe_within(node: Node, max_wait: float) -> ProbeResult | None:
    """Probes a node for up to `max_wait` seconds; None if it does not answer.

    Raises ConnectionRefusedError if nobody listens at its address.
    """
    try:
        async with timeout(max_wait):
            return await _probe(node)
    except ConnectionRefusedError:
        raise
    except (OSError, *_NO_ANSWER):
        return None


async def _probe(node: Node) -> ProbeResult | None:
    where = urlsplit(node.endpoint)
    port = where.port or (443 if where.scheme == "https" else 80)
    tls = _unverified_context() if where.scheme == "https" else None
    reader, writer = await asyncio.open_connection(where.hostname, port, ssl=tls, limit=_MAX_HEAD)
    try:
        writer.write(_REQUEST.format(where.netloc).encode())
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    finally:
        writer.transport.abort()
    if not lines[0].startswith("HTTP/1."):
        return None
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines[1:])
    }
    return ProbeResult(
        int(headers.get(MAP_VERSION_HEADER, "0")),
        parse_http(headers.get("date", "")),
        int(headers.get(MAP_FORMAT_HEADER, "1")),
    )


def _unverified_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class PeerSurvey(msgspec.Struct, frozen=True):
    """What a survey of the peers found. `refused`: by id, why a node's certificate is rejected here. `ahead`:
    by id, the seconds that a node's clock is ahead of the local one (negative: behind), to about a second;
    this node is included. `silent`: ids of nodes that did not answer in time; `absent`: of those, the ones at
    whose address nobody listens."""

    refused: Mapping[str, str]
    ahead: Mapping[str, float]
    silent: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()


async def survey_peers(
    mesh: ClusterView,
    peers: PeerClient,
    clock: Clock,
    max_wait: float = PROBE_TIMEOUT,
    most: int | None = None,
) -> PeerSurvey:
    """Surveys all other nodes that are not known to be gone, SURVEYED_AT_ONCE of them in parallel; each may
    take `max_wait` seconds. `most`: how many at most, others each time."""
    others = [
        node
        for node in mesh.current_map().nodes
        if node.node_id != mesh.node_id and node.state not in ("away", "down")
    ]
    if most is not None and len(others) > most:
        others = random.sample(others, most)
    turns = asyncio.Semaphore(SURVEYED_AT_ONCE)

    async def survey(node: Node) -> tuple[str, _Look]:
        async with turns:
            return await asyncio.gather(
                peers.connector.certificate_error(node, max_wait), _look_at(node, clock, max_wait)
            )

    answers = await asyncio.gather(*map(survey, others))
    why = [refusal for refusal, _ in answers]
    found = {node.node_id: look for node, (_, look) in zip(others, answers, strict=True)}
    return PeerSurvey(
        {node.node_id: said for node, said in zip(others, why, strict=True) if said},
        {mesh.node_id: 0.0}
        | {node_id: look.ahead for node_id, look in found.items() if look.ahead is not None},
        frozenset(node_id for node_id, look in found.items() if not look.answers),
        frozenset(node_id for node_id, look in found.items() if look.absent),
    )


class _Look(NamedTuple):
    """What a node looks like. `ahead`: its clock, if it says, in seconds ahead of the local one."""

    answers: bool
    ahead: float | None = None
    absent: bool = False


async def _look_at(node: Node, clock: Clock, max_wait: float) -> _Look:
    before = clock.now_ms()
    try:
        answer = await _probe_within(node, max_wait)
    except ConnectionRefusedError:
        return _Look(answers=False, absent=True)
    if answer is None:
        return _Look(answers=False)
    if answer.clock is None:
        return _Look(answers=True)
    middle = (before + clock.now_ms()) / 2000
    return _Look(answers=True, ahead=answer.clock + 0.5 - middle)  # the node sends seconds, rounded down


DOMAINS_TOPIC: Final = "told"


class NodeDomains(msgspec.Struct, frozen=True):
    """The domains with which a node was started."""

    domains: tuple[str, ...] = ()


async def publish_domains(control: ControlStore, node_id: str, domains: tuple[str, ...]) -> None:
    """Publishes the domains of this node. Raises ControlError."""
    await control.put(f"{DOMAINS_TOPIC}/{node_id}", msgspec.json.encode(NodeDomains(tuple(sorted(domains)))))


def domain_mismatches(control: ControlStore, cluster: ClusterMap) -> Mapping[str, str]:
    """Returns, by id, what is wrong with nodes whose domains differ from the majority's, and what to do."""
    published = {}
    for key, entry in control.cached_entries(DOMAINS_TOPIC).items():
        node_id = key.partition("/")[2]
        node = cluster.node(node_id)
        if node is not None and node.state != "down":
            published[node_id] = msgspec.json.decode(entry.value, type=NodeDomains).domains
    if len(set(published.values())) < 2:
        return {}
    most = max(Counter(published.values()).items(), key=lambda found: (found[1], found[0]))[0]
    usual = f"--domain {' --domain '.join(most)}" if most else "no --domain"
    return {
        node_id: f"was started with other domains than most nodes, which have {usual}: use the same ones"
        for node_id, domains in published.items()
        if domains != most
    }

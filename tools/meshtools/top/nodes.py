"""Metrics of the nodes: rates between two scrapes of each, and the reports of all loaders.

Law: scraping needs no access key; only the list of nodes does. A node that does not answer is shown with
the reason.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from meshsdk.admin.cluster_admin import scrape
from meshsdk.client.settings import CA_VARIABLES, ENDPOINT_VARIABLES, load_settings, parse_endpoint
from meshsdk.client.transport import Transport
from meshsdk.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshsdk.admin.cluster_admin import Scrape
    from meshsdk.client.settings import Endpoint

_STAGES: Final = ("network", "preprocessing", "fetch")
_TIMEOUT: Final = 2.0  # seconds
_AT_ONCE: Final = 16
_MOST: Final = 64  # nodes on a screen


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The metrics of a node at the time `now` (monotonic seconds), or the reason why it did not answer."""

    endpoint: str
    now: float
    metrics: Scrape | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class NodeRates:
    """Rates per second between two snapshots, except `queue` (rows that wait), `hits` (share of frames that
    were ready) and `free` (share of the disks). `saved`: cores that the decoded cache spares; `decoded`:
    bytes that it has, of `decoded_limit`; `at_quota`: buckets of which their quota lets it keep no more."""

    endpoint: str
    why: str = ""
    requests: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    rows: float = 0.0
    prepared: float = 0.0
    hits: float | None = None
    queue: float = 0.0
    free: float | None = None
    saved: float = 0.0
    decoded: float = 0.0
    decoded_limit: float = 0.0
    at_quota: float = 0.0
    errors: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class ReportedJob:
    """A job that reports to the nodes (`Loader(…, report=NAME)`), over all its ranks, between two snapshots:
    samples per second, and shares of its time. `epochs`: how far the loop is in its data, None if unknown;
    `left`: seconds to the end of the epoch at this rate."""

    name: str
    rate: float
    stall: float
    network: float = 0.0
    preprocessing: float = 0.0
    fetch: float = 0.0
    epochs: float | None = None
    left: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Nodes:
    """The nodes to scrape; `why`: the reason why some or all are missing."""

    endpoints: Sequence[Endpoint] = field(default_factory=tuple)
    why: str = ""

    def scrape_all(self, clock: Callable[[], float]) -> list[NodeSnapshot]:
        """Scrapes all nodes concurrently."""
        if not self.endpoints:
            return []
        with ThreadPoolExecutor(min(len(self.endpoints), _AT_ONCE)) as pool:
            return list(pool.map(lambda endpoint: _look(endpoint, clock), self.endpoints))


def _look(endpoint: Endpoint, clock: Callable[[], float]) -> NodeSnapshot:
    try:
        scraped = scrape(endpoint, _TIMEOUT)
    except MeshError as error:
        return NodeSnapshot(str(endpoint), clock(), None, str(error)[:200])
    return NodeSnapshot(str(endpoint), clock(), scraped)


def find_nodes(endpoint: str | None = None, ca_cert: str | None = None) -> Nodes:
    """Returns the nodes of the mesh behind MESH_ENDPOINT, or the nodes named there if the cluster map is not
    available."""
    text = endpoint or next((os.environ[name] for name in ENDPOINT_VARIABLES if os.environ.get(name)), "")
    if not text:
        return Nodes((), "MESH_ENDPOINT is not set: no node is scraped")
    ca_cert = ca_cert or next((os.environ[name] for name in CA_VARIABLES if os.environ.get(name)), "")
    try:
        named = [parse_endpoint(part.strip(), ca_cert) for part in text.split(",") if part.strip()]
    except MeshError as error:
        return Nodes((), str(error))
    return Nodes(tuple(dict.fromkeys(_map_nodes(text, ca_cert) or named))[:_MOST])


def _map_nodes(endpoint: str, ca_cert: str) -> list[Endpoint]:
    """Returns the nodes of the cluster map; none without an access key, or if no node answers."""
    try:
        transport = Transport(load_settings(endpoint=endpoint, ca_cert=ca_cert, timeout=_TIMEOUT))
    except MeshError:
        return []
    directory = transport.router.directory
    directory.refresh()
    cluster = directory.map
    return [] if cluster is None else [directory.endpoint(node) for node in cluster.nodes]


def rates(before: NodeSnapshot, after: NodeSnapshot) -> NodeRates:
    """Returns the rates of a node between two snapshots."""
    if before.metrics is None or after.metrics is None:
        return NodeRates(after.endpoint, after.why or before.why or "no answer")
    was, now, seconds = before.metrics, after.metrics, max(after.now - before.now, 1e-6)

    def rate(name: str, **labels: str) -> float:
        return max(now.sum_of(name, **labels) - was.sum_of(name, **labels), 0.0) / seconds

    asked = rate("meshd_frames_total")
    disk = now.sum_of("meshd_store_disk_bytes")
    return NodeRates(
        after.endpoint,
        requests=rate("meshd_http_requests_total"),
        sent=rate("meshd_http_bytes_total", direction="out"),
        received=rate("meshd_http_bytes_total", direction="in"),
        rows=rate("meshd_batch_rows_served_total"),
        prepared=rate("meshd_transform_samples_total"),
        hits=1 - rate("meshd_frames_total", result="miss") / asked if asked else None,
        queue=now.sum_of("meshd_transform_queue_rows"),
        free=now.sum_of("meshd_store_disk_free_bytes") / disk if disk else None,
        saved=rate("meshd_decoded_cache_cpu_seconds_saved_total"),
        decoded=now.sum_of("meshd_decoded_cache_bytes"),
        decoded_limit=now.sum_of("meshd_decoded_cache_limit_bytes"),
        at_quota=now.sum_of("meshd_decoded_cache_buckets_at_quota"),
        errors=_errors(now, was) / seconds,
    )


def _errors(now: Scrape, was: Scrape) -> float:
    counted = (
        now.sum_by_label("meshd_http_requests_total", "status"),
        was.sum_by_label("meshd_http_requests_total", "status"),
    )
    bad = [status for status in counted[0] if status.startswith("5")]
    return sum(max(counted[0][status] - counted[1].get(status, 0.0), 0.0) for status in bad)


def loader_reports(before: Sequence[NodeSnapshot], after: Sequence[NodeSnapshot]) -> list[ReportedJob]:
    """Returns the jobs that reported between two snapshots, summed over all nodes."""
    seconds = max((look.now for look in after), default=0.0) - min((look.now for look in before), default=0.0)
    samples = _gain_by_loader(before, after, "meshd_loader_samples_total")
    waited = _gain_by_loader(before, after, "meshd_loader_waited_seconds_total")
    passed = _gain_by_loader(before, after, "meshd_loader_seconds_total")
    stages = {
        stage: _gain_by_loader(before, after, "meshd_loader_stall_seconds_total", stage=stage)
        for stage in _STAGES
    }
    found = []
    for name in sorted(passed):
        if passed[name] <= 0:
            continue
        rate = samples.get(name, 0.0) / max(seconds, 1e-6)
        shares = {stage: gained.get(name, 0.0) / passed[name] for stage, gained in stages.items()}
        epochs, positions = _place(before, after, name)
        left = (1 - epochs % 1) * positions / rate if epochs is not None and positions and rate else None
        waiting = waited.get(name, 0.0) / passed[name]
        found.append(ReportedJob(name, rate, waiting, **shares, epochs=epochs, left=left))
    return found


def _place(
    before: Sequence[NodeSnapshot], after: Sequence[NodeSnapshot], loader: str
) -> tuple[float | None, float]:
    """Returns how far a loop is, in epochs, and the samples of an epoch, by the nodes to which it reported
    between the snapshots; others may know an earlier run of it."""
    found: list[tuple[float, float]] = []
    for was, now in zip(before, after, strict=True):
        if was.metrics is None or now.metrics is None:
            continue
        passed = (
            each.sum_of("meshd_loader_seconds_total", loader=loader) for each in (was.metrics, now.metrics)
        )
        if len(set(passed)) == 2 and loader in now.metrics.sum_by_label("meshd_loader_epochs", "loader"):
            positions = now.metrics.sum_of("meshd_loader_epoch_samples", loader=loader)
            found.append((now.metrics.sum_of("meshd_loader_epochs", loader=loader), positions))
    return max(found, default=(None, 0.0))


def _gain_by_loader(
    before: Sequence[NodeSnapshot], after: Sequence[NodeSnapshot], name: str, **labels: str
) -> Mapping[str, float]:
    """Returns the increase by loader, over the nodes that answered both times."""
    found: dict[str, float] = {}
    for was, now in zip(before, after, strict=True):
        if was.metrics is None or now.metrics is None:
            continue
        earlier = was.metrics.sum_by_label(name, "loader", **labels)
        for loader, value in now.metrics.sum_by_label(name, "loader", **labels).items():
            found[loader] = found.get(loader, 0.0) + max(value - earlier.get(loader, 0.0), 0.0)
    return found

"""Every metric of the daemon. Names start with `meshd_`; units are seconds and bytes.

Labels are bounded and never a key, a bucket or a client. `process.environment` sets PROMETHEUS_MULTIPROC_DIR
before this module is imported; the processes share their values in that directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from meshd.telemetry import mmap_metrics
from meshd.telemetry.legacy_names import LegacyNamesCollector
from meshd.telemetry.mmap_metrics import merge_dead_processes, scrape_lock

if TYPE_CHECKING:
    from meshd.telemetry.legacy_names import MetricSource

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

mmap_metrics.install_mmap_dict()
_registry = CollectorRegistry()
_LATENCY = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


OTHER: Final = "other"
_MAX_NAMES: Final = 200
# Labels whose values users choose.
_names: dict[str, set[str]] = {"op": set(), "loader": set(), "view": set()}


class _BoundedCounter(Counter):  # type: ignore[misc]  # the library has no types here
    """A counter with labels whose values users choose; `labels` bounds their number."""

    def labels(self, *values: str) -> _BoundedCounter:
        given = zip(self._labelnames, values, strict=True)
        bounded = (_bounded_label(name, value) if name in _names else value for name, value in given)
        child: _BoundedCounter = super().labels(*bounded)
        return child


def _counter(name: str, documentation: str, *labels: str) -> Counter:
    kind = Counter if _names.keys().isdisjoint(labels) else _BoundedCounter
    return kind(name, documentation, labels, registry=_registry)


def _histogram(name: str, documentation: str, *labels: str) -> Histogram:
    return Histogram(name, documentation, labels, registry=_registry, buckets=_LATENCY)


def _gauge(name: str, documentation: str, *labels: str, mode: str = "livesum") -> Gauge:
    return Gauge(name, documentation, labels, registry=_registry, multiprocess_mode=mode)


# HTTP: operation is the name of the S3 operation (or of a native route), status is the number as text
http_requests = _counter("meshd_http_requests_total", "Requests answered.", "operation", "status")
http_seconds = _histogram("meshd_http_request_seconds", "From request head to last byte.", "operation")
http_bytes = _counter("meshd_http_bytes_total", "Body bytes; direction is in or out.", "direction")
http_connections = _gauge("meshd_http_connections", "Open client connections.")
http_turned_away = _counter(
    "meshd_http_turned_away_total",
    "Connections ended by the node: full, idle, slow handshake, slow head, stalled, refused body.",
    "why",
)
forwarded = _counter(
    "meshd_forwarded_total",
    "Requests forwarded; result is answered, misdirected, unreachable, skewed or broken.",
    "result",
)
tls_not_after = _gauge(
    "meshd_tls_not_after_seconds", "End of the TLS certificate's validity, since 1970.", mode="mostrecent"
)
audit_dropped = _counter("meshd_audit_dropped_total", "Audit lines that could not be written.")

# the cluster
cluster_lease_held = _gauge(
    "meshd_cluster_lease_held", "1 while this node holds its membership lease.", mode="mostrecent"
)
cluster_map_version = _gauge("meshd_cluster_map_version", "Version of the cluster map.", mode="mostrecent")
cluster_nodes = _gauge(
    "meshd_cluster_nodes",
    "Nodes in the cluster map that this node uses, by state.",
    "state",
    mode="mostrecent",
)
cluster_rebalancing = _gauge(
    "meshd_cluster_rebalancing",
    "1 while data moves to the nodes that the cluster map assigns it to.",
    mode="mostrecent",
)
cluster_slots_short = _gauge(
    "meshd_cluster_slots_short", "Slots with fewer copies than configured.", mode="mostrecent"
)
cluster_names_short = _gauge(
    "meshd_cluster_names_short",
    "Objects with fewer copies than their bucket asks for, of those that this node is the primary of.",
    mode="mostrecent",
)
cluster_slots_lost = _gauge(
    "meshd_cluster_slots_lost", "Slots without a reachable node that has all their data.", mode="mostrecent"
)
cluster_refused = _gauge(
    "meshd_cluster_certificates_refused",
    "Other nodes whose TLS certificates this node does not trust.",
    mode="mostrecent",
)
cluster_clock_ahead = _gauge(
    "meshd_cluster_clock_ahead_seconds",
    "By how much this node's clock is ahead of the others' (negative: behind).",
    mode="mostrecent",
)
cluster_control_failures = _counter(
    "meshd_cluster_control_failures_total", "Calls of the coordinator to the control store that failed."
)
cluster_read_barrier_checks = _counter(
    "meshd_cluster_read_barrier_checks_total",
    "Read barriers: while the node's lease is not valid, reads first ask the other owners for their map "
    "version; none has a newer map, one has (newer), or one does not answer (silent).",
    "found",
)
cluster_marked = _counter(
    "meshd_cluster_marked_total",
    "Changes of node states that this node made in the cluster map, by the new state.",
    "state",
)

# replication
replication_facts = _counter(
    "meshd_replication_facts_total", "Changes that other nodes accepted from this one, by kind.", "what"
)
replication_seconds = _histogram(
    "meshd_replication_seconds", "From the local commit of a write until every required replica has it."
)
replication_bytes = _counter("meshd_replication_bytes_total", "Bytes of objects and parts sent to replicas.")
replication_retries = _counter(
    "meshd_replication_retries_total", "Failed attempts to replicate a change, by reason.", "why"
)
replication_writes_forwarded = _counter(
    "meshd_replication_writes_forwarded_total",
    "Writes received here and forwarded to the primary: done there, or sent again (retry).",
    "result",
)
replication_handovers = _counter(
    "meshd_replication_handovers_total",
    "Names that a former primary was asked to hand over after a newer cluster map, by result.",
    "result",
)
replication_given_up = _counter(
    "meshd_replication_given_up_total",
    "Writes abandoned because the receiving node, or this one, has been marked away since.",
)
replication_refused = _counter(
    "meshd_replication_refused_total",
    "Writes answered with 503 because a required replica did not accept them.",
)
replication_behind = _gauge(
    "meshd_replication_behind", "Writes committed here that a required replica still lacks."
)
replica_facts = _counter(
    "meshd_replica_facts_total", "Changes received from other nodes; changed is yes or no.", "changed"
)

# batches and transforms
batch_rows_served = _counter("meshd_batch_rows_served_total", "Rows of batches sent to clients.")
transform_samples = _counter("meshd_transform_samples_total", "Samples that transforms processed.", "op")
transform_seconds = _histogram("meshd_transform_seconds", "Transform time of one slice of rows.")
transform_failures = _counter(
    "meshd_transform_failures_total", "Samples that transforms could not process.", "op"
)
op_calls = _counter("meshd_op_calls_total", "Samples that an op (or several in one step) processed.", "op")
op_seconds = _counter("meshd_op_seconds_total", "Time spent in an op.", "op")
op_bytes = _counter(
    "meshd_op_bytes_total",
    "Bytes of the values that an op received (in) and returned (out).",
    "op",
    "direction",
)
op_cache_hits = _counter("meshd_op_cache_hits_total", "Samples whose result of an op was cached.", "op")
user_op_processes = _counter(
    "meshd_user_op_processes_total",
    "Processes for users' ops: started, or ended by crash, time, memory or nonsense (invalid replies).",
    "event",
)
origin_bytes = _counter("meshd_origin_bytes_total", "Bytes moved; direction is read or written.", "direction")
origin_errors = _counter(
    "meshd_origin_errors_total",
    "Requests to an origin that failed, or were not sent because it is down.",
)
origin_fetches = _counter("meshd_origin_fetches_total", "Objects and chunks read from origins.")
peer_cache_bytes = _counter(
    "meshd_peer_cache_bytes_total",
    "Bytes read from the cache of another node instead of an origin.",
)
peer_cache_fetches = _counter(
    "meshd_peer_cache_fetches_total",
    "Reads of origin data tried in the cache of another node first; hit or miss.",
    "result",
)
origin_joined = _counter("meshd_origin_joined_total", "Reads that shared the fetch of another reader.")
origin_checks = _counter("meshd_origin_checks_total", "Revalidation requests to origins.")
origin_passed = _counter(
    "meshd_origin_passed_total",
    "Writes (push) and deletions (remove) received here and written back by the present primary.",
    "what",
)
origin_unanswered = _counter(
    "meshd_origin_unanswered_total",
    "Reads answered from the cache because the origin did not revalidate the object in time.",
)
cache_reads = _counter(
    "meshd_cache_reads_total",
    "Objects and chunks read of backed buckets; result is hit or miss.",
    "result",
)
cache_bytes = _gauge("meshd_cache_bytes", "Bytes of the cache, dead ones included.", mode="mostrecent")
cache_capacity = _gauge("meshd_cache_capacity_bytes", "Capacity of the cache in bytes.", mode="mostrecent")
cache_evicted = _counter("meshd_cache_evicted_bytes_total", "Bytes evicted.")
cache_plans = _gauge("meshd_cache_plans", "Plans whose next reads are known to the cache.", mode="mostrecent")
cache_refused = _counter("meshd_cache_refused_total", "Pieces that the cache did not admit.")
origin_dirty = _gauge("meshd_origin_dirty_objects", "Objects not at their origin yet.", mode="mostrecent")
transform_queue = _gauge("meshd_transform_queue_rows", "Rows waiting for a transform process.")
gather_items = _counter(
    "meshd_gather_items_total", "Items of gather requests; result is ok or the error.", "result"
)
archives = _counter(
    "meshd_archives_total", "Archives opened; result is indexed, inflated or refused.", "kind", "result"
)
remote_failures = _counter(
    "meshd_remote_failures_total", "Failed reads of data of other nodes, by error.", "error"
)
remote_bytes = _counter("meshd_remote_bytes_total", "Bytes of objects fetched from other nodes.")
reads_continued = _counter(
    "meshd_reads_continued_total",
    "Responses in progress whose local bytes became unreadable: completed from another node, from the origin "
    "or from a rebuilt view result, or cut.",
    "result",
)
near_cache_reads = _counter(
    "meshd_near_cache_reads_total",
    "Look-ups in the near cache of a node without a store; kind is part or frame, result hit or miss.",
    "kind",
    "result",
)
near_cache_refused = _counter("meshd_near_cache_refused_total", "Copies that the near cache did not admit.")
frames = _counter("meshd_frames_total", "Batch frames requested; result is hit, joined or miss.", "result")
asset_bytes = _counter("meshd_asset_bytes_total", "Bytes of assets stored for plans and views.")
samples_evaluated = _counter(
    "meshd_samples_evaluated_total", "Samples on which an expression of a filter or a join was evaluated."
)
samples_measured = _counter("meshd_samples_measured_total", "Samples rendered to measure them for packing.")
view_results = _counter(
    "meshd_view_results_total", "Results of views requested; hit or miss.", "result", "view"
)
view_results_evicted = _counter("meshd_view_results_evicted_total", "Results removed to make room.")
view_result_bytes = _gauge(
    "meshd_view_result_bytes", "Bytes of results of views on the disks.", mode="mostrecent"
)
documents_collected = _counter(
    "meshd_documents_collected_total",
    "Unused documents that were removed; kind is snapshots, plans, assets, packs or, on this node "
    "only, bad, lengths, lines, tfrecords, mds or parquet.",
    "kind",
)
documents = _gauge(
    "meshd_documents",
    "Documents this node has; kind is snapshots, plans, assets or packs.",
    "kind",
    mode="mostrecent",
)
documents_cleared = _counter(
    "meshd_documents_cleared_total", "Local copies removed of documents that were removed from the mesh."
)
document_bytes = _gauge("meshd_document_bytes", "Bytes of these documents.", "kind", mode="mostrecent")
documents_waiting = _gauge(
    "meshd_documents_waiting",
    "1 while no document is removed because a node cannot report which documents it used.",
    mode="mostrecent",
)
view_layouts = _counter(
    "meshd_view_layouts_total", "Scans of the sources of shard views; result is made or same.", "result"
)
view_layout_seconds = _counter(
    "meshd_view_layout_seconds_total", "Time spent in scans and layouts of shard views."
)
# what loaders report about themselves; loader is the name that they choose
loader_samples = _counter("meshd_loader_samples_total", "Rows handed to training loops.", "loader")
loader_seconds = _counter("meshd_loader_seconds_total", "Time of training loops.", "loader")
loader_waited = _counter(
    "meshd_loader_waited_seconds_total", "Time that training loops waited for a batch.", "loader"
)
loader_stalls = _counter(
    "meshd_loader_stall_seconds_total",
    "Time that training loops waited, by cause: network, preprocessing or fetch.",
    "loader",
    "stage",
)
frames_handed = _counter(
    "meshd_frames_handed_total",
    "Batch frames handed to jobs on this host as shared memory instead of being sent.",
)
frames_handed_bytes = _gauge("meshd_frames_handed_bytes", "Shared memory that such jobs use.")
frame_cache_bytes = _gauge("meshd_frame_cache_bytes", "Shared memory held by finished batches.")

# jobs; state is done, failed or cancelled
jobs_running = _gauge("meshd_jobs_running", "Running jobs.", mode="mostrecent")
jobs_waiting = _gauge("meshd_jobs_waiting", "Jobs that wait to run.", mode="mostrecent")
jobs_ended = _counter("meshd_jobs_ended_total", "Jobs that ended.", "state")
job_bytes = _counter("meshd_job_bytes_total", "Bytes of outputs written by jobs.")
job_outputs = _counter("meshd_job_outputs_total", "Outputs of jobs; written or there.", "result")
job_failures = _counter("meshd_job_failures_total", "Sources that jobs could not read and skipped.")

# store, as the coordinator measures it
store_objects = _gauge("meshd_store_objects", "Objects in the store.", mode="mostrecent")
store_versions = _gauge("meshd_store_versions", "Older versions and delete markers.", mode="mostrecent")
store_uploads = _gauge("meshd_store_uploads", "Multipart uploads in progress.", mode="mostrecent")
store_live_bytes = _gauge(
    "meshd_store_live_bytes", "Bytes in use, including older versions.", mode="mostrecent"
)
store_dead_bytes = _gauge("meshd_store_dead_bytes", "Bytes that compaction will free.", mode="mostrecent")
store_disk_free_bytes = _gauge("meshd_store_disk_free_bytes", "Free bytes.", "disk", mode="mostrecent")
store_disk_bytes = _gauge("meshd_store_disk_bytes", "Size of the disk in bytes.", "disk", mode="mostrecent")

# store, as each process works on it; kind is full or failed
store_commits = _counter("meshd_store_commits_total", "Groups of writes made durable together.")
store_writes = _counter("meshd_store_writes_total", "Requests in those groups, including refused ones.")
store_written_bytes = _counter("meshd_store_written_bytes_total", "Bytes committed to data files.")
store_sync_seconds = _histogram("meshd_store_sync_seconds", "Time of one fdatasync of a data file.")
store_corrupt_reads = _counter("meshd_store_corrupt_reads_total", "Reads of bytes that fail their checksum.")
store_quarantined = _gauge(
    "meshd_store_quarantined", "Versions whose bytes on this node are damaged.", mode="mostrecent"
)
store_disks_lost = _gauge(
    "meshd_store_disks_lost", "Directories of disks that are out of service.", mode="mostrecent"
)
quarantined = _counter("meshd_quarantined_total", "Versions and parts that were put in quarantine.")
scrub_bytes = _counter("meshd_scrub_bytes_total", "Bytes the scrub has compared with their checksums.")
scrub_passes = _counter("meshd_scrub_passes_total", "Passes of the scrub over all data files.")
scrub_repaired = _counter("meshd_scrub_repaired_total", "Damaged versions restored from another node.")
scrub_ended = _gauge(
    "meshd_scrub_ended_seconds", "End of the last whole pass, in seconds since 1970.", mode="mostrecent"
)
store_off_home_writes = _counter(
    "meshd_store_off_home_writes_total",
    "Writes placed on another disk of the node because their home disk had no room.",
)
store_disk_errors = _counter("meshd_store_disk_errors_total", "Errors of disks and of the index.", "kind")

# rebalancing: data that moves between nodes
rebalance_applied = _counter(
    "meshd_rebalance_applied_total", "Versions, parts and changes fetched from other nodes and applied."
)
rebalance_bytes = _counter("meshd_rebalance_bytes_total", "Bytes fetched from other nodes and stored.")
rebalance_missing = _gauge(
    "meshd_rebalance_missing", "Items known to be missing on this node.", mode="mostrecent"
)
rebalance_missing_bytes = _gauge(
    "meshd_rebalance_missing_bytes", "Bytes known to be missing on this node.", mode="mostrecent"
)
rebalance_dropped = _counter(
    "meshd_rebalance_dropped_total", "Names removed here because other nodes own them."
)
rebalance_retained = _gauge(
    "meshd_rebalance_retained",
    "Names that other nodes own and that stay here until their owners have them.",
    mode="mostrecent",
)
rebalance_blocked = _gauge(
    "meshd_rebalance_blocked_slots",
    "Slots without a reachable node that has all their data.",
    mode="mostrecent",
)
rebalance_pause = _gauge(
    "meshd_rebalance_pause_seconds",
    "Pause of the rebalancer after each half MiB, while event loops are kept waiting.",
)
rebalance_rounds = _counter("meshd_rebalance_rounds_total", "Complete comparisons with all other owners.")
rebalance_repaired = _counter(
    "meshd_rebalance_repaired_total", "Missing items that periodic comparisons found."
)

# lifecycle; action is expire (a current object), noncurrent, marker or upload
lifecycle_expired = _counter(
    "meshd_lifecycle_expired_total", "Entries that lifecycle rules removed.", "action"
)

# processes; role is supervisor, worker, coordinator, transform or rebalancer
process_restarts = _counter("meshd_process_restarts_total", "Children that died and were replaced.", "role")
memory_bytes = _gauge(
    "meshd_memory_bytes", "Memory of the machine, or the limit set for the node.", mode="mostrecent"
)
memory_free_bytes = _gauge(
    "meshd_memory_free_bytes", "Memory that may still be allocated.", mode="mostrecent"
)
process_memory_bytes = _gauge(
    "meshd_process_memory_bytes", "Private memory of the processes.", "role", mode="mostrecent"
)
processes_up = _gauge("meshd_processes_up", "Children that are ready.", "role", mode="mostrecent")


def op_label(op: str) -> str:
    """Return an op's name as a label. Users may push their own ops; names beyond the limit share one
    label."""
    return _bounded_label("op", op)


def loader_label(name: str) -> str:
    """Like `op_label`, for the names that loaders choose."""
    return _bounded_label("loader", name)


def view_label(name: str) -> str:
    """Like `op_label`, for views."""
    return _bounded_label("view", name)


def _bounded_label(kind: str, name: str) -> str:
    known = _names[kind]
    if name not in known:
        if len(known) >= _MAX_NAMES:
            return OTHER
        known.add(name)
    return name


def render_metrics(*, legacy_names: bool = True) -> bytes:
    """Render all metrics as Prometheus text: of every process if a shared directory is set, otherwise of this
    one. With `legacy_names`, renamed metrics also appear under their earlier names (see `legacy_names`)."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if directory is None:
        return _render(_registry, legacy_names)
    with scrape_lock(Path(directory)):
        return _render(MultiProcessCollector(CollectorRegistry()), legacy_names)


def _render(source: MetricSource, legacy_names: bool) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LegacyNamesCollector(source) if legacy_names else source)
    return bytes(generate_latest(registry))


def drop_dead_processes() -> None:
    """Drop the live gauges of dead processes; their counters stay in the sums. For the supervisor only."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if directory is not None:
        merge_dead_processes(Path(directory))

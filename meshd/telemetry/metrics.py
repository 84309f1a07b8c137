"""Every metric of the daemon. Names start with `meshd_`; units are seconds and bytes.

Law: labels are bounded and never a key, a bucket or a client. `process.bootstrap` sets
PROMETHEUS_MULTIPROC_DIR before this module is imported; the processes share their values in that
directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from meshd.telemetry import mmap_metrics
from meshd.telemetry.mmap_metrics import merge_dead_processes, scrape_lock

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

mmap_metrics.install_mmap_dict()
_registry = CollectorRegistry()
_LATENCY = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


OTHER: Final = "other"
_MAX_NAMES: Final = 200
_names: dict[str, set[str]] = {
    "op": set(),
    "loader": set(),
    "view": set(),
}  # labels that are users' to choose


class _BoundedCounter(Counter):  # type: ignore[misc]  # the library has no types here
    """A counter some of whose labels users choose: bounded here, whoever counts."""

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


# HTTP: operation is the S3 operation's name (or a native route's), status the number as text
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
    "Requests passed on; result is answered, misdirected, unreachable, skewed or broken.",
    "result",
)
tls_not_after = _gauge(
    "meshd_tls_not_after_seconds", "End of the TLS certificate's validity, since 1970.", mode="mostrecent"
)
audit_dropped = _counter("meshd_audit_dropped_total", "Audit lines that could not be written.")

# the cluster
cluster_lease_held = _gauge(
    "meshd_cluster_lease_held", "1 while this node holds the lease that says it lives.", mode="mostrecent"
)
cluster_map_version = _gauge("meshd_cluster_map_version", "Version of the cluster map.", mode="mostrecent")
cluster_nodes = _gauge(
    "meshd_cluster_nodes", "Nodes in the map this node goes by, by state.", "state", mode="mostrecent"
)
cluster_moving = _gauge(
    "meshd_cluster_moving", "1 while data is carried to where the map wants it.", mode="mostrecent"
)
cluster_slots_short = _gauge(
    "meshd_cluster_slots_short", "Slots of which fewer copies are there than are to be.", mode="mostrecent"
)
cluster_names_short = _gauge(
    "meshd_cluster_names_short",
    "Objects that the node decides about of which fewer copies are there than asked.",
    mode="mostrecent",
)
cluster_slots_lost = _gauge(
    "meshd_cluster_slots_lost", "Slots of which no node that has everything answers.", mode="mostrecent"
)
cluster_refused = _gauge(
    "meshd_cluster_certificates_refused",
    "Other nodes whose TLS certificates this node does not believe.",
    mode="mostrecent",
)
cluster_clock_ahead = _gauge(
    "meshd_cluster_clock_ahead_seconds",
    "By how much this node's clock is ahead of the others' (negative: behind).",
    mode="mostrecent",
)
cluster_control_failures = _counter(
    "meshd_cluster_control_failures_total", "Calls to the control store that failed, of the steward."
)
cluster_doubts = _counter(
    "meshd_cluster_doubts_total",
    "Questions to other owners whether the map still holds, asked before reads while the node's lease is not "
    "sure: none has a newer one, one has (newer), one does not answer (silent).",
    "found",
)
cluster_marked = _counter(
    "meshd_cluster_marked_total", "Nodes that this node had marked in the map, by their new state.", "state"
)

# replication
replication_facts = _counter(
    "meshd_replication_facts_total", "Facts that other nodes took from this one, by what they are.", "what"
)
replication_seconds = _histogram(
    "meshd_replication_seconds", "From the commit here until every node that must have a write has it."
)
replication_bytes = _counter("meshd_replication_bytes_total", "Bytes of objects and parts sent to replicas.")
replication_retries = _counter(
    "meshd_replication_retries_total", "Tries to replicate a fact that failed, by why.", "why"
)
replication_ceded = _counter(
    "meshd_replication_ceded_total",
    "Writes received here that another node decides about by now; decided there, or asked for again.",
    "result",
)
replication_handovers = _counter(
    "meshd_replication_handovers_total",
    "Names that a former decider was asked to hand over, after a newer map; what came of it.",
    "result",
)
replication_given_up = _counter(
    "meshd_replication_given_up_total",
    "Writes not done because the node they came through, or this one, was marked away since.",
)
replication_refused = _counter(
    "meshd_replication_refused_total", "Writes answered with 503: not all nodes that must have them did."
)
replication_behind = _gauge(
    "meshd_replication_behind", "Writes committed here that not every node that must have them has."
)
replica_facts = _counter(
    "meshd_replica_facts_total", "Facts that this node took from others; changed is yes or no.", "changed"
)

# batches and transforms
batch_rows_served = _counter("meshd_batch_rows_served_total", "Rows of batches sent to clients.")
transform_samples = _counter("meshd_transform_samples_total", "Samples a transform worked on.", "op")
transform_seconds = _histogram("meshd_transform_seconds", "Transform time of one slice of rows.")
transform_failures = _counter("meshd_transform_failures_total", "Samples no transform could read.", "op")
op_calls = _counter("meshd_op_calls_total", "Samples an op (or several in one step) worked on.", "op")
op_seconds = _counter("meshd_op_seconds_total", "Time an op took.", "op")
op_bytes = _counter(
    "meshd_op_bytes_total", "Bytes of the values an op took (in) and made (out).", "op", "direction"
)
op_cache_hits = _counter("meshd_op_cache_hits_total", "Samples an op was spared: the result was kept.", "op")
user_op_processes = _counter(
    "meshd_user_op_processes_total",
    "Processes for users' ops: started, and those that ended by crash, time, memory or nonsense.",
    "event",
)
origin_bytes = _counter("meshd_origin_bytes_total", "Bytes moved; direction is read or written.", "direction")
origin_errors = _counter(
    "meshd_origin_errors_total",
    "Requests that an origin did not answer as it should, or was not asked while it is down.",
)
origin_fetches = _counter("meshd_origin_fetches_total", "Objects and chunks read from origins.")
origin_lent_bytes = _counter(
    "meshd_origin_lent_bytes_total",
    "Bytes that another node gave instead of an origin.",
)
origin_lends = _counter(
    "meshd_origin_lends_total", "Questions to other nodes for a piece of an origin; given or none.", "result"
)
origin_joined = _counter("meshd_origin_joined_total", "Readers that shared another's fetch.")
origin_checks = _counter("meshd_origin_checks_total", "Questions to origins whether something changed.")
origin_passed = _counter(
    "meshd_origin_passed_total",
    "Writes and removals that another node brought to an origin, for it decides by now; push or remove.",
    "what",
)
origin_unanswered = _counter(
    "meshd_origin_unanswered_total",
    "Reads that were given what is cached because the origin did not say in time whether it is still so.",
)
cache_reads = _counter(
    "meshd_cache_reads_total",
    "Objects and chunks read of backed buckets; result is hit or miss.",
    "result",
)
cache_bytes = _gauge("meshd_cache_bytes", "Bytes of the cache, dead ones included.", mode="mostrecent")
cache_capacity = _gauge("meshd_cache_capacity_bytes", "Bytes the cache may keep.", mode="mostrecent")
cache_evicted = _counter("meshd_cache_evicted_bytes_total", "Bytes evicted.")
cache_plans = _gauge("meshd_cache_plans", "Plans whose next reads the cache knows.", mode="mostrecent")
cache_refused = _counter(
    "meshd_cache_refused_total", "What was read past the cache, which keeps what it has."
)
origin_dirty = _gauge("meshd_origin_dirty_objects", "Objects not at their origin yet.", mode="mostrecent")
transform_queue = _gauge("meshd_transform_queue_rows", "Rows waiting for a transform process.")
gather_items = _counter("meshd_gather_items_total", "Gathered items looked up; ok or the error.", "result")
archives = _counter(
    "meshd_archives_total", "Archives looked into; result is indexed, inflated or refused.", "kind", "result"
)
remote_failures = _counter(
    "meshd_remote_failures_total", "Calls for what other nodes hold that failed, by how.", "error"
)
remote_bytes = _counter("meshd_remote_bytes_total", "Bytes of objects fetched from other nodes.")
reads_continued = _counter(
    "meshd_reads_continued_total",
    "Answers under way whose bytes ended here: whole by way of another node, of the origin, or of making a "
    "view's object again, or cut.",
    "result",
)
near_reads = _counter(
    "meshd_near_reads_total",
    "Parts of objects and batches looked for among this node's copies; kind is part or frame, result hit or "
    "miss.",
    "kind",
    "result",
)
near_refused = _counter("meshd_near_refused_total", "Copies that were not kept.")
frames = _counter("meshd_frames_total", "Batch frames asked for; result is hit, joined or miss.", "result")
asset_bytes = _counter("meshd_asset_bytes_total", "Bytes of assets taken in for plans and views.")
samples_evaluated = _counter(
    "meshd_samples_evaluated_total", "Samples an expression of a filter or a join was evaluated on."
)
samples_measured = _counter("meshd_samples_measured_total", "Samples rendered to measure them for packing.")
view_results = _counter(
    "meshd_view_results_total", "Results of views asked for; hit or miss.", "result", "view"
)
view_results_evicted = _counter("meshd_view_results_evicted_total", "Results removed to make room.")
view_result_bytes = _gauge("meshd_view_result_bytes", "Results of views on the disks.", mode="mostrecent")
documents_collected = _counter(
    "meshd_documents_collected_total",
    "Documents that nobody used any more, removed; kind is snapshots, plans, assets, packs, or, of this node "
    "alone, bad, lengths, lines, tfrecords, mds or parquet.",
    "kind",
)
documents = _gauge(
    "meshd_documents",
    "Documents this node has; kind is snapshots, plans, assets or packs.",
    "kind",
    mode="mostrecent",
)
documents_cleared = _counter(
    "meshd_documents_cleared_total", "Copies taken away here of documents that were removed from the mesh."
)
document_bytes = _gauge("meshd_document_bytes", "Their bytes.", "kind", mode="mostrecent")
documents_waiting = _gauge(
    "meshd_documents_waiting",
    "1 while no document is removed because a node of the mesh cannot be asked when it used which.",
    mode="mostrecent",
)
view_layouts = _counter(
    "meshd_view_layouts_total", "Scans of the sources of shard views; result is made or same.", "result"
)
view_layout_seconds = _counter("meshd_view_layout_seconds_total", "Time that scans and layouts of them took.")
# what loaders report of themselves; loader is a name of theirs
loader_samples = _counter("meshd_loader_samples_total", "Rows handed to training loops.", "loader")
loader_seconds = _counter("meshd_loader_seconds_total", "Time of training loops.", "loader")
loader_waited = _counter(
    "meshd_loader_waited_seconds_total", "Time that training loops waited for a batch.", "loader"
)
loader_stalls = _counter(
    "meshd_loader_stall_seconds_total",
    "The same by what was waited for: network, preprocessing or fetch.",
    "loader",
    "stage",
)
frames_handed = _counter(
    "meshd_frames_handed_total", "Batch frames given to jobs on this host as shared memory, not sent."
)
frames_handed_bytes = _gauge("meshd_frames_handed_bytes", "Shared memory in the hands of such jobs.")
frame_cache_bytes = _gauge("meshd_frame_cache_bytes", "Shared memory held by finished batches.")

# jobs; state is done, failed or cancelled
jobs_running = _gauge("meshd_jobs_running", "Jobs at work.", mode="mostrecent")
jobs_waiting = _gauge("meshd_jobs_waiting", "Jobs that wait for their turn.", mode="mostrecent")
jobs_ended = _counter("meshd_jobs_ended_total", "Jobs that came to an end.", "state")
job_bytes = _counter("meshd_job_bytes_total", "Bytes of outputs written by jobs.")
job_outputs = _counter("meshd_job_outputs_total", "Outputs of jobs; written or there.", "result")
job_failures = _counter("meshd_job_failures_total", "Sources that jobs could not read, and skipped.")

# store, as the steward measures it
store_objects = _gauge("meshd_store_objects", "Objects in the store.", mode="mostrecent")
store_versions = _gauge("meshd_store_versions", "Older versions and delete markers.", mode="mostrecent")
store_uploads = _gauge("meshd_store_uploads", "Multipart uploads in progress.", mode="mostrecent")
store_live_bytes = _gauge("meshd_store_live_bytes", "Bytes in use, versions' too.", mode="mostrecent")
store_dead_bytes = _gauge("meshd_store_dead_bytes", "Bytes that compaction will win.", mode="mostrecent")
store_disk_free_bytes = _gauge("meshd_store_disk_free_bytes", "Free bytes.", "disk", mode="mostrecent")
store_disk_bytes = _gauge("meshd_store_disk_bytes", "Bytes the disk has.", "disk", mode="mostrecent")

# store, as each process works on it; kind is full or failed
store_commits = _counter("meshd_store_commits_total", "Groups of writes made durable together.")
store_writes = _counter("meshd_store_writes_total", "Requests in those groups, refused ones too.")
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
scrub_mended = _counter("meshd_scrub_mended_total", "Versions restored from another node.")
scrub_ended = _gauge(
    "meshd_scrub_ended_seconds", "End of the last whole pass, in seconds since 1970.", mode="mostrecent"
)
store_displaced = _counter(
    "meshd_store_displaced_total", "Writes that another disk of the node took: their own had no room."
)
store_disk_errors = _counter("meshd_store_disk_errors_total", "Errors of disks and of the index.", "kind")

# movement of data between nodes
moves_entered = _counter("meshd_moves_entered_total", "Versions, parts and facts fetched from other nodes.")
moves_bytes = _counter("meshd_moves_bytes_total", "Bytes fetched from other nodes to be kept here.")
moves_lacking = _gauge("meshd_moves_lacking", "What this node is known to lack.", mode="mostrecent")
moves_lacking_bytes = _gauge(
    "meshd_moves_lacking_bytes", "Bytes this node is known to lack.", mode="mostrecent"
)
moves_dropped = _counter("meshd_moves_dropped_total", "Names let go of, which other nodes own.")
moves_kept = _gauge(
    "meshd_moves_kept", "Names of others that stay until their owners have them.", mode="mostrecent"
)
moves_blocked = _gauge(
    "meshd_moves_blocked_slots", "Slots of which nobody who has all can be asked.", mode="mostrecent"
)
moves_pause = _gauge("meshd_moves_pause_seconds", "Of the mover, after half a MiB: while event loops wait.")
moves_rounds = _counter("meshd_moves_rounds_total", "Comparisons with all owners, each from end to end.")
moves_repaired = _counter("meshd_moves_repaired_total", "What regular comparisons found lacking.")

# lifecycle; action is expire (a current object), noncurrent, marker or upload
lifecycle_expired = _counter("meshd_lifecycle_expired_total", "What lifecycle rules removed.", "action")

# processes; role is worker, steward or transform
process_restarts = _counter("meshd_process_restarts_total", "Children that died and were replaced.", "role")
memory_bytes = _gauge("meshd_memory_bytes", "Memory there is, or the limit set for it.", mode="mostrecent")
memory_free_bytes = _gauge("meshd_memory_free_bytes", "What of it may still be taken.", mode="mostrecent")
process_memory_bytes = _gauge(
    "meshd_process_memory_bytes", "Memory that processes have for themselves.", "role", mode="mostrecent"
)
processes_up = _gauge("meshd_processes_up", "Children that are ready.", "role", mode="mostrecent")


def op_label(op: str) -> str:
    """An op's name as a label. Users may bring ops of their own: beyond so many names, the rest is one."""
    return _bounded_label("op", op)


def loader_label(name: str) -> str:
    """The same for the names loaders give themselves."""
    return _bounded_label("loader", name)


def view_label(name: str) -> str:
    """The same for views."""
    return _bounded_label("view", name)


def _bounded_label(kind: str, name: str) -> str:
    known = _names[kind]
    if name not in known:
        if len(known) >= _MAX_NAMES:
            return OTHER
        known.add(name)
    return name


def render_metrics() -> bytes:
    """All metrics as Prometheus text: of every process when a shared directory is set, else of this one."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return bytes(generate_latest(_registry))
    merged = CollectorRegistry()
    MultiProcessCollector(merged)
    with scrape_lock(_directory()):
        return bytes(generate_latest(merged))


def drop_dead_processes() -> None:
    """Drop the live gauges of processes that are gone; their counters stay in the sums. The supervisor's."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        merge_dead_processes(_directory())


def _directory() -> Path:
    return Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])

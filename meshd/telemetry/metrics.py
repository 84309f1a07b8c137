"""Every metric of the daemon. Names start with `meshd_`; units are seconds and bytes.

Labels are bounded and never a key, a bucket or a client.
"""

from __future__ import annotations

from meshd.telemetry.metric_registry import counter, gauge, histogram, latest_gauge

# HTTP: operation is the name of the S3 operation (or of a native route), status is the number as text
http_requests = counter("meshd_http_requests_total", "Requests answered.", "operation", "status")
http_seconds = histogram("meshd_http_request_seconds", "From request head to last byte.", "operation")
http_bytes = counter("meshd_http_bytes_total", "Body bytes; direction is in or out.", "direction")
http_connections = gauge("meshd_http_connections", "Open client connections.")
http_turned_away = counter(
    "meshd_http_turned_away_total",
    "Connections ended by the node: full, idle, slow handshake, slow head, stalled, refused body.",
    "why",
    zero=["full"],
)
forwarded = counter(
    "meshd_forwarded_total",
    "Requests forwarded; result is answered, misdirected, unreachable, skewed or broken.",
    "result",
    zero=["skewed"],
)
tls_not_after = latest_gauge(
    "meshd_tls_not_after_seconds", "End of the TLS certificate's validity, since 1970."
)
sts_exchanges = counter(
    "meshd_sts_exchanges_total",
    "Requests to exchange an identity provider's token for keys; result is ok or the error.",
    "result",
)
issuer_fetches = counter(
    "meshd_issuer_fetches_total",
    "Fetches of the keys of identity providers; result is ok or failed.",
    "result",
)
trace_spans = counter(
    "meshd_trace_spans_total",
    "Spans of traced requests: exported, dropped (the queue was full), or failed (the collector refused "
    "them, or did not answer).",
    "result",
)
audit_dropped = counter("meshd_audit_dropped_total", "Audit lines that could not be written.")

# the cluster
cluster_lease_held = latest_gauge("meshd_cluster_lease_held", "1 while this node holds its membership lease.")
cluster_map_version = latest_gauge("meshd_cluster_map_version", "Version of the cluster map.")
cluster_nodes = latest_gauge(
    "meshd_cluster_nodes", "Nodes in the cluster map that this node uses, by state.", "state"
)
cluster_rebalancing = latest_gauge(
    "meshd_cluster_rebalancing", "1 while data moves to the nodes that the cluster map assigns it to."
)
cluster_slots_short = latest_gauge("meshd_cluster_slots_short", "Slots with fewer copies than configured.")
cluster_names_short = latest_gauge(
    "meshd_cluster_names_short",
    "Objects with fewer copies than their bucket asks for, of those that this node is the primary of.",
)
cluster_slots_lost = latest_gauge(
    "meshd_cluster_slots_lost", "Slots without a reachable node that has all their data."
)
cluster_refused = latest_gauge(
    "meshd_cluster_certificates_refused", "Other nodes whose TLS certificates this node does not trust."
)
cluster_clock_ahead = latest_gauge(
    "meshd_cluster_clock_ahead_seconds",
    "Seconds by which this node's clock is ahead of the other nodes' (negative: behind).",
)
cluster_control_failures = counter(
    "meshd_cluster_control_failures_total", "Calls of the coordinator to the control store that failed."
)
cluster_read_barrier_checks = counter(
    "meshd_cluster_read_barrier_checks_total",
    "Read barriers: while the node's lease is not valid, reads first ask the other owners for their map "
    "version; none has a newer map, one has (newer), or one does not answer (silent).",
    "found",
)
cluster_marked = counter(
    "meshd_cluster_marked_total",
    "Changes of node states that this node made in the cluster map, by the new state.",
    "state",
)

# replication
replication_facts = counter(
    "meshd_replication_facts_total", "Changes that other nodes accepted from this one, by kind.", "what"
)
replication_seconds = histogram(
    "meshd_replication_seconds", "From the local commit of a write until every required replica has it."
)
replication_bytes = counter("meshd_replication_bytes_total", "Bytes of objects and parts sent to replicas.")
replication_retries = counter(
    "meshd_replication_retries_total", "Failed attempts to replicate a change, by reason.", "why"
)
replication_writes_forwarded = counter(
    "meshd_replication_writes_forwarded_total",
    "Writes received here and forwarded to the primary: done there, or sent again (retry).",
    "result",
)
replication_handovers = counter(
    "meshd_replication_handovers_total",
    "Names that a former primary was asked to hand over after a newer cluster map, by result.",
    "result",
)
replication_given_up = counter(
    "meshd_replication_given_up_total",
    "Writes abandoned because the receiving node, or this one, has been marked away since.",
)
replication_refused = counter(
    "meshd_replication_refused_total",
    "Writes answered with 503 or 507 because a required replica did not accept them.",
)
replication_behind = gauge(
    "meshd_replication_behind", "Writes committed here that a required replica still lacks."
)
replica_facts = counter(
    "meshd_replica_facts_total", "Changes received from other nodes; changed is yes or no.", "changed"
)

# batches and transforms
batch_rows_served = counter("meshd_batch_rows_served_total", "Rows of batches sent to clients.")
transform_samples = counter("meshd_transform_samples_total", "Samples that transforms processed.", "op")
transform_seconds = histogram("meshd_transform_seconds", "Transform time of one slice of rows.")
transform_failures = counter(
    "meshd_transform_failures_total", "Samples that transforms could not process.", "op"
)
op_calls = counter("meshd_op_calls_total", "Samples that an op (or several in one step) processed.", "op")
op_seconds = counter("meshd_op_seconds_total", "Time spent in an op.", "op")
op_bytes = counter(
    "meshd_op_bytes_total",
    "Bytes of the values that an op received (in) and returned (out).",
    "op",
    "direction",
)
op_cache_hits = counter("meshd_op_cache_hits_total", "Samples with a cached result of an op.", "op")
user_op_processes = counter(
    "meshd_user_op_processes_total",
    "Processes for users' ops: started, or ended by crash, time, memory or nonsense (invalid replies).",
    "event",
)
origin_bytes = counter(
    "meshd_origin_bytes_total",
    "Bytes exchanged with origins; read or written.",
    "direction",
    zero=["written"],
)
origin_errors = counter(
    "meshd_origin_errors_total", "Requests to an origin that failed, or were not sent because it is down."
)
origin_fetches = counter("meshd_origin_fetches_total", "Objects and chunks read from origins.")
peer_cache_bytes = counter(
    "meshd_peer_cache_bytes_total", "Bytes read from the cache of another node instead of an origin."
)
peer_cache_fetches = counter(
    "meshd_peer_cache_fetches_total",
    "Reads of origin data tried in the cache of another node first; hit or miss.",
    "result",
)
origin_joined = counter("meshd_origin_joined_total", "Reads that shared the fetch of another reader.")
origin_checks = counter("meshd_origin_checks_total", "Revalidation requests to origins.")
origin_passed = counter(
    "meshd_origin_passed_total",
    "Writes (push) and deletions (remove) received here and written back by the present primary.",
    "what",
)
origin_unanswered = counter(
    "meshd_origin_unanswered_total",
    "Reads answered from the cache because the origin did not revalidate the object in time.",
)
cache_reads = counter(
    "meshd_cache_reads_total", "Objects and chunks read of backed buckets; result is hit or miss.", "result"
)
cache_bytes = latest_gauge("meshd_cache_bytes", "Bytes that the cache uses, including dead ones.")
cache_capacity = latest_gauge("meshd_cache_capacity_bytes", "Capacity of the cache in bytes.")
cache_evicted = counter("meshd_cache_evicted_bytes_total", "Bytes evicted from the cache.")
cache_plans = latest_gauge("meshd_cache_plans", "Plans whose next reads are known to the cache.")
cache_refused = counter("meshd_cache_refused_total", "Objects and chunks that the cache did not admit.")
origin_dirty = latest_gauge("meshd_origin_dirty_objects", "Objects not written to their origin yet.")
transform_queue = gauge(
    "meshd_transform_queue_rows", "Rows of unfinished batches, with a transform process or waiting for one."
)
gather_items = counter(
    "meshd_gather_items_total", "Items of gather requests; result is ok or the error.", "result"
)
archives = counter(
    "meshd_archives_total", "Archives opened; result is indexed, inflated or refused.", "kind", "result"
)
remote_failures = counter(
    "meshd_remote_failures_total", "Failed reads of data of other nodes, by error.", "error"
)
sources_opened = counter(
    "meshd_sources_opened_total",
    "Sources that were opened: nothing in them had changed (known), some of their objects had (updated), or "
    "they were listed.",
    "result",
)
snapshot_pages = counter(
    "meshd_snapshot_pages_total", "Pages of shards: made here, or fetched from another node.", "result"
)
snapshot_pages_opened = counter(
    "meshd_snapshot_pages_opened_total",
    "Pages of snapshots that were opened for batches: ahead of them, or while a batch waited.",
    "when",
)
remote_bytes = counter("meshd_remote_bytes_total", "Bytes of objects fetched from other nodes.")
reads_continued = counter(
    "meshd_reads_continued_total",
    "Responses in progress whose local bytes became unreadable: completed from another node, from the origin "
    "or from a rebuilt view result, or cut.",
    "result",
)
near_cache_reads = counter(
    "meshd_near_cache_reads_total",
    "Look-ups in the near cache of a node without a store; kind is part or frame, result hit or miss.",
    "kind",
    "result",
)
near_cache_refused = counter("meshd_near_cache_refused_total", "Copies that the near cache did not admit.")
frames = counter("meshd_frames_total", "Batch frames requested; result is hit, joined or miss.", "result")
read_ahead_bytes = counter(
    "meshd_read_ahead_bytes_total",
    "Bytes that batches needed from rotational disks: read ahead in order, or cached before that.",
    "result",
)
read_ahead_seeks = counter(
    "meshd_read_ahead_seeks_total", "Reads ahead that did not continue the one before: movements of the arm."
)
read_ahead_samples = counter(
    "meshd_read_ahead_samples_total", "Samples whose bytes were read ahead from rotational disks."
)
read_ahead_seconds = counter(
    "meshd_read_ahead_seconds_total", "Time that rotational disks spent on reads ahead."
)
read_ahead_wait_seconds = counter(
    "meshd_read_ahead_wait_seconds_total", "Time that batches waited for reads ahead."
)
read_ahead_window_bytes = gauge(
    "meshd_read_ahead_window_bytes", "Page cache used by windows of upcoming batches."
)
cold_read_bytes = counter(
    "meshd_cold_read_bytes_total", "Bytes that large responses have read from rotational disks."
)
cold_read_seeks = counter(
    "meshd_cold_read_seeks_total",
    "Turns of such responses at a disk that did not continue the one before: movements of the arm.",
)
decoded_cache_bytes = latest_gauge("meshd_decoded_cache_bytes", "Bytes of decoded samples.")
decoded_cache_limit = latest_gauge(
    "meshd_decoded_cache_limit_bytes", "Present limit of the decoded cache in bytes."
)
decoded_cache_at_quota = latest_gauge(
    "meshd_decoded_cache_buckets_at_quota", "Buckets whose quota of the decoded cache is used up."
)
decoded_cache_stored = counter("meshd_decoded_cache_stored_bytes_total", "Bytes of decoded samples stored.")
decoded_cache_evicted = counter(
    "meshd_decoded_cache_evicted_bytes_total", "Bytes of decoded samples removed."
)
decoded_cache_saved = counter(
    "meshd_decoded_cache_cpu_seconds_saved_total", "CPU time of ops saved, less the time of reading."
)
decoded_cache_reads = counter(
    "meshd_decoded_cache_reads_total", "Decoded samples looked up; hit, miss or damaged.", "result"
)
decoded_cache_warmed = counter(
    "meshd_decoded_cache_warmed_total",
    "Samples of warm-ups; result is stored, there (already cached), left (no room) or bad.",
    "result",
)
asset_bytes = counter("meshd_asset_bytes_total", "Bytes of assets stored for plans and views.")
samples_evaluated = counter(
    "meshd_samples_evaluated_total", "Samples on which an expression of a filter or a join was evaluated."
)
samples_measured = counter("meshd_samples_measured_total", "Samples rendered to measure them for packing.")
view_results = counter(
    "meshd_view_results_total", "Results of views requested; result is hit or miss.", "result", "view"
)
view_results_evicted = counter("meshd_view_results_evicted_total", "Results of views evicted to make room.")
view_result_bytes = latest_gauge("meshd_view_result_bytes", "Bytes of results of views on the disks.")
documents_collected = counter(
    "meshd_documents_collected_total",
    "Unused documents that were removed; kind is snapshots, plans, assets, packs or, on this node "
    "only, bad, lengths, lines, tfrecords, mds, parquet, tables or opened.",
    "kind",
)
documents = latest_gauge(
    "meshd_documents", "Documents this node has; kind is snapshots, plans, assets or packs.", "kind"
)
documents_cleared = counter(
    "meshd_documents_cleared_total", "Local copies of documents removed after the mesh removed them."
)
documents_damaged = counter(
    "meshd_documents_damaged_total",
    "Indexes and results that were removed because they were damaged; they are made again when used.",
)
document_bytes = latest_gauge("meshd_document_bytes", "Bytes of documents on this node.", "kind")
documents_waiting = latest_gauge(
    "meshd_documents_waiting",
    "1 while no document is removed because a node cannot report which documents it used.",
)
view_layouts = counter(
    "meshd_view_layouts_total", "Scans of the sources of shard views; made (a new layout) or same.", "result"
)
view_layout_seconds = counter(
    "meshd_view_layout_seconds_total", "Time spent in scans and layouts of shard views."
)
frames_handed = counter(
    "meshd_frames_handed_total",
    "Batch frames handed to jobs on this host as shared memory instead of being sent.",
)
frame_series = counter(
    "meshd_frame_series_total",
    "Responses that contain the batches of several steps, which clients request when batches are small.",
)
frames_handed_bytes = gauge("meshd_frames_handed_bytes", "Shared memory of frames handed to jobs here.")
frame_cache_bytes = gauge("meshd_frame_cache_bytes", "Shared memory of finished batches.")
frame_cache_limit = latest_gauge(
    "meshd_frame_cache_limit_bytes", "Limit of the shared memory of finished batches."
)

# jobs; state is done, failed or cancelled
jobs_running = latest_gauge("meshd_jobs_running", "Running jobs.")
jobs_waiting = latest_gauge("meshd_jobs_waiting", "Jobs waiting to run.")
jobs_ended = counter("meshd_jobs_ended_total", "Jobs that ended.", "state", zero=["failed"])
job_bytes = counter("meshd_job_bytes_total", "Bytes of outputs written by jobs.")
job_outputs = counter("meshd_job_outputs_total", "Outputs of jobs; written or there.", "result")
job_failures = counter("meshd_job_failures_total", "Sources that jobs could not read and skipped.")
relayout_objects = counter(
    "meshd_relayout_objects_total", "Objects processed by relayouts; result is moved or damaged.", "result"
)
relayout_bytes = counter("meshd_relayout_bytes_total", "Bytes rewritten by relayouts.")

# store, as the coordinator measures it
store_objects = latest_gauge("meshd_store_objects", "Objects in the store.")
store_versions = latest_gauge("meshd_store_versions", "Older versions and delete markers.")
store_uploads = latest_gauge("meshd_store_uploads", "Multipart uploads in progress.")
store_live_bytes = latest_gauge("meshd_store_live_bytes", "Bytes in use, including older versions.")
store_dead_bytes = latest_gauge("meshd_store_dead_bytes", "Bytes that compaction will free.")
store_disk_free_bytes = latest_gauge("meshd_store_disk_free_bytes", "Free bytes of a disk.", "disk")
store_disk_bytes = latest_gauge(
    "meshd_store_disk_bytes", "Size of the disk in bytes: used and free, as in df.", "disk"
)
store_disk_refuses_writes = latest_gauge(
    "meshd_store_disk_refuses_writes", "1 if the disk is full but for its reserve, else 0.", "disk"
)
store_index_free_bytes = latest_gauge(
    "meshd_store_index_free_bytes",
    "Free bytes of the file system of --index-dir, if no disk is on it.",
    "disk",
)
store_index_file_system_bytes = latest_gauge(
    "meshd_store_index_file_system_bytes",
    "Size of that file system in bytes: used and free, as in df.",
    "disk",
)
store_index_map_free_bytes = latest_gauge(
    "meshd_store_index_map_free_bytes",
    "Bytes by which the index may grow before `index-map` is used up and writes are rejected.",
)
store_index_map_bytes = latest_gauge("meshd_store_index_map_bytes", "The setting `index-map`, in bytes.")
store_disk_rotational = latest_gauge(
    "meshd_store_disk_rotational", "1 if the disk is a rotational one, else 0.", "disk"
)

# store, as each process works on it; kind is full or failed
store_commits = counter("meshd_store_commits_total", "Group commits: writes synced together.")
store_writes = counter("meshd_store_writes_total", "Writes in group commits, including refused ones.")
store_written_bytes = counter("meshd_store_written_bytes_total", "Bytes committed to data files.")
store_sync_seconds = histogram("meshd_store_sync_seconds", "Time of one fdatasync of a data file.")
store_checkpoints = counter(
    "meshd_store_checkpoints_total", "Checkpoints of a relaxed store: syncs of everything acknowledged."
)
store_unsynced_seconds = latest_gauge(
    "meshd_store_unsynced_seconds", "With durability relaxed: the age of what may not be on disk yet."
)
store_corrupt_reads = counter("meshd_store_corrupt_reads_total", "Reads of bytes that fail their checksum.")
store_quarantined = latest_gauge("meshd_store_quarantined", "Versions whose bytes on this node are damaged.")
store_damage = counter(
    "meshd_store_damage_total", "Versions and parts found damaged on a disk, repaired or not.", "disk"
)
store_disk_silent = latest_gauge(
    "meshd_store_disk_silent_seconds", "How long a disk has not answered; 0 while all do, within 15 s."
)
store_disks_lost = latest_gauge("meshd_store_disks_lost", "Disks that are out of service.")
quarantined = counter("meshd_quarantined_total", "Versions and parts that were put in quarantine.")
scrub_bytes = counter("meshd_scrub_bytes_total", "Bytes the scrub has compared with their checksums.")
scrub_passes = counter("meshd_scrub_passes_total", "Passes of the scrub over all data files.")
scrub_repaired = counter("meshd_scrub_repaired_total", "Damaged versions restored from another node.")
scrub_ended = latest_gauge(
    "meshd_scrub_ended_seconds", "End of the last complete scrub, in seconds since 1970."
)
store_off_home_writes = counter(
    "meshd_store_off_home_writes_total",
    "Writes placed on another disk of the node because their home disk had no room.",
)
store_disk_errors = counter(
    "meshd_store_disk_errors_total", "Errors of disks and of the index.", "kind", zero=["failed"]
)

# rebalancing: data that moves between nodes
rebalance_applied = counter(
    "meshd_rebalance_applied_total", "Versions, parts and changes fetched from other nodes and applied."
)
rebalance_bytes = counter("meshd_rebalance_bytes_total", "Bytes fetched from other nodes and stored.")
rebalance_missing = latest_gauge("meshd_rebalance_missing", "Items known to be missing on this node.")
rebalance_missing_bytes = latest_gauge(
    "meshd_rebalance_missing_bytes", "Bytes known to be missing on this node."
)
rebalance_dropped = counter(
    "meshd_rebalance_dropped_total", "Names removed from this node because other nodes own them."
)
rebalance_retained = latest_gauge(
    "meshd_rebalance_retained", "Names that other nodes own and that stay here until their owners have them."
)
rebalance_blocked = latest_gauge(
    "meshd_rebalance_blocked_slots", "Slots without a reachable node that has all their data."
)
rebalance_pause = gauge(
    "meshd_rebalance_pause_seconds",
    "Pause of the rebalancer after each half MiB, while event loops are kept waiting.",
)
rebalance_rounds = counter("meshd_rebalance_rounds_total", "Complete comparisons with all other owners.")
rebalance_uncompared = latest_gauge(
    "meshd_rebalance_uncompared_nodes",
    "Other nodes that have started, and with which this node has not compared since.",
)
rebalance_repaired = counter(
    "meshd_rebalance_repaired_total", "Missing items that periodic comparisons found."
)

# lifecycle; action is expire (a current object), noncurrent, marker or upload
lifecycle_expired = counter(
    "meshd_lifecycle_expired_total", "Entries that lifecycle rules removed.", "action"
)

# processes; role is supervisor, worker, coordinator, transform or rebalancer
process_restarts = counter("meshd_process_restarts_total", "Processes that died and were replaced.", "role")
memory_bytes = latest_gauge("meshd_memory_bytes", "Memory of the machine, or the limit set for the node.")
memory_free_bytes = latest_gauge("meshd_memory_free_bytes", "Memory that may still be allocated.")
process_memory_bytes = latest_gauge(
    "meshd_process_memory_bytes", "Private memory of the node's processes.", "role"
)
cores = latest_gauge("meshd_cores", "CPU cores that the node may use.")
processes_up = latest_gauge("meshd_processes_up", "Processes of the node that are ready.", "role")

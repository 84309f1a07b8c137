"""Every alert fires when it should and stays quiet when it should not, says Prometheus's own promtool."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.monitoring.shipped_files import (
    ALERTS,
    DASHBOARDS,
    GROUPS,
    RECORDINGS,
    ROOT,
    RULES,
    exported_series,
    named_series,
    panel_expressions,
)
from tests.support.required import required_program

if TYPE_CHECKING:
    from pathlib import Path

needs_promtool = required_program("promtool", "apt install prometheus")
AT = 'instance="n1:9000"'
MESH = 'namespace="mesh", cluster="mesh"'
Series = dict[str, str]
_GROWS = "0+{}x240"  # by so much a minute, for four hours


def grows(step: float) -> str:
    return _GROWS.format(step)


# Alert → what fires it, and what looks alike and must not.
CASES: dict[str, tuple[Series, Series]] = {
    "ShardmeshNodeDown": (
        {f'up{{job="shardmesh", {AT}}}': "1x100 0x140"},
        {f'up{{job="shardmesh", {AT}}}': "1x100 0 1x140", 'up{job="other", instance="x"}': "0x240"},
    ),
    "ShardmeshNodeAway": (
        {
            f'meshd_cluster_nodes{{state="away", {AT}}}': "0x100 1x140",
            'meshd_cluster_nodes{state="away", instance="n2:9000"}': "0x240",
        },
        {
            f'meshd_cluster_nodes{{state="away", {AT}}}': "0x100 1 0x140",
            f'meshd_cluster_nodes{{state="up", {AT}}}': "3x240",
        },
    ),
    "ShardmeshDataUnavailable": (
        {f"meshd_cluster_slots_lost{{{AT}}}": "0x100 12x140"},
        {f"meshd_cluster_slots_lost{{{AT}}}": "0x240", f"meshd_cluster_slots_short{{{AT}}}": "9x240"},
    ),
    "ShardmeshCopiesMissing": (
        {f"meshd_cluster_slots_short{{{AT}}}": "0x100 512x140"},
        {f"meshd_cluster_slots_short{{{AT}}}": "0x200 512x20 0x20"},  # made again in time
    ),
    "ShardmeshControlStoreLost": (
        {f"meshd_cluster_lease_held{{{AT}}}": "1x100 0x140", f"meshd_cluster_map_version{{{AT}}}": "7x240"},
        {
            f"meshd_cluster_lease_held{{{AT}}}": "1x100 0 1x140",
            f"meshd_cluster_map_version{{{AT}}}": "7x240",
            'meshd_cluster_lease_held{instance="alone:9000"}': "0x240",
        },
    ),
    "ShardmeshMapsDiffer": (
        {
            f"meshd_cluster_map_version{{{AT}}}": "7x100 9x140",
            'meshd_cluster_map_version{instance="n2:9000"}': "7x240",
        },
        {
            f"meshd_cluster_map_version{{{AT}}}": "7x100 9x140",
            'meshd_cluster_map_version{instance="n2:9000"}': "7x101 9x139",
            'meshd_cluster_map_version{instance="alone:9000"}': "0x240",
            'meshd_cluster_map_version{instance="n1:9000",namespace="other",mesh="mesh"}': "3x240",
        },
    ),
    "ShardmeshMovementStuck": (
        {
            f"meshd_cluster_rebalancing{{{AT}}}": "0x100 1x140",
            f"meshd_rebalance_applied_total{{{AT}}}": "0+50x100 5000x140",
            f"meshd_rebalance_rounds_total{{{AT}}}": "3x240",
        },
        {
            f"meshd_cluster_rebalancing{{{AT}}}": "0x100 1x140",
            f"meshd_rebalance_applied_total{{{AT}}}": "0x240",
            f"meshd_rebalance_rounds_total{{{AT}}}": "3x240",
            'meshd_rebalance_applied_total{instance="n2:9000"}': grows(50),
            'meshd_rebalance_missing_bytes{instance="n2:9000"}': "90000-50x240",
        },
    ),
    "ShardmeshWritesRefused": (
        {f"meshd_replication_refused_total{{{AT}}}": grows(1)},
        {f"meshd_replication_refused_total{{{AT}}}": "4x240", f"meshd_replication_behind{{{AT}}}": "2x240"},
    ),
    "ShardmeshClocksDiffer": (
        {f'meshd_forwarded_total{{result="skewed", {AT}}}': grows(3)},
        {
            f'meshd_forwarded_total{{result="skewed", {AT}}}': "7x240",
            f'meshd_forwarded_total{{result="answered", {AT}}}': grows(50),
        },
    ),
    "ShardmeshClockDrifts": (
        {f"meshd_cluster_clock_ahead_seconds{{{AT}}}": "0x100 -90x140"},
        {
            f"meshd_cluster_clock_ahead_seconds{{{AT}}}": "0x100 90x4 0x140",  # set in time
            'meshd_cluster_clock_ahead_seconds{instance="n2:9000"}': "-59x240",
        },
    ),
    "ShardmeshCertificateRefused": (
        {f"meshd_cluster_certificates_refused{{{AT}}}": "0x100 1x140"},
        {f"meshd_cluster_certificates_refused{{{AT}}}": "0x100 1 0x140"},
    ),
    "ShardmeshOriginFails": (
        {
            f"meshd_origin_errors_total{{{AT}}}": grows(10),
            f"meshd_origin_fetches_total{{{AT}}}": grows(50),
            f"meshd_origin_checks_total{{{AT}}}": grows(50),
        },
        {
            f"meshd_origin_errors_total{{{AT}}}": grows(1),
            f"meshd_origin_fetches_total{{{AT}}}": grows(50),
            f"meshd_origin_checks_total{{{AT}}}": grows(50),
            'meshd_origin_errors_total{instance="quiet:9000"}': "5x240",
            'meshd_origin_fetches_total{instance="quiet:9000"}': "9x240",
            'meshd_origin_checks_total{instance="quiet:9000"}': "0x240",
        },
    ),
    "ShardmeshWriteBackStuck": (
        {
            f"meshd_origin_dirty_objects{{{AT}}}": "12x240",
            f'meshd_origin_bytes_total{{direction="written", {AT}}}': "77x240",
            f'meshd_origin_bytes_total{{direction="read", {AT}}}': grows(1000),
        },
        {
            f"meshd_origin_dirty_objects{{{AT}}}": "12x240",
            f'meshd_origin_bytes_total{{direction="written", {AT}}}': grows(1000),
            'meshd_origin_dirty_objects{instance="n2:9000"}': "0x240",
            'meshd_origin_bytes_total{direction="written", instance="n2:9000"}': "5x240",
        },
    ),
    "ShardmeshClusterUnavailable": (
        {f'mesh_operator_cluster_condition{{condition="Available", {MESH}}}': "1x100 0x140"},
        {
            f'mesh_operator_cluster_condition{{condition="Available", {MESH}}}': "1x100 0x3 1x140",
            f'mesh_operator_cluster_condition{{condition="Degraded", {MESH}}}': "0x240",
        },
    ),
    "ShardmeshClusterDegraded": (
        {f'mesh_operator_cluster_condition{{condition="Degraded", {MESH}}}': "0x100 1x140"},
        {
            f'mesh_operator_cluster_condition{{condition="Degraded", {MESH}}}': "0x100 1x20 0x120",
            f'mesh_operator_cluster_condition{{condition="Available", {MESH}}}': "1x240",
        },
    ),
    "ShardmeshClusterUnsettled": (
        {f'mesh_operator_cluster_condition{{condition="Settled", {MESH}}}': "1x10 0x230"},
        {f'mesh_operator_cluster_condition{{condition="Settled", {MESH}}}': "1x10 0x150 1x80"},
    ),
    "ShardmeshDaemonsMissing": (
        {
            f'mesh_operator_cluster_nodes{{what="ready", pool="s", {MESH}}}': "3x100 2x140",
            f'mesh_operator_cluster_nodes{{what="desired", pool="s", {MESH}}}': "3x240",
        },
        {
            f'mesh_operator_cluster_nodes{{what="ready", pool="s", {MESH}}}': "3x100 2x20 3x120",
            f'mesh_operator_cluster_nodes{{what="desired", pool="s", {MESH}}}': "3x240",
            f'mesh_operator_cluster_nodes{{what="updated", pool="s", {MESH}}}': "0x240",
        },
    ),
    "ShardmeshOperatorGone": (
        {
            'mesh_operator_leading{pod="o-1"}': "1x100 _x140",
            f'meshd_cluster_nodes{{state="up", {AT}}}': "3x240",
        },
        {
            'mesh_operator_leading{pod="o-1"}': "1x100 0x140",
            'mesh_operator_leading{pod="o-2"}': "0x100 1x140",
            f'meshd_cluster_nodes{{state="up", {AT}}}': "3x240",
        },
    ),
    "ShardmeshOperatorFails": (
        {
            'mesh_operator_passes_total{kind="MeshCluster", outcome="failed"}': grows(8),
            'mesh_operator_passes_total{kind="MeshCluster", outcome="done"}': grows(2),
        },
        {
            'mesh_operator_passes_total{kind="MeshCluster", outcome="failed"}': grows(2),
            'mesh_operator_passes_total{kind="MeshCluster", outcome="done"}': grows(8),
        },
    ),
    "ShardmeshDaemonStuck": (
        {f'mesh_operator_daemon_stuck{{pod="mesh-s-0", reason="Image", {MESH}}}': "_x100 1x140"},
        {f'mesh_operator_daemon_stuck{{pod="mesh-s-0", reason="Volume", {MESH}}}': "_x100 1x15 _x120"},
    ),
    "ShardmeshPodsNotAdmitted": (
        {'mesh_operator_admissions_total{result="failed"}': grows(1)},
        {
            'mesh_operator_admissions_total{result="failed"}': "3x240",
            'mesh_operator_admissions_total{result="patched"}': grows(5),
            'mesh_operator_unserved_pods_total{reason="KeyMisspelt"}': grows(5),  # their users are told
            'mesh_operator_pods_unserved{reason="KeyMisspelt", pod="o-1"}': "5x240",
            'mesh_operator_pods_unserved{reason="NotAdmitted", pod="o-1"}': "2x100 0x140",
            'mesh_operator_leading{pod="o-1"}': "1x240",
            # The next leader counts the pods; this one knows those of an hour ago.
            'mesh_operator_pods_unserved{reason="NotAdmitted", pod="o-2"}': "2x240",
            'mesh_operator_leading{pod="o-2"}': "1x50 0x190",
        },
    ),
    "ShardmeshProcessesMissing": (
        {f'meshd_processes_up{{role="coordinator", {AT}}}': "1x100 0x140"},
        {
            f'meshd_processes_up{{role="coordinator", {AT}}}': "1x240",
            f'meshd_processes_up{{role="transform", {AT}}}': "0x240",
        },
    ),
    "ShardmeshProcessesRestart": (
        {f'meshd_process_restarts_total{{role="worker", {AT}}}': grows(1)},
        {f'meshd_process_restarts_total{{role="worker", {AT}}}': grows(0.1)},
    ),
    "ShardmeshMemoryShort": (
        {
            f"meshd_memory_free_bytes{{{AT}}}": "40x100 4x140",
            f"meshd_memory_bytes{{{AT}}}": "100x240",
        },
        {
            f"meshd_memory_free_bytes{{{AT}}}": "6x200 4x4 6x36",
            f"meshd_memory_bytes{{{AT}}}": "100x240",
        },
    ),
    "ShardmeshErrors": (
        {
            f'meshd_http_requests_total{{operation="GetObject", status="200", {AT}}}': grows(900),
            f'meshd_http_requests_total{{operation="GetObject", status="500", {AT}}}': grows(100),
        },
        {
            f'meshd_http_requests_total{{operation="GetObject", status="200", {AT}}}': grows(900),
            f'meshd_http_requests_total{{operation="GetObject", status="404", {AT}}}': grows(500),
            f'meshd_http_requests_total{{operation="GetObject", status="503", {AT}}}': grows(1),
        },
    ),
    "ShardmeshSlowReads": (
        {
            f'meshd_http_request_seconds_bucket{{operation="GetObject", le="2.5", {AT}}}': grows(10),
            f'meshd_http_request_seconds_bucket{{operation="GetObject", le="10.0", {AT}}}': grows(100),
            f'meshd_http_request_seconds_bucket{{operation="GetObject", le="+Inf", {AT}}}': grows(100),
        },
        {
            f'meshd_http_request_seconds_bucket{{operation="GetObject", le="2.5", {AT}}}': grows(999),
            f'meshd_http_request_seconds_bucket{{operation="GetObject", le="10.0", {AT}}}': grows(1000),
            f'meshd_http_request_seconds_bucket{{operation="GetObject", le="+Inf", {AT}}}': grows(1000),
            f'meshd_http_request_seconds_bucket{{operation="PutObject", le="2.5", {AT}}}': grows(0),
            f'meshd_http_request_seconds_bucket{{operation="PutObject", le="+Inf", {AT}}}': grows(1000),
        },
    ),
    "ShardmeshClientsRefused": (
        {f'meshd_http_turned_away_total{{why="full", {AT}}}': grows(5)},
        {f'meshd_http_turned_away_total{{why="slow head", {AT}}}': grows(5)},
    ),
    "ShardmeshDiskFull": (
        {
            f'meshd_store_disk_free_bytes{{disk="/d", {AT}}}': "2x240",
            f'meshd_store_disk_bytes{{disk="/d", {AT}}}': "100x240",
            f'meshd_store_disk_refuses_writes{{disk="/d", {AT}}}': "0x240",
        },
        {
            f'meshd_store_disk_free_bytes{{disk="/d", {AT}}}': "4x240",
            f'meshd_store_disk_bytes{{disk="/d", {AT}}}': "100x240",
            f'meshd_store_disk_refuses_writes{{disk="/d", {AT}}}': "0x240",
        },
    ),
    "ShardmeshIndexFull": (
        {
            f'meshd_store_index_free_bytes{{disk="/i", {AT}}}': "4x240",
            f'meshd_store_index_file_system_bytes{{disk="/i", {AT}}}': "100x240",
        },
        {
            f'meshd_store_index_free_bytes{{disk="/i", {AT}}}': "6x240",
            f'meshd_store_index_file_system_bytes{{disk="/i", {AT}}}': "100x240",
            f'meshd_store_disk_free_bytes{{disk="/d", {AT}}}': "2x240",
            f'meshd_store_disk_bytes{{disk="/d", {AT}}}': "100x240",
            f"meshd_store_index_map_free_bytes{{{AT}}}": "6x240",
            f"meshd_store_index_map_bytes{{{AT}}}": "100x240",
        },
    ),
    "ShardmeshDiskFills": (
        {
            f'meshd_store_disk_free_bytes{{disk="/d", {AT}}}': "250-0.5x240",
            f'meshd_store_disk_bytes{{disk="/d", {AT}}}': "1000x240",
        },
        {
            f'meshd_store_disk_free_bytes{{disk="/d", {AT}}}': "900-0.5x240",  # but far from full
            f'meshd_store_disk_bytes{{disk="/d", {AT}}}': "1000x240",
        },
    ),
    "ShardmeshDiskErrors": (
        {f'meshd_store_disk_errors_total{{kind="failed", {AT}}}': grows(1)},
        {f'meshd_store_disk_errors_total{{kind="full", {AT}}}': grows(1)},
    ),
    "ShardmeshCorruptData": (
        {f"meshd_store_corrupt_reads_total{{{AT}}}": grows(1)},
        {f"meshd_store_corrupt_reads_total{{{AT}}}": "3x240"},
    ),
    "ShardmeshDiskLost": (
        {f"meshd_store_disks_lost{{{AT}}}": "0x100 1x140"},
        {f"meshd_store_disks_lost{{{AT}}}": "0x240"},
    ),
    "ShardmeshDiskHangs": (
        {f"meshd_store_disk_silent_seconds{{{AT}}}": "0x100 20+30x139"},
        {f"meshd_store_disk_silent_seconds{{{AT}}}": "0x240"},
    ),
    "ShardmeshDamagedData": (
        {f"meshd_store_quarantined{{{AT}}}": "0x100 3x140"},
        {
            f"meshd_store_quarantined{{{AT}}}": "0x100 3x3 0x137",  # mended
            'meshd_store_quarantined{instance="n2:9000"}': "0x100 9000-100x85 500-10x50",  # a lost disk
        },
    ),
    "ShardmeshDiskDecays": (
        {f'meshd_store_damage_total{{disk="/a", {AT}}}': "0x30 1x60 2x60 3x90"},
        {
            f'meshd_store_damage_total{{disk="/a", {AT}}}': "0x70 500x170",  # a burst
            f'meshd_store_damage_total{{disk="/b", {AT}}}': "0x70 1x80 2x90",
        },
    ),
    "ShardmeshSlowDisk": (
        {
            f'meshd_store_sync_seconds_bucket{{le="1.0", {AT}}}': grows(50),
            f'meshd_store_sync_seconds_bucket{{le="2.5", {AT}}}': grows(100),
            f'meshd_store_sync_seconds_bucket{{le="+Inf", {AT}}}': grows(100),
        },
        {
            f'meshd_store_sync_seconds_bucket{{le="1.0", {AT}}}': grows(1000),
            f'meshd_store_sync_seconds_bucket{{le="2.5", {AT}}}': grows(1001),
            f'meshd_store_sync_seconds_bucket{{le="+Inf", {AT}}}': grows(1001),
        },
    ),
    "ShardmeshCertificateExpires": (
        {f"meshd_tls_not_after_seconds{{{AT}}}": f"{10 * 86400}x240"},
        {
            f"meshd_tls_not_after_seconds{{{AT}}}": f"{30 * 86400}x240",
            'meshd_tls_not_after_seconds{instance="x"}': "0x240",
        },
    ),
    "ShardmeshCertificateEnds": (
        {f"meshd_tls_not_after_seconds{{{AT}}}": f"{3 * 3600}x240"},
        {
            f"meshd_tls_not_after_seconds{{{AT}}}": f"{10 * 86400}x240",
            'meshd_tls_not_after_seconds{instance="x"}': "0x240",
        },
    ),
    "ShardmeshAuditLost": (
        {f"meshd_audit_dropped_total{{{AT}}}": grows(2)},
        {f"meshd_audit_dropped_total{{{AT}}}": "7x240"},
    ),
    "ShardmeshTrainingStarves": (
        {
            f'meshd_loader_waited_seconds_total{{loader="resnet", {AT}}}': grows(20),
            f'meshd_loader_seconds_total{{loader="resnet", {AT}}}': grows(60),
        },
        {
            f'meshd_loader_waited_seconds_total{{loader="resnet", {AT}}}': grows(1),
            f'meshd_loader_seconds_total{{loader="resnet", {AT}}}': grows(60),
        },
    ),
    "ShardmeshTransformsQueue": (
        {
            f"meshd_transform_queue_rows{{{AT}}}": "60x240"
        },  # three jobs that starved at one process had so many
        {f"meshd_transform_queue_rows{{{AT}}}": "0 " + "9000x3 0 " * 60},
    ),
    "ShardmeshDisksSeek": (
        {
            f'meshd_read_ahead_bytes_total{{result="read", {AT}}}': grows(60 * 10e6),
            f"meshd_read_ahead_seconds_total{{{AT}}}": grows(58),
            f"meshd_read_ahead_wait_seconds_total{{{AT}}}": grows(240),
        },
        {
            # Busy and waited for, but in sequence.
            f'meshd_read_ahead_bytes_total{{result="read", {AT}}}': grows(60 * 180e6),
            f"meshd_read_ahead_seconds_total{{{AT}}}": grows(58),
            f"meshd_read_ahead_wait_seconds_total{{{AT}}}": grows(240),
            # It seeks, but in time.
            'meshd_read_ahead_bytes_total{result="read", instance="idle:9000"}': grows(3 * 10e6),
            'meshd_read_ahead_seconds_total{instance="idle:9000"}': grows(3),
            'meshd_read_ahead_wait_seconds_total{instance="idle:9000"}': grows(2),
            # No rotational disk.
            'meshd_read_ahead_bytes_total{result="read", instance="flash:9000"}': "0x240",
            'meshd_read_ahead_seconds_total{instance="flash:9000"}': "0x240",
            'meshd_read_ahead_wait_seconds_total{instance="flash:9000"}': "0x240",
        },
    ),
    "ShardmeshBatchesRefused": (
        {
            f'meshd_http_requests_total{{operation="GET /-/plans/", status="200", {AT}}}': grows(5),
            f'meshd_http_requests_total{{operation="GET /-/plans/", status="503", {AT}}}': grows(67),
        },
        {
            f'meshd_http_requests_total{{operation="GET /-/plans/", status="200", {AT}}}': grows(100),
            f'meshd_http_requests_total{{operation="GET /-/plans/", status="503", {AT}}}': grows(5),
            f'meshd_http_requests_total{{operation="GetObject", status="503", {AT}}}': grows(500),
        },
    ),
    "ShardmeshBadSamples": (
        {
            f'meshd_transform_failures_total{{op="decode", {AT}}}': grows(5),
            f'meshd_transform_samples_total{{op="row", {AT}}}': grows(100),
        },
        {
            f'meshd_transform_failures_total{{op="decode", {AT}}}': grows(1),
            f'meshd_transform_samples_total{{op="row", {AT}}}': grows(1000),
        },
    ),
    "ShardmeshUserOpsFail": (
        {f'meshd_user_op_processes_total{{event="crash", {AT}}}': grows(1)},
        {f'meshd_user_op_processes_total{{event="started", {AT}}}': grows(100)},
    ),
    "ShardmeshJobsFail": (
        {f'meshd_jobs_ended_total{{state="failed", {AT}}}': grows(1)},
        {f'meshd_jobs_ended_total{{state="cancelled", {AT}}}': grows(1)},
    ),
}


def test_every_alert_has_its_cases_and_its_runbook() -> None:
    assert set(CASES) == {each["alert"] for each in ALERTS}
    page = (ROOT / "docs" / "runbooks.md").read_text()
    assert {each["alert"] for each in ALERTS} == set(re.findall(r"^## (Shardmesh\w+)$", page, re.MULTILINE))


def test_an_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for each in ALERTS:
        assert each["labels"] == {"severity": each["labels"]["severity"]}
        assert each["labels"]["severity"] in ("critical", "warning")
        notes = each["annotations"]
        assert set(notes) == {"summary", "description", "runbook_url"}
        assert notes["runbook_url"].rpartition("#")[2] == each["alert"].lower()
        assert re.fullmatch(r"\d+[mhd]", each["for"])


def test_rules_name_only_metrics_that_exist() -> None:
    names = [each["record"] for each in RECORDINGS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z_]+:meshd_\w+:\w+", name) for name in names), "level:metric:operation"
    known = exported_series()
    for each in RECORDINGS:
        assert named_series(each["expr"]) <= known, each["record"]
    for each in ALERTS:
        assert named_series(each["expr"]) <= known | set(names), each["alert"]


def promtool(*words: str | Path) -> None:
    done = subprocess.run(
        ["promtool", *map(str, words)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_meshes_of_one_prometheus_are_kept_apart() -> None:
    """What is summed is summed for a node or for a mesh; the operator's series are of one operator."""
    for rule in (*RECORDINGS, *ALERTS):
        for labels in re.findall(r"\bby \(([^)]*)\)", rule["expr"]):
            apart = {"instance", "namespace"} & set(labels.split(", "))
            assert apart or "mesh_operator_" in rule["expr"], rule


@needs_promtool
def test_the_rules_are_rules() -> None:
    promtool("check", "rules", RULES)


# Other ways to fire.
MORE: list[tuple[str, Series]] = [
    ("ShardmeshPodsNotAdmitted", {'mesh_operator_unserved_pods_total{reason="NotAdmitted"}': grows(1)}),
    (  # they were created while no operator ran: the next one begins with them
        "ShardmeshPodsNotAdmitted",
        {
            'mesh_operator_unserved_pods_total{reason="NotAdmitted", pod="o-2"}': "_x100 2x140",
            'mesh_operator_pods_unserved{reason="NotAdmitted", pod="o-2"}': "_x100 2x140",
            'mesh_operator_leading{pod="o-2"}': "_x100 1x140",
        },
    ),
    (  # one node that others do not wait for
        "ShardmeshMovementStuck",
        {
            f"meshd_cluster_rebalancing{{{AT}}}": "0x100 1x140",
            f"meshd_rebalance_missing_bytes{{{AT}}}": "0x100 500x140",
            f"meshd_rebalance_applied_total{{{AT}}}": "3x240",
            'meshd_rebalance_applied_total{instance="n2:9000"}': grows(50),
            'meshd_rebalance_rounds_total{instance="n2:9000"}': grows(1),
            'meshd_rebalance_missing_bytes{instance="n2:9000"}': "90000-50x240",
        },
    ),
    (  # its setting, whatever space its file system has
        "ShardmeshIndexFull",
        {
            f"meshd_store_index_map_free_bytes{{{AT}}}": "4x240",
            f"meshd_store_index_map_bytes{{{AT}}}": "100x240",
        },
    ),
    (  # a mesh beside one that is a hundred times as busy, in the same Prometheus
        "ShardmeshSlowReads",
        {
            f'meshd_http_request_seconds_bucket{{operation="GetObject", le="{le}", namespace="{mesh}"}}': of
            for mesh, le, of in (
                ("slow", "2.5", grows(10)),
                ("slow", "10.0", grows(100)),
                ("slow", "+Inf", grows(100)),
                ("busy", "2.5", grows(100_000)),
                ("busy", "+Inf", grows(100_000)),
            )
        },
    ),
    (  # a job beside one of the same name on another mesh
        "ShardmeshTrainingStarves",
        {
            'meshd_loader_waited_seconds_total{loader="resnet", namespace="slow"}': grows(9),
            'meshd_loader_waited_seconds_total{loader="resnet", namespace="busy"}': grows(0),
            'meshd_loader_seconds_total{loader="resnet", namespace="slow"}': grows(60),
            'meshd_loader_seconds_total{loader="resnet", namespace="busy"}': grows(60),
        },
    ),
]


@needs_promtool
@pytest.mark.parametrize(("name", "fires"), MORE)
def test_it_fires_for_another_cause(tmp_path: Path, name: str, fires: Series) -> None:
    evaluate(tmp_path, name, [_case(fires, name, _severity(name))])


@needs_promtool
@pytest.mark.parametrize("name", sorted(CASES))
def test_it_fires_and_stays_quiet(tmp_path: Path, name: str) -> None:
    fires, quiet = CASES[name]
    evaluate(tmp_path, name, [_case(fires, name, _severity(name)), _case(quiet, name, None)])


def _severity(alert: str) -> str:
    return str(next(each["labels"]["severity"] for each in ALERTS if each["alert"] == alert))


def evaluate(tmp_path: Path, name: str, cases: list[dict[str, Any]]) -> None:
    """Have promtool evaluate an alert over these cases."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": _groups_of(name)}))
    document = {"rule_files": [str(rules)], "evaluation_interval": "30s", "tests": cases}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        promtool("test", "rules", path)


def _groups_of(alert: str) -> list[dict[str, Any]]:
    """Return the groups of the shipped rules with this alert alone and the recordings that it names: promtool
    evaluates 480 times whatever it is given."""
    by_name = {each["record"]: each["expr"] for each in RECORDINGS}
    used = named_series(next(each["expr"] for each in ALERTS if each["alert"] == alert)) & by_name.keys()
    while more := {name for one in used for name in named_series(by_name[one])} & by_name.keys() - used:
        used |= more
    return [
        group | {"rules": kept}
        for group in GROUPS
        if (
            kept := [
                rule for rule in group["rules"] if rule.get("alert") == alert or rule.get("record") in used
            ]
        )
    ]


def _case(series: Series, alert: str, severity: str | None) -> dict[str, Any]:
    """After four hours the alert is there, or is not. promtool compares all labels and annotations, so that
    those of a firing one come from the rule itself: only its being there is asked, by ALERTS."""
    query = f'count(ALERTS{{alertname="{alert}", alertstate="firing", severity="{severity}"}}) > bool 0'
    none = f'absent(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    asked = {"expr": query if severity else none, "eval_time": "3h55m"}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            asked
            | {
                "exp_samples": [
                    {
                        "labels": "{}" if severity else f'{{alertname="{alert}", alertstate="firing"}}',
                        "value": 1,
                    }
                ]
            }
        ],
    }


def test_recordings_are_used_by_their_names() -> None:
    """A recording that nobody uses is wasted work."""
    used = " ".join(each["expr"] for each in ALERTS)
    if DASHBOARDS:
        used += " ".join((*panel_expressions(may_be_empty=False), *panel_expressions(may_be_empty=True)))
    documented = (ROOT / "docs" / "monitoring.md").read_text()
    assert all(each["record"] in used or each["record"] in documented for each in RECORDINGS)

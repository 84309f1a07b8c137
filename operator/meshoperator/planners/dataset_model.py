"""Model of a MeshDataset: its bucket, sharing and origin, and its status. Pure.

Law: a dataset is used in its own namespace and in those its annotation names, nowhere else. Usage comes from
daemons; an unreported value is left out, not guessed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from meshoperator.planners.pod_admission import DatasetInfo
from meshoperator.resources import GROUP, MeshDatasetSpec, parse
from meshoperator.resources.spec_types import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshoperator.cluster_model import Cluster, Manifest
    from meshoperator.planners.placement_inputs import CopyLocation, Holding
    from meshoperator.planners.placement_migration import MigrationStep


SHARED: Final = f"{GROUP}/namespaces"
"""Annotation of a MeshDataset: comma-separated namespaces whose pods may also read it; `*`: all."""
_NEVER: Final = 10 * 365 * 86400.0


def dataset_location(spec: MeshDatasetSpec, name: str) -> tuple[str, str]:
    """Return the dataset's bucket and prefix in the mesh."""
    if spec.source.uri.startswith("mesh://"):
        parts = urlsplit(spec.source.uri)
        prefix = parts.path.lstrip("/")
        return parts.netloc, prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    return spec.bucket or name, ""


def dataset_mark(namespace: str, name: str) -> str:
    """Return the dataset's suffix in labels of Kubernetes nodes; unique across namespaces."""
    return f"{name}.{hashlib.sha256(f'{namespace}/{name}'.encode()).hexdigest()[:8]}"


def dataset_info(document: Manifest, cluster: Cluster) -> DatasetInfo:
    """Return what a training pod needs to know. Raises ResourceError."""
    metadata, spec = document["metadata"], parse(MeshDatasetSpec, document["spec"])
    bucket, prefix = dataset_location(spec, metadata["name"])
    identity = cluster.spec.auth.web_identity
    return DatasetInfo(
        metadata["name"],
        dataset_mark(metadata["namespace"], metadata["name"]),
        cluster.endpoint,
        bucket,
        prefix,
        spec.placement.near_pods,
        cluster.spec.s3.tls is not None,
        "" if identity is None else identity.audience,
        0 if identity is None else identity.token_seconds,
    )


def shared_with(document: Manifest, namespace: str) -> bool:
    """Return whether pods of a namespace may read the dataset."""
    metadata = document["metadata"]
    if metadata["namespace"] == namespace:
        return True
    said = (metadata.get("annotations") or {}).get(SHARED, "")
    return bool({"*", namespace} & {each.strip() for each in said.split(",")})


def origin_document(spec: MeshDatasetSpec, credentials: str, *, refresh: bool) -> dict[str, Any]:
    """Return the body of `PUT /-/buckets/NAME`. `refresh`: compare cached data with the source again.
    Training data is read-only: nothing is written to the source."""
    never = spec.refresh.policy == "Never"
    found: dict[str, Any] = {
        "url": spec.source.uri,
        "credentials": credentials,
        "write": "off",
        "immutable": never and not refresh,
        "ttl": 0.0 if refresh else _NEVER if never else float(spec.refresh.interval_seconds),
        "quota": parse_quantity(spec.quota) if spec.quota else 0,
        "pins": [""] if spec.placement.pin else [],
    }
    return found


def origin_changes(present: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an origin that differ from the wanted ones."""
    return {
        name: value
        for name, value in wanted.items()
        if name != "url" and (list(have) if isinstance(have := present.get(name), tuple) else have) != value
    }


_RUNS: Final = ("queued", "running", "cancelling")
PLANNING: Final = "Planning"
"""Reason of Placed while homes are being chosen; data loaded before that would have to move."""


@dataclass(frozen=True, slots=True)
class DatasetUsage:
    """Usage of a dataset. `source`: (objects, bytes) if known; `there`: bytes of one copy; `trouble`: the
    error of its last load; `hits`: percent of recent reads served from cache."""

    source: tuple[int, int] | None
    there: int
    loading: bool = False
    trouble: str = ""
    durable: bool = False
    hits: int | None = None

    @classmethod
    def from_holdings(
        cls,
        spec: MeshDatasetSpec,
        holdings: Sequence[Holding],
        job: Mapping[str, Any] | None,
        homes: Sequence[str] = (),
    ) -> DatasetUsage:
        """Sum up what daemons hold, with the last job that loaded everything. With homes each one holds a
        copy; without, each daemon holds a share."""
        held = sum(each.bytes for each in holdings)
        if homes:
            held = max((each.bytes for each in holdings if each.node in homes), default=0)
        if spec.source.uri.startswith("mesh://"):
            return cls((sum(each.objects for each in holdings), held), held, durable=True)
        hits = _percent(sum(each.hits for each in holdings), sum(each.misses for each in holdings))
        if job is None:
            return cls(None, held, hits=hits)
        progress = job["progress"]
        known = job["state"] == "done" or progress["phase"] not in ("", "planning", "listing")
        copies = progress.get("copies", 1)
        source = (progress["outputs_total"] // copies, progress["bytes_total"] // copies) if known else None
        trouble = job["error"]
        if job["failed"] and not trouble:
            first = job["failures"][0] if job["failures"] else {"name": "", "error": ""}
            trouble = f"{job['failed']} objects could not be loaded; first: {first['name']}: {first['error']}"
        running = job["state"] in _RUNS
        return cls(source, held, running, "" if running else trouble, hits=hits)


def _percent(hits: int, misses: int) -> int | None:
    return 100 * hits // (hits + misses) if hits + misses else None


def prefetches(jobs: Sequence[Mapping[str, Any]], bucket: str) -> list[dict[str, Any]]:
    """Return the jobs that load a whole bucket, latest first."""
    found = [
        dict(job)
        for job in jobs
        if job["kind"] == "prefetch"
        and job["spec"].get("source") == f"s3://{bucket}/"
        and not job["spec"].get("keys")
        and not job["spec"].get("manifest")
    ]
    return sorted(found, key=lambda job: -job["created_ms"])


def dataset_status(
    spec: MeshDatasetSpec,
    figures: DatasetUsage,
    spots: Sequence[CopyLocation],
    unplaced: str,
    migration: MigrationStep | None = None,
) -> dict[str, Any]:
    """Return status fields and conditions as (type, whether, reason, message). `migration`: that of its
    copies, None without a plan."""
    source_bytes = figures.source[1] if figures.source else None
    warm = figures.durable or (source_bytes is not None and figures.there >= source_bytes)
    conditions: list[tuple[str, bool | None, str, str]] = [
        ("SourceReachable", True, "Answers", "the source is readable"),
        _placement_condition(spots, unplaced, migration, durable=figures.durable),
        _warm(spec, figures, warm=warm),
        (
            "Healthy",
            not figures.trouble,
            "LoadFailed" if figures.trouble else "AllWell",
            figures.trouble or "no problem is known",
        ),
    ]
    status: dict[str, Any] = {
        "phase": _phase(figures, unplaced, migration, lacking=spec.placement.pin and not warm),
        "cachedBytes": figures.there,
        "hitPercent": figures.hits,
        "conditions": conditions,
        "placement": [
            {"node": spot.node, "bytes": spot.bytes, "reason": spot.reason[:1024]} for spot in spots[:4096]
        ],
    }
    if figures.source is not None:
        status |= {"objects": figures.source[0], "sourceBytes": figures.source[1]}
    return status


def _phase(figures: DatasetUsage, unplaced: str, migration: MigrationStep | None, *, lacking: bool) -> str:
    """Summarize. `lacking`: it is pinned, and no home is known to have all of it."""
    if figures.trouble:
        return "Degraded"
    if figures.loading:
        return "Loading"
    if migration is not None and (unplaced or migration.moving or not migration.homes):
        return "Placing"
    return "Loading" if lacking and figures.source is not None else "Ready"


def _placement_condition(
    spots: Sequence[CopyLocation], unplaced: str, migration: MigrationStep | None, *, durable: bool
) -> tuple[str, bool | None, str, str]:
    if durable:
        return "Placed", True, "LivesHere", "its copies are where the cluster map places them"
    if migration is None:
        nobody = "not planned: the operator may not read nodes. Objects are spread over all storing daemons"
        return "Placed", None, "NotPlanned", nobody
    if unplaced:
        return "Placed", False, "NoRoom", unplaced
    if not migration.homes:
        return "Placed", None, PLANNING, "no placement plan has been made yet"
    if migration.moving:
        there = {spot.node: spot.bytes for spot in spots}
        come = ", ".join(f"{node} has {there.get(node, 0)} bytes" for node in migration.behind)
        stay = ", ".join(
            f"{node} ({f'{there[node]} bytes' if node in there else 'does not answer'})"
            for node in migration.leaving
        )
        return (
            "Placed",
            False,
            "Moving",
            f"{come or 'waiting for the other copies'}; until then {stay} keeps its copy",
        )
    return "Placed", True, "Planned", f"kept on {', '.join(migration.homes)}"


def _warm(spec: MeshDatasetSpec, figures: DatasetUsage, *, warm: bool) -> tuple[str, bool | None, str, str]:
    if figures.durable:
        return "Warm", True, "LivesHere", "it is stored in the mesh"
    progress = f"{figures.there} of {figures.source[1]} bytes" if figures.source else f"{figures.there} bytes"
    if warm:
        return "Warm", True, "Cached", f"{progress} cached"
    if figures.loading:
        return "Warm", False, "Loading", f"{progress} cached"
    if spec.placement.pin:
        return "Warm", False, "Incomplete", f"{progress} cached"
    by = "reads, a MeshLoad or placement.pin load it"
    return "Warm", None if figures.source is None else False, "NotLoaded", f"{progress} cached; {by}"

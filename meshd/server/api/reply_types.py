"""Types of replies of the native API, for its OpenAPI document and the console's types.

The services make plain documents; a test converts real replies to these types. A reply may have further
members.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object."""


class StoredDocument(Reply, frozen=True, kw_only=True):
    """What is known of a stored document. Times are in milliseconds since 1970; `expires_ms` is null if it
    stays."""

    hash: str
    buckets: list[str]
    bytes: int
    nodes: int
    used_ms: int
    expires_ms: int | None
    kept_by: list[str]


class StoredPlan(StoredDocument, frozen=True, kw_only=True):
    """A plan in a listing."""

    snapshot: str
    samples: int
    ops: list[str]


class StoredSnapshot(StoredDocument, frozen=True, kw_only=True):
    """A snapshot in a listing."""

    source: str
    kind: str


class Plans(Reply, frozen=True, kw_only=True):
    """A page of plans; `next` is empty on the last one."""

    plans: list[StoredPlan]
    next: str
    silent: list[str]


class Snapshots(Reply, frozen=True, kw_only=True):
    """A page of snapshots; `next` is empty on the last one."""

    snapshots: list[StoredSnapshot]
    next: str
    silent: list[str]


class FieldStatistics(Reply, frozen=True, kw_only=True):
    """A field of a snapshot. Of a label: the number of `classes` and `counts` as [class, samples]. Of bytes:
    a `histogram` as [lowest size, samples]."""

    kind: Literal["bytes", "label"]
    dtype: str | msgspec.UnsetType = msgspec.UNSET
    shape: list[int] | msgspec.UnsetType = msgspec.UNSET
    classes: int | msgspec.UnsetType = msgspec.UNSET
    counts: list[tuple[str, int]] | msgspec.UnsetType = msgspec.UNSET
    bytes: int | msgspec.UnsetType = msgspec.UNSET
    least: int | msgspec.UnsetType = msgspec.UNSET
    most: int | msgspec.UnsetType = msgspec.UNSET
    histogram: list[tuple[int, int]] | msgspec.UnsetType = msgspec.UNSET


class Statistics(Reply, frozen=True, kw_only=True):
    """Statistics of a snapshot."""

    snapshot: str
    source: str
    kind: str
    samples: int
    shards: int
    objects: int
    bytes: int
    buckets: list[str]
    fields: dict[str, FieldStatistics]


class PlanDescription(Reply, frozen=True, kw_only=True):
    """A plan with its spec."""

    plan: str
    snapshot: str
    spec: dict[str, Any]


class BadSample(Reply, frozen=True, kw_only=True):
    """A sample that an op could not use."""

    key: str
    op: str
    error: str
    position: int
    epoch: int
    times: int


class RowLabel(Reply, frozen=True, kw_only=True):
    """The class of a row: its number and its name."""

    value: int
    class_: str = msgspec.field(name="class")


class RowPlace(Reply, frozen=True, kw_only=True):
    """The bytes that a field of a row is made of; `size` is that of the whole object."""

    bucket: str
    key: str
    offset: int
    length: int
    size: int


class RowSource(Reply, frozen=True, kw_only=True):
    """The sample behind a row; labels and bytes by field."""

    position: int
    sample: int
    name: str
    pad: bool
    labels: dict[str, RowLabel]
    sources: dict[str, RowPlace]


class Sources(Reply, frozen=True, kw_only=True):
    """The samples behind the rows of a batch; `steps` and `samples` of the epoch."""

    steps: int
    samples: int
    rows: list[RowSource]


class Movement(Reply, frozen=True, kw_only=True):
    """Where an op moved an image: `corners` of the result in its input as [x, y], left upper, right upper,
    right lower, left lower."""

    height: int
    width: int
    corners: list[tuple[float, float]]
    mirrored: bool
    degrees: float


class DrawnOp(Reply, frozen=True, kw_only=True):
    """What an op drew for a row. `moved` is null if the image stayed as it was."""

    index: int
    op: str
    field: str
    drawn: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    moved: Movement | msgspec.UnsetType | None = msgspec.UNSET
    note: str | msgspec.UnsetType = msgspec.UNSET


class Size(Reply, frozen=True, kw_only=True):
    """In pixels."""

    height: int
    width: int


class ShownPart(Size, frozen=True, kw_only=True):
    """Which part of its source an image of a row shows."""

    source: Size
    corners: list[tuple[float, float]]


class Draws(Reply, frozen=True, kw_only=True):
    """What the ops drew for a row."""

    sample: int
    position: int
    ops: list[DrawnOp]
    images: dict[str, ShownPart]


class TablePreview(Reply, frozen=True, kw_only=True):
    """The first rows of a table: `columns` as [name, type], without `hidden` further ones."""

    columns: list[tuple[str, str]]
    hidden: int
    rows: list[list[str | None]]


class View(Reply, frozen=True, kw_only=True):
    """A view on the objects of a bucket."""

    name: str
    bucket: str
    owner: str
    created_ms: int
    view: dict[str, Any]


class Views(Reply, frozen=True, kw_only=True):
    """Views, sorted by name."""

    views: list[View]


class Op(Reply, frozen=True, kw_only=True):
    """An op of the library."""

    op: str
    version: str
    summary: str
    takes: str
    gives: str
    arguments: list[str]


class Ops(Reply, frozen=True, kw_only=True):
    """The op library."""

    ops: list[Op]


class ModuleBuild(Reply, frozen=True, kw_only=True):
    """A pushed content of a module."""

    version: str
    source: str
    pushed_ms: int
    pushed_by: str
    ops: list[str]
    draft: bool


class Module(Reply, frozen=True, kw_only=True):
    """A module with its builds, latest first."""

    module: str
    version: str
    builds: list[ModuleBuild]


class Modules(Reply, frozen=True, kw_only=True):
    """Modules, sorted by name."""

    modules: list[Module]


class TrialResult(Reply, frozen=True, kw_only=True):
    """What became of one object: the `result` in Base64, or an `error` with its `code` and op."""

    sample: str
    code: str | msgspec.UnsetType = msgspec.UNSET
    op: str | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType = msgspec.UNSET
    size: int | msgspec.UnsetType = msgspec.UNSET
    seconds: float | msgspec.UnsetType = msgspec.UNSET
    repeats: bool | msgspec.UnsetType = msgspec.UNSET
    result: str | msgspec.UnsetType = msgspec.UNSET


class Trial(Reply, frozen=True, kw_only=True):
    """A trial of ops; `output` is the type of the results."""

    output: str
    results: list[TrialResult]


class JobProgress(Reply, frozen=True, kw_only=True):
    """How far a job is; `rate` in bytes per second."""

    bytes: int
    bytes_total: int
    rate: float


class JobFailure(Reply, frozen=True, kw_only=True):
    """A source that a job could not read."""

    name: str
    error: str


class Job(Reply, frozen=True, kw_only=True):
    """A bulk job; `spec` is what was asked for, and `eta_s` is null while it is unknown."""

    id: str
    kind: str
    state: str
    owner: str
    node: str
    spec: dict[str, Any]
    created_ms: int
    progress: JobProgress
    eta_s: float | None
    failed: int
    failures: list[JobFailure]
    error: str


class Jobs(Reply, frozen=True, kw_only=True):
    """The jobs of the caller, or all for root."""

    jobs: list[Job]


class LoaderActivity(Reply, frozen=True, kw_only=True):
    """What a loader reports: seconds of its loop and of waiting, by cause; `epochs` is how far its loop is in
    the data, `epochs_requested` what it has requested; `user` is whose key it has."""

    samples: float
    seconds: float
    waited: float
    epochs: float
    epochs_requested: float
    epoch_samples: float
    stalls: dict[str, float]
    plan: str
    user: str


class PlanActivity(Reply, frozen=True, kw_only=True):
    """What a plan costs a node: rows that were rendered, their processor seconds and seconds of reading;
    samples that were `read_ahead` with so many `seeks`; frames that were `made`, and requests that `shared`
    one."""

    rows: float
    cpu: float
    reading: float
    seeks: float
    read_ahead: float
    made: float
    shared: float


class NodeActivity(Reply, frozen=True, kw_only=True):
    """What a node counts; `time` in milliseconds since 1970."""

    time: int
    totals: dict[str, float]
    gauges: dict[str, float]
    loaders: dict[str, LoaderActivity]
    plans: dict[str, PlanActivity] | msgspec.UnsetType = msgspec.UNSET
    disks: dict[str, dict[str, float]] | msgspec.UnsetType = msgspec.UNSET
    history: dict[str, list[float]] | msgspec.UnsetType = msgspec.UNSET


class Activity(Reply, frozen=True, kw_only=True):
    """What the nodes count, by node; `silent` ones did not answer."""

    node: str
    nodes: dict[str, NodeActivity]
    silent: list[str]


class ClusterNode(Reply, frozen=True, kw_only=True):
    """A node of the mesh."""

    id: str
    state: str
    leaving: bool
    endpoint: str
    zone: str
    rack: str
    roles: list[str]
    silent: bool
    absent: bool
    refused: str
    only_copies: bool


class Rebalance(Reply, frozen=True, kw_only=True):
    """What moves between the nodes."""

    bytes_total: int
    bytes_moved: int
    eta_seconds: int | None
    takers: list[str]
    blocked_by: str


class Cluster(Reply, frozen=True, kw_only=True):
    """The mesh as a node sees it."""

    node: str
    version: int
    copies: int
    rebalancing: bool
    rebalance: Rebalance
    under_replicated: int
    control: str
    clocks_agree: bool
    nodes: list[ClusterNode]


class Residence(Reply, frozen=True, kw_only=True):
    """Objects of a bucket on a node; with an origin, recent reads that found them there or did not."""

    node: str
    bucket: str
    cached: bool
    objects: int
    bytes: int
    partial: bool
    used: int
    capacity: int
    hits: int | msgspec.UnsetType = msgspec.UNSET
    misses: int | msgspec.UnsetType = msgspec.UNSET
    idle_s: int | msgspec.UnsetType = msgspec.UNSET

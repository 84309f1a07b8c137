"""Client of the daemon's native API: snapshots, plans, frames, rows and the bad-sample ledger.

Law: every response becomes a frozen value. Every call is idempotent, and any node gives the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from meshsdk.client.request import Request, json_request
from meshsdk.earlier_paths import earlier_names
from meshsdk.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshsdk.client.transport import Transport
    from meshwire.dataset.paged_columns import Page
    from meshwire.dataset.paged_snapshot import PagedSnapshot
    from meshwire.dataset.snapshot import Snapshot


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """A field of a snapshot.

    Attributes:
        kind: "bytes" or "label".
        classes: for a label, the class name of each value 0, 1, …; else empty.
        dtype, shape: of a column of a table, in which form its values are delivered; shape has None for an
            extent that differs between samples. "" and () for other fields.
    """

    kind: str
    classes: tuple[str, ...] = ()
    dtype: str = ""
    shape: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A pinned list of objects.

    Attributes:
        hash: identifies the snapshot; equal content has an equal hash.
        source: the URL that was pinned.
        samples, shards, objects: how many the snapshot has.
        bytes: total size of the objects.
        fields: the fields of a sample, by name (FieldInfo).
        skipped: number of keys without a sample, because a field is missing.
        examples: the first few of them, with what they lack.
        kind: how the source was read: "objects", "tar", "lines" …; "" if the node does not report it.
    """

    hash: str
    source: str
    samples: int
    shards: int
    objects: int
    bytes: int
    fields: Mapping[str, FieldInfo]
    skipped: int = 0
    kind: str = ""
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldSchema:
    """The type of a field in a row.

    Attributes:
        dtype: name of the numpy dtype, such as "uint8".
        shape: without the batch dimension; None for a ragged field, whose rows differ in length.
        decoded: of an image, the mode of its decoding: "rgb", "gray", "index" or "unchanged"; else "".
        rate, channels: of a sound, as it is decoded: hertz and number; else 0.
    """

    dtype: str
    shape: tuple[int, ...] | None
    decoded: str = ""
    rate: int = 0
    channels: int = 0

    @property
    def extents(self) -> str:
        """The shape as text: "[3, 224, 224]" or "ragged"."""
        return "ragged" if self.shape is None else str(list(self.shape))

    @property
    def remarks(self) -> str:
        """How an image or a sound is decoded, as text; else ""."""
        told = [f"decoded as {self.decoded}"] if self.decoded else []
        if self.rate:
            told.append(f"sound of {self.channels} × {self.rate} Hz")
        return ", ".join(told)

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"{self.dtype} {self.extents}", self.remarks)))


@dataclass(frozen=True, slots=True)
class PlanInfo:
    """A registered plan.

    Attributes:
        hash: identifies the plan.
        positions: rows of an epoch.
        fields: dtype and shape of each field of a row (FieldSchema).
        ops: the op builds that the plan is pinned to, as (op, version).
        notes: what the plan does that its author may not mean, and what to write instead.
    """

    hash: str
    positions: int
    fields: Mapping[str, FieldSchema]
    ops: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BadSample:
    """An entry of a plan's ledger: a sample that could not be prepared.

    Attributes:
        key: key of the object, with the member if it is an archive.
        op: the op that failed.
        error: the op's error message.
        position, epoch: where the sample last occurred; `mesh replay` prepares it again.
        times: how often it has failed.
    """

    key: str
    op: str
    error: str
    position: int
    epoch: int
    times: int


def pin_snapshot(
    transport: Transport,
    source: str,
    kind: str,
    fields: Mapping[str, Any] | None,
    deadline: float | None = None,
    meanwhile: Callable[[], object] = lambda: None,
    options: Mapping[str, Any] | None = None,
) -> SnapshotInfo:
    """Pin the current content of a source as a snapshot.

    Without `fields`, which only a few kinds allow, the snapshot has all fields of the source. `meanwhile`
    runs while the node works. `options`: filter, masks and ids of a table.
    """
    document = {"source": source, "kind": kind, **(options or {})}
    document |= {} if fields is None else {"fields": dict(fields)}
    request = json_request("POST", "/-/snapshots", document)
    begun = transport.begin(request)
    meanwhile()
    answer = transport.json(request, deadline, begun)
    return read_answer(lambda: _snapshot(source, answer), "snapshot")


def derive_snapshot(
    transport: Transport, base: SnapshotInfo, change: Mapping[str, Any], deadline: float | None = None
) -> SnapshotInfo:
    """Derive a snapshot from another; `change` is one of select, rename, relabel, filter, join (with `on`)
    and concat."""
    document = {"from": base.hash, **change}
    answer = transport.json(json_request("POST", "/-/snapshots", document), deadline)
    return read_answer(lambda: _snapshot(base.source, answer), "snapshot")


def fetch_snapshot(transport: Transport, digest: str) -> Snapshot:
    """Fetch a snapshot's document: objects and ETags. The locations of samples come with it, or, of a
    snapshot that consists of pages, with each page when it is first used."""
    from meshwire.dataset.paged_snapshot import read_snapshot  # most jobs never read the document
    from meshwire.formats.page_formats import open_page as read_page

    path = f"/-/snapshots/{quote(digest, safe='')}"
    opened: dict[int, Page] = {}

    def open_page(snapshot: PagedSnapshot, number: int) -> Page:
        if number not in opened:
            page = transport.text(Request("GET", f"{path}/pages/{number}"))
            facts = snapshot.facts(number)
            opened[number] = read_answer(lambda: read_page(page, snapshot.kind, facts), "page")
        return opened[number]

    def open_pages(snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[Page]:
        return [open_page(snapshot, number) for number in numbers]

    body = transport.text(Request("GET", path))
    return read_answer(lambda: read_snapshot(body, open_pages), "snapshot")


def describe_snapshot(snapshot: Snapshot) -> SnapshotInfo:
    """Return the summary of a snapshot document, as `pin_snapshot` does."""
    return _snapshot(snapshot.source, snapshot.summary())


def _snapshot(source: str, answer: Mapping[str, Any]) -> SnapshotInfo:
    fields = {
        name: FieldInfo(
            str(field["kind"]),
            tuple(field.get("classes") or ()),
            str(field.get("dtype", "")),
            tuple(field.get("shape", ())),
        )
        for name, field in answer["fields"].items()
    }
    numbers = {name: int(answer[name]) for name in ("samples", "shards", "objects", "bytes")}
    return SnapshotInfo(
        str(answer["snapshot"]),
        source,
        fields=fields,
        skipped=int(answer.get("skipped", 0)),
        kind=str(answer.get("kind", "")),
        examples=tuple(map(str, answer.get("examples", ()))),
        **numbers,
    )


def register_plan(
    transport: Transport,
    snapshot: str,
    spec: Mapping[str, Any],
    batch: int | None = None,
    deadline: float | None = None,
) -> PlanInfo:
    """Register a plan; the node fills in the op versions and returns the schema of the rows."""
    document: dict[str, Any] = {"snapshot": snapshot, "spec": dict(spec)}
    if batch is not None:
        document["batch"] = batch
    answer = transport.json(json_request("POST", "/-/plans", document), deadline)
    return read_answer(lambda: _plan(answer), "plan")


def _plan(answer: Mapping[str, Any]) -> PlanInfo:
    fields = {
        name: FieldSchema(
            str(field["dtype"]),
            None if field.get("ragged") else tuple(field["shape"]),
            str(field.get("decoded", "")),
            int(field.get("rate", 0)),
            int(field.get("channels", 0)),
        )
        for name, field in answer["fields"].items()
    }
    ops = tuple((str(op["op"]), str(op["version"])) for op in answer.get("ops", ()))
    notes = tuple(map(str, answer.get("notes", ())))
    return PlanInfo(str(answer["plan"]), int(answer["positions"]), fields, ops, notes)


def rows_request(plan: str, epoch: int, samples: Sequence[int]) -> Request:
    """Return the request for a frame of these samples (indices in stored order), in the given order."""
    return json_request("POST", f"/-/plans/{plan}/rows", {"samples": list(samples)}, f"epoch={epoch}")


def bad_samples(transport: Transport, plan: str) -> tuple[BadSample, ...]:
    """Fetch the ledger of a plan: the samples that could not be prepared so far, in any job."""
    answer = transport.json(Request("GET", f"/-/plans/{plan}/bad"))
    names = ("key", "op", "error", "position", "epoch", "times")
    return read_answer(
        lambda: tuple(BadSample(**{name: entry[name] for name in names}) for entry in answer), "ledger"
    )


def read_answer(make: Callable[[], T], what: str) -> T:
    """Return what `make` makes of a server's answer. Raises MeshError if the answer is not as expected."""
    try:
        return make()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MeshError(
            f"cannot parse the {what} from the server ({error!r}): upgrade the older of SDK and server"
        ) from error


if not TYPE_CHECKING:  # otherwise type checkers would accept any name
    __getattr__ = earlier_names(__name__)

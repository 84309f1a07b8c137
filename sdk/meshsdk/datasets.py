"""An immutable view of a snapshot: which samples, which fields, which ops.

Law: nothing here is stateful; `map` gives a new dataset. Loading happens in `Loader`, or sample by sample
through `ds[i]`. Invariant: a dataset pickles without sockets, so that worker processes can be forked or
spawned with it.
"""

from __future__ import annotations

import dataclasses
import difflib
import operator
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import numpy as np

from meshsdk.batches import Ragged, split_frame
from meshsdk.deliveries import open_frame
from meshsdk.errors import ConfigurationError, CorruptFrameError, MeshError
from meshsdk.guessing import guess_columns, guess_features, guess_fields
from meshsdk.native import (
    derive_snapshot,
    describe_snapshot,
    fetch_snapshot,
    pin_snapshot,
    register_plan,
    rows_request,
)
from meshsdk.orders import shuffle_spec
from meshsdk.selecting import array_fields, check_source, part_fields, select_fields
from meshwire.declarations import is_user_op
from meshwire.plans import OpSpec, PlanError, op_document, parse_spec, spec_document

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshsdk.client import Client
    from meshsdk.connections import Response
    from meshsdk.deliveries import Frame
    from meshsdk.mixing import Mixing
    from meshsdk.native import FieldSchema, PlanInfo, SnapshotInfo
    from meshsdk.orders import LengthBuckets, Shuffle
    from meshsdk.preflights import Preflight
    from meshwire.snapshotdocuments import Snapshot
    from meshwire.snapshotstats import SnapshotStats

_ROWS_A_REQUEST = 512
_PATIENCE = 600.0  # seconds that measuring for packing may take before a dataset gives up
_KINDS = ("auto", "objects", "tar", "lines", "zarr", "chunks", "tfrecord", "mds", "parquet")


def open(
    url: str,
    fields: Mapping[str, Any] | None = None,
    *,
    kind: str = "auto",
    snapshot: str | None = None,
    client: Client | None = None,
    deadline: float | None = None,
) -> Dataset:
    """Pins what is stored under `url` now and gives a dataset of it.

    Arguments:
        url: a bucket or a folder of one, as "s3://photos/train".
        fields: what a sample is made of, by name: an extension ("jpg"), several with the preferred first
            ("jpg;jpeg;png"), or "@class" (the first folder below `url`, as int64). Of "zarr" names of arrays,
            of "tfrecord" features, of "mds" and "parquet" columns. Left out, guessed from what is there.
        kind: "objects" (files that share a stem are a sample), "tar" (WebDataset shards and other
            archives), "lines" (a sample a line, as in JSONL), "zarr" (a sample a row of the arrays),
            "chunks" (a sample a chunk of them), "tfrecord" (a sample a record's `tf.Example`), "mds"
            (mosaicml-streaming's shards), "parquet" (a sample a row) or "auto": archives if there are any,
            else objects.
        snapshot: the hash of what was pinned before (`ds.snapshot.hash`), instead of what is there now.
        client: see `mesh.connect`; left out, one of the environment's.
        deadline: seconds an unavailable server is waited for; the client's if left out.

    Raises:
        ConfigurationError: the URL, a field or the kind makes no sense; endpoint or keys are missing.
        NotFoundError: no such bucket, or no sample has all fields; it says what is there.
        BadSampleError: an archive or file of records is not what it should be; it names it.
        AccessError: the keys may not read it.
        DeadlineError: nobody answered for so long.
    """
    from meshsdk.connecting import connect

    source = check_source(url)
    if kind not in _KINDS:
        raise ConfigurationError(f"kind={kind!r}: use one of {', '.join(_KINDS)}")
    client = client or connect()
    if snapshot is not None:
        return Dataset(client, describe_snapshot(fetch_snapshot(client.transport, snapshot)))
    if kind in ("zarr", "chunks"):
        fields, kind = array_fields(fields, chunks=kind == "chunks"), "zarr"
    if kind == "tfrecord":
        fields = part_fields(guess_features(client, source) if fields is None else fields, "feature")
    if kind == "mds":
        fields = part_fields(guess_columns(client, source) if fields is None else fields, "column")
    if kind == "parquet":
        chosen = None if fields is None else select_fields(part_fields(fields, "column"))
        return Dataset(client, pin_snapshot(client.transport, source, kind, chosen, deadline))
    chosen = select_fields(fields) if fields is not None else guess_fields(client, source)
    return Dataset(client, pin_snapshot(client.transport, source, kind, chosen, deadline))


class Dataset:
    """`len(ds)` samples in stored order; `ds[i]` is a dict of numpy values, `ds.map(...)` a dataset with ops.

    Immutable: every method gives another dataset. Pickles without sockets, so forked and spawned workers may
    have it. Random ops applied through `ds[i]` are keyed by (seed 0, epoch, i): use `at_epoch` to vary them.
    What the structure methods (select, filter, join …) need is done once, on the node; all of them raise
    ConfigurationError for an argument that makes no sense.

    Attributes:
        snapshot: what was pinned: hash, counts, sizes, fields (SnapshotInfo).
        ops: what is done to each sample, in order.
        client: where it is asked for.
    """

    def __init__(
        self,
        client: Client,
        snapshot: SnapshotInfo,
        ops: tuple[OpSpec, ...] = (),
        epoch: int = 0,
        packing: Mapping[str, Any] | None = None,
        mixing: Mixing | None = None,
    ) -> None:
        self.client = client
        self.snapshot = snapshot
        self.ops = ops
        self.epoch = epoch
        self.packing = None if packing is None else dict(packing)
        self.mixing = mixing
        self._plan: PlanInfo | None = None

    def map(self, *ops: OpSpec) -> Dataset:
        """A dataset with these ops (see `meshsdk.ops`) after those it has; they run on the storage nodes.

        Raises ConfigurationError for a Python function, a field that is not there, or a class label.
        """
        for op in ops:
            self._check_op(op)
        return self._with(ops=(*self.ops, *ops))

    def pack(
        self,
        *fields: str,
        length: int,
        value: int = 0,
        long: Literal["split", "truncate"] = "split",
    ) -> Dataset:
        """A dataset whose rows hold many samples: these sequences (of one length in a sample) side by side,
        `length` elements a row, what is left filled with `value`. Other fields must be selected away.

        A batch has them as [rows, length], and FIELD.segments (1, 2, … for the samples of a row, 0 for
        nothing) and FIELD.positions (from 0 on in each sample) of the first. A sequence longer than a row is
        split over several, or cut. `len(ds)` counts rows, and asking for it measures every sample, once.
        """
        packing = {"fields": sorted(fields), "length": length, "value": value, "long": long}
        return self._with(packing=packing)

    def _with(
        self,
        *,
        ops: tuple[OpSpec, ...] | None = None,
        epoch: int | None = None,
        packing: Mapping[str, Any] | None = None,
    ) -> Dataset:
        return Dataset(
            self.client,
            self.snapshot,
            self.ops if ops is None else ops,
            self.epoch if epoch is None else epoch,
            self.packing if packing is None else packing,
            self.mixing,
        )

    def select(self, *fields: str) -> Dataset:
        """A dataset with these fields alone; ops on the others are forgotten. What is done to each of several
        fields goes on being done to those that stay; ConfigurationError where an op takes them together and
        not all stay."""
        kept = [left for op in self.ops if (left := _narrowed(op, fields)) is not None]
        return self._derived({"select": list(fields)}, kept)

    def rename(self, names: Mapping[str, str] | None = None, **more: str) -> Dataset:
        """A dataset with fields under new names, as `ds.rename(jpg="image")` or `{"jpg": "image"}`."""
        names = {**(names or {}), **more}
        ops = [_renamed(op, names) for op in self.ops]
        return self._derived({"rename": names}, ops)

    def relabel(
        self, maps: Mapping[str, Mapping[str, str | None]] | None = None, **more: Mapping[str, str | None]
    ) -> Dataset:
        """A dataset with the classes of label fields called otherwise, as `ds.relabel(label={"tabby": "cat",
        "rest": None})`: one new name is one class, None leaves a class's samples out, others stay.

        For labels that are text or numbers in files there is `ops.label_map`.
        """
        given = {name: dict(classes) for name, classes in {**(maps or {}), **more}.items()}
        return self._derived({"relabel": given}, self.ops)

    def filter(self, expression: str, *, deadline: float = 600.0) -> Dataset:
        """A dataset of the samples for which an expression holds, as `size > 10000`, `label in ("cat",
        "dog")` or `meta.width >= 256`.

        It is evaluated once, on the node, over what is stored, not over what ops make of it: `key`, `name`
        (below the source), `stem`, `size` in bytes, FIELD_size, `index`, a label's class, and a field's
        content, as text or by a path into its JSON. Raises NotFoundError when nothing is left.
        """
        return self._derived({"filter": expression}, self.ops, deadline)

    def split(
        self,
        fractions: Mapping[str, float] | None = None,
        *,
        by: str = "name",
        seed: int = 0,
        deadline: float = 600.0,
        **more: float,
    ) -> dict[str, Dataset]:
        """Datasets by name with about these fractions of the samples, as `ds.split(train=0.9, val=0.1)`.

        A hash of `by`, an expression as in `filter`, and of `seed` says where a sample goes: it stays there
        when the dataset grows, and samples of one value (`by='part(name, "_", 0)'`, a patient or a scene)
        stay together. What the fractions leave below 1 is in none. Split a split with another seed.
        Raises ConfigurationError; NotFoundError when a split is empty.
        """
        from meshsdk.splitting import split

        return split(self, {**(fractions or {}), **more}, by, seed, deadline)

    def join(
        self, other: Dataset, on: str | tuple[str, str] | None = None, *, deadline: float = 600.0
    ) -> Dataset:
        """Each sample with the fields of `other`'s sample of the same name, in this dataset's order; samples
        without a partner are left out (`snapshot.skipped`).

        Names count from the sources on; `on` is an expression to use instead, or one for each side.
        """
        change: dict[str, Any] = {"join": other.snapshot.hash}
        if on is not None:
            change["on"] = on if isinstance(on, str) else list(on)
        return self._derived(change, (*self.ops, *other.ops), deadline)

    def _derived(
        self, change: Mapping[str, Any], ops: Sequence[OpSpec], deadline: float | None = None
    ) -> Dataset:
        if self.packing is not None:
            raise ConfigurationError("select, rename, filter and join before pack: a packed row is no sample")
        if self.mixing is not None and not change.keys() <= {"select", "rename"}:
            raise ConfigurationError("filter, relabel and join before mix: a mix's parts keep their samples")
        made = derive_snapshot(self.client.transport, self.snapshot, change, deadline)
        return Dataset(self.client, made, tuple(ops), self.epoch, None, self.mixing)

    def _check_op(self, op: object) -> None:
        if not isinstance(op, OpSpec):
            raise ConfigurationError(
                f"map takes ops, as ds.map(ops.decode('image')); got {type(op).__name__}. "
                "Python functions do not run on storage nodes: apply them to the batch"
            )
        for name in op.every:
            self._check_field(op.op, name)

    def _check_field(self, op: str, name: str) -> None:
        field = self.snapshot.fields.get(name)
        if field is None:
            near = difflib.get_close_matches(name, self.snapshot.fields, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(
                f"{op}: no field {name!r}; this dataset has {', '.join(self.fields)}{hint}"
            )
        if field.kind == "label":
            raise ConfigurationError(f"{op}: {name!r} is a class label, int64 already: it takes no op")

    def at_epoch(self, epoch: int) -> Dataset:
        """The dataset as `ds[i]` sees it in another epoch."""
        return self._with(epoch=operator.index(epoch))

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of a sample's fields, before ops."""
        return tuple(self.snapshot.fields)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names behind the values of the one field that has classes; raises MeshError if none or several
        have.
        """
        named = {name: field.classes for name, field in self.snapshot.fields.items() if field.classes}
        if len(named) != 1:
            has = f"{len(named)} fields have" if named else "no field has"
            raise MeshError(f"{has} classes: see ds.snapshot.fields[name].classes")
        return next(iter(named.values()))

    def spec(
        self,
        *,
        seed: int = 0,
        shuffle: Shuffle = False,
        tail: str = "pad",
        on_bad: str = "raise",
        max_bad: float = 0.01,
        batch: int | None = None,
        buckets: LengthBuckets | None = None,
    ) -> dict[str, Any]:
        """The plan of this dataset as the protocol's document; or a ConfigurationError naming a bad value.

        `batch`: rows of a step, which is what a mix's stages that begin at steps need, and buckets.
        """
        document = {
            "ops": [op_document(op) for op in self.ops],
            "seed": seed,
            "shuffle": shuffle_spec(shuffle),
            "tail": tail,
            "on_bad": on_bad,
            "max_bad": max_bad,
            "pack": self.packing,
            "mix": None if self.mixing is None else self.mixing.document(batch),
            "buckets": None if buckets is None else buckets.document(batch),
        }
        try:
            return spec_document(parse_spec(document))
        except PlanError as error:
            raise ConfigurationError(str(error)) from error

    def plan(self) -> PlanInfo:
        """The registered plan behind `ds[i]` and `schema`: stored order, unmixed, seed 0, bad ones raise.

        Raises InvalidPlanError where ops do not fit the fields or each other.
        """
        if self._plan is None:
            patience = None if self.packing is None else _PATIENCE
            unmixed = Dataset(self.client, self.snapshot, self.ops, self.epoch, self.packing)
            self._plan = register_plan(
                self.client.transport, self.snapshot.hash, unmixed.spec(), deadline=patience
            )
        return self._plan

    def schema(self) -> Mapping[str, FieldSchema]:
        """dtype and shape of each field of a row, as the ops leave them; the shape of a ragged one is
        None."""
        return self.plan().fields

    def head(self, count: int = 5) -> list[dict[str, Any]]:
        """The first `count` samples in stored order (all, where there are fewer), as `ds[i]` gives them."""
        return self.__getitems__(range(min(operator.index(count), len(self))))

    def stats(self) -> SnapshotStats:
        """Bytes by field, samples by class and by shard, as they are stored. Downloads the manifest; no
        sample is read."""
        from meshwire.snapshotstats import snapshot_stats

        return snapshot_stats(self.manifest())

    def preflight(self, global_batch: int | None = None, *, world: int = 1, rows: int = 8) -> Preflight:
        """Prepares `rows` samples from all over the dataset and tells how it went.

        With `global_batch` rows over `world` ranks it says what a rank's batch takes, and raises where four
        of them do not fit in this machine's free memory. Where no job can work, raises PreflightError with
        the cause and the fix; ConfigurationError for a batch smaller than the world.
        """
        from meshsdk.preflights import preflight

        return preflight(self, global_batch, world=world, rows=rows)

    def unmapped(self) -> Dataset:
        """The dataset without its ops: what is stored."""
        return Dataset(self.client, self.snapshot, (), self.epoch)

    def unpacked(self) -> Dataset:
        """The dataset without `pack`."""
        return Dataset(self.client, self.snapshot, self.ops, self.epoch)

    def manifest(self) -> Snapshot:
        """The snapshot's document: objects, ETags, and where each sample lies. Downloads it."""
        return fetch_snapshot(self.client.transport, self.snapshot.hash)

    def __len__(self) -> int:
        """Samples; of a packed dataset rows, for which every sample is measured once."""
        return self.snapshot.samples if self.packing is None else self.plan().positions

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """Sample `index` in stored order: numpy arrays and scalars by field. One request; raises IndexError,
        BadSampleError (it cannot be prepared), SnapshotChangedError (it was replaced since it was pinned)."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[dict[str, Any]]:
        """Samples in the order asked for, in one request (torch's DataLoader calls this once a batch)."""
        wanted = [self._index(index) for index in indices]
        rows: list[dict[str, Any]] = []
        for start in range(0, len(wanted), _ROWS_A_REQUEST):
            rows += self._rows(wanted[start : start + _ROWS_A_REQUEST])
        return rows

    def _index(self, index: SupportsIndex) -> int:
        value = operator.index(index)
        if not -len(self) <= value < len(self):
            raise IndexError(f"sample {value} of {len(self)}")
        return value % len(self)

    def _rows(self, samples: list[int]) -> list[dict[str, Any]]:
        request = rows_request(self.plan().hash, self.epoch, samples)
        frame = self.client.transport.call(request, read_frame)
        fields, _, _ = split_frame(frame.arrays, lambda array: array)
        return [{name: _row(value, row) for name, value in fields.items()} for row in range(len(samples))]

    def __repr__(self) -> str:
        ops = "".join(f".{op.op}({', '.join(map(repr, op.every))})" for op in self.ops)
        pack = "" if self.packing is None else f".pack(length={self.packing['length']})"
        mix = "" if self.mixing is None else f".mix({', '.join(map(str, self.mixing.parts))})"
        samples, fields = self.snapshot.samples, ", ".join(self.fields)
        return f"Dataset({self.snapshot.source}, {samples} samples, {fields}){mix}{ops}{pack}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.client, self.snapshot, self.ops, self.epoch, self.packing, self.mixing,
        )  # fmt: skip


def _row(value: Any, row: int) -> Any:
    if isinstance(value, Ragged):
        return value[row]
    picked = value[row]
    return picked if isinstance(picked, np.ndarray) else picked[()]


def read_frame(response: Response, step: int = 0, *, verify: bool = True) -> Frame:
    """A frame read whole into memory of its own; raises CorruptFrameError (asked for again by the
    transport).
    """
    if not response.length:
        raise CorruptFrameError("the answer has no Content-Length")
    memory = np.empty(response.length, np.uint8)
    view = memory.data
    response.readinto(view)
    return open_frame(view, step, verify=verify, origin=response.headers.get("x-mesh-frame", ""))


def _narrowed(op: OpSpec, fields: Sequence[str]) -> OpSpec | None:
    """The op without fields that are selected away; None when none is left."""
    left = tuple(name for name in op.every if name in fields)
    if len(left) == len(op.every):
        return op
    if not left:
        return None
    if is_user_op(op.op):
        raise ConfigurationError(
            f"{op.op} is over {', '.join(op.every)}: select all of them, or map it later"
        )
    if len(left) == 1:
        return op.of(left[0])
    each = {name: args for name, args in op.each.items() if name in left}
    return dataclasses.replace(op, field=left[0], fields=left, each=each)


def _renamed(op: OpSpec, names: Mapping[str, str]) -> OpSpec:
    fields = tuple(names.get(name, name) for name in op.fields)
    each = {names.get(name, name): args for name, args in op.each.items()}
    return dataclasses.replace(op, field=names.get(op.field, op.field), fields=fields, each=each)

"""Dataset: an immutable view of a snapshot with its fields and ops.

Law: every method returns another dataset; batches come from `Loader`, single samples from `ds[i]`. A bad
argument is a ConfigurationError that says what to write.
Invariant: a dataset pickles without sockets, so forked and spawned workers may have it.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex, cast

from meshsdk.client.native_api import derive_snapshot, fetch_snapshot, register_plan
from meshsdk.datasets.batch import fetch_rows
from meshsdk.datasets.shuffle import buckets_spec, shuffle_spec
from meshsdk.errors import BadSampleError, ConfigurationError, MeshError
from meshsdk.ops.field_checks import checked_ops, narrow_op, op_text, rename_op_fields
from meshwire.plan.plan_spec import PlanError, op_document, parse_spec, spec_document

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.utils.data import Dataset as TorchDataset

    from meshsdk.client.native_api import FieldSchema, PlanInfo, SnapshotInfo
    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.preflight import Preflight
    from meshsdk.datasets.shuffle import LengthBuckets, Shuffle
    from meshsdk.datasets.split_mix import MixSpec
    from meshwire.dataset.snapshot import Snapshot
    from meshwire.dataset.snapshot_stats import SnapshotStats
    from meshwire.plan.plan_spec import OpSpec


def checked_on(on: object) -> str | list[str] | None:
    """`on` of a join: an expression for both sides, or one for each."""
    if on is None or isinstance(on, str):
        return on
    if isinstance(on, (tuple, list)) and len(on) == 2 and all(isinstance(each, str) for each in on):
        return list(on)
    raise ConfigurationError(
        f"join: on={on!r}: an expression, as on='stem', or two, of this side and of the other: "
        "on=('stem', 'part(name, \"_\", 0)')"
    )


def checked_by(by: object) -> None:
    """`by` of a split: an expression."""
    if not isinstance(by, str):
        raise ConfigurationError(f"split: by={by!r}: an expression, as by='part(name, \"_\", 0)'")


def checked_classes(maps: Mapping[str, object]) -> dict[str, dict[str, str | None]]:
    """The new names of classes, by field."""
    found = {}
    for field, classes in maps.items():
        if not isinstance(classes, Mapping):
            raise ConfigurationError(
                "relabel takes new names of classes by old ones, as "
                f"ds.relabel({field}={{'tabby': 'cat', 'rest': None}}); got {type(classes).__name__}"
            )
        found[field] = dict(classes)
    return found


def filter_kept_all_hint(expression: str, snapshot: SnapshotInfo) -> str:
    """What is to be told of a filter that holds for all samples, as one of another kind of value does."""
    name = next((name for name, field in snapshot.fields.items() if field.classes and name in expression), "")
    label = f"{name} is its class's name here, as {snapshot.fields[name].classes[0]!r}; " if name else ""
    return (
        f"filter({expression!r}) leaves nothing out: it holds for all {snapshot.samples} samples. {label}a "
        "text never equals a number (number(…) makes one of it)"
    )


_log = logging.getLogger("meshsdk")

_LOADERS = {
    "shuffle": "a loader shuffles, mesh.Loader(ds, global_batch=…, shuffle=True)",
    "batch": "a loader makes batches, mesh.Loader(ds, global_batch=…)",
    "repeat": "iterate a loader again: each `for` is the next epoch",
    "prefetch": "a loader asks ahead by itself, mesh.Loader(ds, global_batch=…)",
    "take": "ds.head(n) gives the first n samples",
    "shard": "each rank's loader takes its part, mesh.Loader(ds, global_batch=…)",
}
_ROWS_AHEAD = 64
_PATIENCE = 600.0  # seconds that measuring for packing may take before a dataset gives up


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
        mixing: MixSpec | None = None,
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
        return self._with(ops=(*self.ops, *checked_ops(ops, self.snapshot.fields)))

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
        given = next((name for name in fields if not isinstance(name, str)), None)
        if given is not None or not fields:
            got = "none" if given is None else type(given).__name__
            raise ConfigurationError(f"select takes names, as ds.select('image', 'label'); got {got}")
        kept = [left for op in self.ops if (left := narrow_op(op, fields)) is not None]
        return self._derived({"select": list(fields)}, kept)

    def rename(self, names: Mapping[str, str] | None = None, **more: str) -> Dataset:
        """A dataset with fields under new names, as `ds.rename(jpg="image")` or `{"jpg": "image"}`."""
        if names is not None and not isinstance(names, Mapping):
            raise ConfigurationError(
                f"rename takes new names by old ones, as ds.rename(jpg='image'); got {type(names).__name__}"
            )
        names = {**(names or {}), **more}
        ops = [rename_op_fields(op, names) for op in self.ops]
        return self._derived({"rename": names}, ops)

    def relabel(
        self, maps: Mapping[str, Mapping[str, str | None]] | None = None, **more: Mapping[str, str | None]
    ) -> Dataset:
        """A dataset with the classes of label fields called otherwise, as `ds.relabel(label={"tabby": "cat",
        "rest": None})`: one new name is one class, None leaves a class's samples out, others stay.

        For labels that are text or numbers in files there is `ops.label_map`.
        """
        return self._derived({"relabel": checked_classes({**(maps or {}), **more})}, self.ops)

    def filter(self, expression: str, *, deadline: float = 600.0) -> Dataset:
        """A dataset of the samples for which an expression holds, as `size > 10000`, `label in ("cat",
        "dog")` or `meta.width >= 256`.

        It is evaluated once, on the node, over what is stored, not over what ops make of it: `key`, `name`
        (below the source), `stem`, `size` in bytes, FIELD_size, `index`, a label's class, and a field's
        content, as text or by a path into its JSON. Raises NotFoundError when nothing is left; where all is
        left, a warning of the logger `meshsdk` says so.
        """
        if not isinstance(expression, str):
            raise ConfigurationError(
                f"filter takes an expression, as ds.filter('size > 10000'); got {type(expression).__name__}. "
                "It is evaluated on the node, where Python functions do not run"
            )
        found = self._filtered(expression, deadline)
        if found.snapshot.samples == self.snapshot.samples:
            _log.warning("%s", filter_kept_all_hint(expression, self.snapshot))
        return found

    def _filtered(self, expression: str, deadline: float) -> Dataset:
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
        from meshsdk.datasets.split_mix import split

        if fractions is not None and not isinstance(fractions, Mapping):
            raise ConfigurationError(
                "split takes fractions by name, as ds.split(train=0.9, val=0.1); got "
                f"{type(fractions).__name__}"
            )
        if self.packing is not None or self.mixing is not None:
            raise ConfigurationError(
                "split before mix and pack: split each dataset with the same fractions, then mix its parts, "
                "as mesh.mix(web['train'], books['train'])"
            )
        checked_by(by)
        return split(self, {**(fractions or {}), **more}, by, seed, deadline)

    def join(
        self, other: Dataset, on: str | tuple[str, str] | None = None, *, deadline: float = 600.0
    ) -> Dataset:
        """Each sample with the fields of `other`'s sample of the same name, in this dataset's order; samples
        without a partner are left out (`snapshot.skipped`).

        Names count from the sources on; `on` is an expression to use instead, or one for each side. Neither
        side is a mix, or packed.
        """
        if not isinstance(other, Dataset):
            raise ConfigurationError(
                f"join takes a dataset, as ds.join(captions); got {type(other).__name__}"
            )
        if other.packing is not None or other.mixing is not None:
            raise ConfigurationError(
                f"the other side is {'a mix' if other.packing is None else 'packed'}, and would be none "
                "any more: join before mix and pack"
            )
        change: dict[str, Any] = {"join": other.snapshot.hash}
        if (sides := checked_on(on)) is not None:
            change["on"] = sides
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
            "buckets": buckets_spec(buckets, batch),
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
        from meshwire.dataset.snapshot_stats import snapshot_stats

        return snapshot_stats(self.manifest())

    def preflight(self, global_batch: int | None = None, *, world: int = 1, rows: int = 8) -> Preflight:
        """Prepares `rows` samples from all over the dataset and tells how it went.

        With `global_batch` rows over `world` ranks it says what a rank's batch takes, and raises where four
        of them do not fit in this machine's free memory. Where no job can work, raises PreflightError with
        the cause and the fix; ConfigurationError for a batch smaller than the world.
        """
        from meshsdk.datasets.preflight import preflight

        return preflight(self, global_batch, world=world, rows=rows)

    def as_torch(self) -> TorchDataset[dict[str, Any]]:
        """Itself, for type checkers: they refuse `DataLoader(ds, batch_size=8)`. A `Loader` needs neither."""
        return cast("TorchDataset[dict[str, Any]]", self)

    def unmapped(self) -> Dataset:
        """The dataset without its ops, and without `pack`: what is stored. A mix stays one."""
        return Dataset(self.client, self.snapshot, (), self.epoch, None, self.mixing)

    def unpacked(self) -> Dataset:
        """The dataset without `pack`."""
        return Dataset(self.client, self.snapshot, self.ops, self.epoch, None, self.mixing)

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

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Samples in stored order, as `ds[i]` gives them, in requests of 1, 2, 4 and so on up to 64: for
        looking at them all. A job takes a Loader."""
        start, count, end = 0, 1, len(self)
        while start < end:
            numbers = range(start, min(start + count, end))
            try:
                rows: Iterable[dict[str, Any]] = self.__getitems__(numbers)
            except BadSampleError:  # those before it come first
                rows = map(self.__getitem__, numbers)
            yield from rows
            start, count = numbers.stop, min(2 * count, _ROWS_AHEAD)

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[dict[str, Any]]:
        """Samples in the order asked for, in one request (torch's DataLoader calls this once a batch)."""
        wanted = [self._index(index) for index in indices]
        return fetch_rows(self.client.transport, self.plan().hash, self.epoch, wanted)

    if not TYPE_CHECKING:  # or checkers would let every name pass

        def __getattr__(self, name: str) -> NoReturn:
            """Only what is not there: what other libraries do with a dataset a loader does here."""
            hint = f": {_LOADERS[name]}" if name in _LOADERS else ""
            raise AttributeError(f"a Dataset has no attribute {name!r}{hint}", name=name, obj=self)

    def _index(self, index: object) -> int:
        if not isinstance(index, SupportsIndex):
            raise TypeError(
                f"ds[i] is sample i, an integer; got {type(index).__name__}. ds.head(8) gives the first "
                "ones, torch.utils.data.Subset(ds, numbers) others, and mesh.Loader(ds, …) batches of all"
            )
        value = operator.index(index)
        if not -len(self) <= value < len(self):
            raise IndexError(f"sample {value} of {len(self)}")
        return value % len(self)

    def __repr__(self) -> str:
        ops = "".join(f".{op_text(op)}" for op in self.ops)
        pack = "" if self.packing is None else f".pack(length={self.packing['length']})"
        mix = "" if self.mixing is None else f".mix({', '.join(map(str, self.mixing.parts))})"
        samples, fields = self.snapshot.samples, ", ".join(self.fields)
        epoch = f".at_epoch({self.epoch})" if self.epoch else ""
        return f"Dataset({self.snapshot.source}, {samples} samples, {fields}){mix}{ops}{pack}{epoch}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.client, self.snapshot, self.ops, self.epoch, self.packing, self.mixing,
        )  # fmt: skip

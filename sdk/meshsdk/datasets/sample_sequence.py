"""The samples of a snapshot with ops applied, in stored order: their plan, their schema, and rows by index.

Law: a sequence never changes; `at_epoch` and the like return another one. Each request goes by the plan that
is registered on first use.
Invariant: a sequence pickles without sockets, so forked and spawned workers can use it.
Invariant: a process logs each note of the nodes on a plan once, however often it registers the plan.
"""

from __future__ import annotations

import logging
import operator
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from meshsdk.client.native_api import fetch_snapshot, register_plan
from meshsdk.datasets.batch import fetch_rows
from meshsdk.datasets.schema import Schema
from meshsdk.datasets.shuffle import buckets_spec, shuffle_spec
from meshsdk.errors import BadSampleError, ConfigurationError, MeshError
from meshwire.plan.plan_spec import op_document, parse_spec, spec_document
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from meshsdk.client.native_api import PlanInfo, SnapshotInfo
    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.shuffle import LengthBuckets, Shuffle
    from meshsdk.datasets.split_mix import MixSpec
    from meshwire.dataset.snapshot import Snapshot
    from meshwire.dataset.snapshot_stats import SnapshotStats
    from meshwire.plan.plan_spec import OpSpec


_ROWS_AHEAD = 64
_NAMING_OPS = ("text_label", "box_labels")
_PATIENCE = 600.0  # deadline in seconds while a node measures the samples for packing


class SampleSequence:
    """A snapshot's samples with ops applied; `Dataset` adds the methods that make other datasets of it."""

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
        self._quiet = False

    def _with(
        self,
        *,
        ops: tuple[OpSpec, ...] | None = None,
        epoch: int | None = None,
        packing: Mapping[str, Any] | None = None,
    ) -> Self:
        return type(self)(
            self.client,
            self.snapshot,
            self.ops if ops is None else ops,
            self.epoch if epoch is None else epoch,
            self.packing if packing is None else packing,
            self.mixing,
        )

    def at_epoch(self, epoch: int) -> Self:
        """Return the dataset with `ds[i]` as in another epoch, which changes the draws of random ops."""
        return self._with(epoch=operator.index(epoch))

    def unmapped(self) -> Self:
        """Return the dataset without its ops and `pack`: the stored data. A mix stays a mix."""
        return type(self)(self.client, self.snapshot, (), self.epoch, None, self.mixing)

    def unpacked(self) -> Self:
        """Return the dataset without `pack`."""
        return type(self)(self.client, self.snapshot, self.ops, self.epoch, None, self.mixing)

    def quiet(self) -> Self:
        """Return the dataset without a log of the notes on its plan, for a caller that reports them."""
        found = self._with()
        found._quiet = True
        return found

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of a sample's fields, before ops."""
        return tuple(self.snapshot.fields)

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names of the label field, indexed by the label's value.

        They are those of folders ("@class"), or of the op that makes a label of text or annotations. Raises
        MeshError unless exactly one field has classes.
        """
        named = {name: field.classes for name, field in self.snapshot.fields.items() if field.classes}
        named = named or {
            op.field: tuple(op.args["classes"])
            for op in self.ops
            if op.op in _NAMING_OPS and op.args["classes"]
        }
        if not named:
            raise MeshError(
                "no field has named classes: those of folders have (fields={'label': '@class'}), those of "
                "annotations with mesh.open_coco(…, classes=[…]), and text with ops.text_label"
            )
        if len(named) > 1:
            raise MeshError(
                f"the fields {', '.join(named)} have classes: use ds.snapshot.fields[name].classes"
            )
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
        """Return the plan of this dataset as the document of the protocol.

        `batch` is the rows of a step; mixes with stages that begin at a step, and length buckets, need it.
        The other arguments are those of `Loader`. Raises ConfigurationError, which names the invalid value.
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
        """Return the plan behind `ds[i]` and `schema`, registered on first use.

        It has the stored order, no mix, seed 0, and raises on bad samples. Raises InvalidPlanError if the ops
        do not fit the fields or each other.
        """
        if self._plan is None:
            patience = None if self.packing is None else _PATIENCE
            unmixed = type(self)(self.client, self.snapshot, self.ops, self.epoch, self.packing)
            self._plan = register_plan(
                self.client.transport, self.snapshot.hash, unmixed.spec(), deadline=patience
            )
            if not self._quiet:
                log_notes(self._plan)
        return self._plan

    def schema(self) -> Schema:
        """Return dtype and shape of each field of a row after all ops; a ragged field has the shape None.

        Of images, it has the mode in which they are decoded. It is a mapping of names (FieldSchema), and
        `print(ds.schema())` shows a table, with notes on what the ops lose.
        """
        plan = self.plan()
        return Schema(plan.fields, self.snapshot.fields, self.ops, plan.notes)

    def head(self, count: int = 5) -> list[dict[str, Any]]:
        """Return the first `count` samples in stored order (all if there are fewer), as `ds[i]` does."""
        return self.__getitems__(range(min(operator.index(count), len(self))))

    def stats(self) -> SnapshotStats:
        """Return stored bytes by field, and samples by class and by shard.

        Downloads the snapshot's document, but reads no sample.
        """
        from meshwire.dataset.snapshot_stats import snapshot_stats

        return snapshot_stats(self.manifest())

    def manifest(self) -> Snapshot:
        """Download the snapshot's document: objects, ETags and the location of each sample."""
        return fetch_snapshot(self.client.transport, self.snapshot.hash)

    def __len__(self) -> int:
        """The number of samples; of a packed dataset the rows, which makes the node measure every sample."""
        return self.snapshot.samples if self.packing is None else self.plan().positions

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """Return sample `index` in stored order, as a dict of numpy arrays and scalars; sends one request.

        Raises IndexError, BadSampleError if the sample cannot be prepared, and SnapshotChangedError if an
        object was replaced since the dataset was opened.
        """
        return self.__getitems__([index])[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the samples in stored order, as `ds[i]` returns them.

        Requests fetch 1, 2, 4 and so on up to 64 samples. This is for inspecting a dataset; a training job
        uses a Loader.
        """
        start, count, end = 0, 1, len(self)
        while start < end:
            numbers = range(start, min(start + count, end))
            try:
                rows: Iterable[dict[str, Any]] = self.__getitems__(numbers)
            except BadSampleError:  # yield the samples before the bad one first
                rows = map(self.__getitem__, numbers)
            yield from rows
            start, count = numbers.stop, min(2 * count, _ROWS_AHEAD)

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[dict[str, Any]]:
        """Return samples in the given order, in one request; torch's DataLoader calls this for each batch."""
        wanted = [self._index(index) for index in indices]
        return fetch_rows(self.client.transport, self.plan().hash, self.epoch, wanted)

    def _index(self, index: object) -> int:
        if not isinstance(index, SupportsIndex):
            raise TypeError(
                f"ds[i] takes an integer; got {type(index).__name__}. Use ds.head(8) for the first samples, "
                "torch.utils.data.Subset(ds, indices) for others, and mesh.Loader(ds, …) for batches"
            )
        value = operator.index(index)
        if not -len(self) <= value < len(self):
            raise IndexError(f"no sample {value}: the dataset has {len(self)}")
        return value % len(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.client, self.snapshot, self.ops, self.epoch, self.packing, self.mixing,
        )  # fmt: skip


_log = logging.getLogger("meshsdk")
_logged: set[str] = set()


def log_notes(plan: PlanInfo) -> None:
    """Log the notes on a registered plan."""
    for note in plan.notes:
        if note not in _logged:
            _logged.add(note)
            _log.warning("%s", note)

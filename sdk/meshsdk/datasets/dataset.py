"""Dataset: an immutable view of a snapshot with its fields and ops, and `mix`, which makes one of several.

Law: methods never change a dataset but return another; batches come from `Loader`, single samples from
`ds[i]`. An invalid argument raises a ConfigurationError that says what to write instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from meshsdk.client.native_api import derive_snapshot
from meshsdk.datasets.sample_sequence import SampleSequence
from meshsdk.datasets.split_mix import MixSpec, staged
from meshsdk.errors import ConfigurationError, NotFoundError
from meshsdk.ops.field_checks import checked_ops, narrow_op, op_text, rename_op_fields
from meshwire.plan.mix import BLOCK
from meshwire.plan.sequence_packing import parse_pack
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.data import Dataset as TorchDataset

    from meshsdk.client.native_api import SnapshotInfo
    from meshsdk.datasets.preflight import Preflight
    from meshsdk.datasets.split_mix import Stage, Weight
    from meshwire.plan.plan_spec import OpSpec


def checked_on(on: object) -> str | list[str] | None:
    """Return the `on` argument of a join: an expression for both sides, or one for each.

    Raises ConfigurationError.
    """
    if on is None or isinstance(on, str):
        return on
    if isinstance(on, (tuple, list)) and len(on) == 2 and all(isinstance(each, str) for each in on):
        return list(on)
    raise ConfigurationError(
        f"join: on={on!r}: expected an expression, such as on='stem', or two, one for each side: "
        "on=('stem', 'part(name, \"_\", 0)')"
    )


def checked_classes(maps: Mapping[str, object]) -> dict[str, dict[str, str | None]]:
    """Return the new class names by old ones, for each field. Raises ConfigurationError."""
    found = {}
    for field, classes in maps.items():
        if not isinstance(classes, Mapping):
            raise ConfigurationError(
                "relabel takes a mapping from old class names to new ones, such as "
                f"ds.relabel({field}={{'tabby': 'cat', 'rest': None}}); got {type(classes).__name__}"
            )
        found[field] = dict(classes)
    return found


def filter_kept_all_hint(expression: str, snapshot: SnapshotInfo) -> str:
    """Return the warning for a filter that keeps every sample, which is often a comparison of text with a
    number."""
    name = next((name for name, field in snapshot.fields.items() if field.classes and name in expression), "")
    label = f"{name} is a class name here, such as {snapshot.fields[name].classes[0]!r}. " if name else ""
    return (
        f"filter({expression!r}) removes nothing: it is true for all {snapshot.samples} samples. {label}"
        "Text never equals a number; convert it with number(…)"
    )


_TABLE_FILTER = (
    "A column of a table is compared as its stored bytes. mesh.open(…, kind='table', "
    "filter=[('price', '>', 3)]) compares values"
)
_log = logging.getLogger("meshsdk")

_LOADERS = {
    "shuffle": "the loader shuffles, mesh.Loader(ds, global_batch=…, shuffle=True)",
    "batch": "the loader makes batches, mesh.Loader(ds, global_batch=…)",
    "repeat": "iterate over the loader again: each `for` is the next epoch",
    "prefetch": "the loader prefetches, mesh.Loader(ds, global_batch=…)",
    "take": "ds.head(n) returns the first n samples",
    "shard": "the loader of each rank reads its part, mesh.Loader(ds, global_batch=…)",
}


class Dataset(SampleSequence):
    """A sequence of samples in stored order; create one with `mesh.open`.

    `len(ds)` counts the samples, `ds[i]` is one of them as a dict of numpy values, and `ds.map(...)` adds
    ops. Datasets are immutable: every method returns another dataset. They pickle without sockets, so forked
    and spawned workers can use them. Random ops applied through `ds[i]` are keyed by (seed 0, epoch, i); use
    `at_epoch` to vary them. The node does the work of the structure methods (select, filter, join …) once;
    all of them raise ConfigurationError for an invalid argument.

    Attributes:
        snapshot: the pinned objects: hash, counts, sizes, fields (SnapshotInfo).
        ops: the ops applied to each sample, in order.
        client: the client that requests go through.
    """

    def map(self, *ops: OpSpec) -> Dataset:
        """Return a dataset with these ops (see `meshsdk.ops`) after its present ones; they run on the nodes.

        Raises ConfigurationError for a Python function, a field that does not exist, or a class label.

        Example:
            ds = ds.map(ops.decode("image"), ops.resize("image", 256), ops.center_crop("image", 224))
        """
        return self._with(ops=(*self.ops, *checked_ops(ops, self.snapshot.fields)))

    def pack(
        self,
        *fields: str,
        length: int,
        value: int = 0,
        long: Literal["split", "truncate"] = "split",
        positions: Literal["piece", "sample", "none"] = "piece",
        segments: bool = True,
    ) -> Dataset:
        """Return a dataset that packs several samples into each row of `length` elements.

        A batch has each of the `fields` as [rows, length], and for the first field also FIELD.segments (1, 2,
        … for the pieces of a row, 0 for the filling) and FIELD.positions (int32, counted from 0).
        `meshsdk.packed_rows` makes masks, bounds and labels of them.
        The fields must be sequences of the same length within a sample; the dataset must have no other fields
        (see `select`). `len(ds)` counts rows, and makes the node measure every sample once.

        Arguments:
            fields: names of the sequences.
            length: elements per row.
            value: fills the rest of a row.
            long: what to do with a sequence longer than a row: "split" it over several, or "truncate" it.
            positions: where FIELD.positions begin at 0: in each "piece", or in each "sample", so that the
                pieces of a split one go on where the one before ended; "none" leaves them out.
            segments: whether batches have FIELD.segments. A batch of uint16 tokens has 10 bytes a token, and
                2 without segments and positions.
        """
        packing = {"fields": sorted(fields), "length": length, "value": value, "long": long}
        if positions != "piece":
            packing["positions"] = positions
        if not segments:
            packing["segments"] = False
        try:
            parse_pack(packing)
        except PlanError as error:
            raise ConfigurationError(f"pack: {str(error).removeprefix('pack.')}") from error
        unknown = [name for name in fields if name not in self.fields]
        if unknown:
            raise ConfigurationError(
                f"pack: no field {unknown[0]!r}; this dataset has {', '.join(self.fields)}"
            )
        return self._with(packing=packing)

    def select(self, *fields: str) -> Dataset:
        """Return a dataset with only these fields; ops on the others are dropped.

        An op that is applied to several fields separately still applies to those that remain. Raises
        ConfigurationError if an op takes several fields together and not all of them remain.
        """
        given = next((name for name in fields if not isinstance(name, str)), None)
        if given is not None or not fields:
            got = "none" if given is None else type(given).__name__
            raise ConfigurationError(
                f"select takes field names, such as ds.select('image', 'label'); got {got}"
            )
        kept = [left for op in self.ops if (left := narrow_op(op, fields)) is not None]
        return self._derived({"select": list(fields)}, kept)

    def rename(self, names: Mapping[str, str] | None = None, **more: str) -> Dataset:
        """Return a dataset with renamed fields: `ds.rename(jpg="image")` or `ds.rename({"jpg": "image"})`."""
        if names is not None and not isinstance(names, Mapping):
            raise ConfigurationError(
                "rename takes a mapping from old field names to new ones, such as ds.rename(jpg='image'); "
                f"got {type(names).__name__}"
            )
        names = {**(names or {}), **more}
        ops = [rename_op_fields(op, names) for op in self.ops]
        return self._derived({"rename": names}, ops)

    def relabel(
        self, maps: Mapping[str, Mapping[str, str | None]] | None = None, **more: Mapping[str, str | None]
    ) -> Dataset:
        """Return a dataset with renamed or merged classes, by label field.

        Classes that get the same new name become one class, None removes the samples of a class, and classes
        that are not mentioned stay. For labels stored as text or numbers in files, use `ops.label_map`.

        Example:
            ds = ds.relabel(label={"tabby": "cat", "siamese": "cat", "rest": None})
        """
        return self._derived({"relabel": checked_classes({**(maps or {}), **more})}, self.ops)

    def filter(self, expression: str, *, deadline: float = 600.0) -> Dataset:
        """Return a dataset of the samples for which an expression is true.

        Examples of expressions are `size > 10000`, `label in ("cat", "dog")` and `meta.width >= 256`. The
        node evaluates the expression once, over the stored data, before any op. It may use `key`, `name` (the
        key below the source), `stem`, `size` and FIELD_size in bytes, `index`, the class of a label, and the
        content of a field as text or by a path into its JSON.

        Raises NotFoundError if no sample is left. If every sample is left, the logger `meshsdk` warns.
        `deadline`: seconds for which an unavailable server is retried.
        """
        if not isinstance(expression, str):
            raise ConfigurationError(
                "filter takes an expression, such as ds.filter('size > 10000'); got "
                f"{type(expression).__name__}. The node evaluates it, and does not run Python functions"
            )
        try:
            found = self._filtered(expression, deadline)
        except NotFoundError as error:
            if self.snapshot.kind == "table":
                raise error.saying(_TABLE_FILTER) from error
            raise
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
        """Split the samples into named datasets of about these fractions, such as train=0.9, val=0.1.

        The split of a sample depends on a hash of `by` (an expression as in `filter`) and `seed`. A sample
        therefore keeps its split when the dataset grows, and samples with the same value of `by` (a patient
        or a scene: `by='part(name, "_", 0)'`) stay together. If the fractions add up to less than 1, the rest
        of the samples is in no split. Use another seed to split a split again.

        Raises ConfigurationError, and NotFoundError if a split is empty. `deadline`: seconds for which an
        unavailable server is retried.

        Example:
            parts = ds.split(train=0.9, val=0.1)
            loader = mesh.Loader(parts["train"], global_batch=256)
        """
        from meshsdk.datasets.split_mix import split

        if fractions is not None and not isinstance(fractions, Mapping):
            raise ConfigurationError(
                "split takes fractions by name, such as ds.split(train=0.9, val=0.1); got "
                f"{type(fractions).__name__}"
            )
        if self.packing is not None or self.mixing is not None:
            raise ConfigurationError(
                "split before mix and pack: split each dataset with the same fractions, then mix the parts, "
                "such as mesh.mix(web['train'], books['train'])"
            )
        if not isinstance(by, str):
            raise ConfigurationError(
                f"split: by={by!r}: expected an expression, such as by='part(name, \"_\", 0)'"
            )
        return split(self, {**(fractions or {}), **more}, by, seed, deadline)

    def join(
        self, other: Dataset, on: str | tuple[str, str] | None = None, *, deadline: float = 600.0
    ) -> Dataset:
        """Return a dataset whose samples have the fields of both datasets, matched by name.

        The order is that of this dataset; samples without a match are left out (counted in
        `snapshot.skipped`). Names are relative to the source of each side. `on` is an expression to match by
        instead, or a pair of them, one for each side. Neither side may be mixed or packed. `deadline`:
        seconds for which an unavailable server is retried.
        """
        if not isinstance(other, Dataset):
            raise ConfigurationError(
                f"join takes a dataset, such as ds.join(captions); got {type(other).__name__}"
            )
        if other.packing is not None or other.mixing is not None:
            raise ConfigurationError(
                f"cannot join a {'mixed' if other.packing is None else 'packed'} dataset: join before mix "
                "and pack"
            )
        change: dict[str, Any] = {"join": other.snapshot.hash}
        if (sides := checked_on(on)) is not None:
            change["on"] = sides
        return self._derived(change, (*self.ops, *other.ops), deadline)

    def _derived(
        self, change: Mapping[str, Any], ops: Sequence[OpSpec], deadline: float | None = None
    ) -> Dataset:
        if self.packing is not None:
            raise ConfigurationError(
                "select, rename, filter, relabel and join before pack: a packed row is not a sample"
            )
        if self.mixing is not None and not change.keys() <= {"select", "rename"}:
            raise ConfigurationError("filter, relabel and join before mix: the parts of a mix are fixed")
        made = derive_snapshot(self.client.transport, self.snapshot, change, deadline)
        return Dataset(self.client, made, tuple(ops), self.epoch, None, self.mixing)

    def preflight(self, global_batch: int | None = None, *, world: int = 1, rows: int = 8) -> Preflight:
        """Prepare `rows` samples, evenly spread over the dataset, and report the result.

        With `global_batch` (rows of a step over all `world` ranks) the report has the size of a rank's batch.
        Raises PreflightError, with the cause and the fix, if no sample can be prepared or if four batches do
        not fit in this machine's free memory; raises ConfigurationError for a batch smaller than the world.

        Example:
            print(ds.preflight(global_batch=1024, world=8))
        """
        from meshsdk.datasets.preflight import preflight

        return preflight(self, global_batch, world=world, rows=rows)

    def as_torch(self) -> TorchDataset[dict[str, Any]]:
        """Return this dataset, typed as a torch Dataset.

        Type checkers reject `DataLoader(ds, batch_size=8)` without it. A `mesh.Loader` needs neither.
        """
        return cast("TorchDataset[dict[str, Any]]", self)

    if not TYPE_CHECKING:  # otherwise type checkers would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, with a hint for methods of other libraries that a Loader replaces."""
            hint = f": {_LOADERS[name]}" if name in _LOADERS else ""
            raise AttributeError(f"a Dataset has no attribute {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        ops = "".join(f".{op_text(op)}" for op in self.ops)
        pack = "" if self.packing is None else f".pack(length={self.packing['length']})"
        mix = "" if self.mixing is None else f".mix({', '.join(map(str, self.mixing.parts))})"
        samples, fields = self.snapshot.samples, ", ".join(self.fields)
        epoch = f".at_epoch({self.epoch})" if self.epoch else ""
        return f"Dataset({self.snapshot.source}, {samples} samples, {fields}){mix}{ops}{pack}{epoch}"


def mix(
    *datasets: Dataset,
    weights: Sequence[Weight] | None = None,
    schedule: Sequence[Stage] = (),
    positions: int | None = None,
    block: int = BLOCK,
    deadline: float = 600.0,
) -> Dataset:
    """Mix several datasets with the same fields and ops into one, sampled by weight.

    In every block of positions each dataset has exactly its share, shuffled within the block. A dataset of n
    samples that is drawn K times in an epoch yields each sample ⌊K/n⌋ or ⌈K/n⌉ times; the next epoch
    continues with the samples that were drawn less often. `ds[i]` and `len` of the mix count all samples, one
    dataset after the other.

    Arguments:
        datasets: two or more.
        weights: one number per dataset, such as [3, 1]. Default: proportional to the sizes, so that an epoch
            has every sample once.
        schedule: stages with other weights later in the training.
        positions: length of an epoch. Default: the number of samples.
        block: number of positions in which the shares are exact; use `block=global_batch` to have them in
            every batch.
        deadline: seconds for which an unavailable server is retried.

    Raises ConfigurationError.

    Example:
        ds = mesh.mix(web, books, weights=[3, 1], schedule=[mesh.Stage([1, 1], epoch=2)])
    """
    ops = _common_ops(datasets)
    if positions == 0:
        raise ConfigurationError(
            "positions=0: an epoch needs at least 1 position; leave it out to have one per sample"
        )
    given = [dataset.snapshot.samples for dataset in datasets] if weights is None else weights
    stages = staged(given, schedule, len(datasets))
    first = datasets[0]
    change = {"concat": [dataset.snapshot.hash for dataset in datasets[1:]]}
    snapshot = derive_snapshot(first.client.transport, first.snapshot, change, deadline)
    parts = tuple(dataset.snapshot.samples for dataset in datasets)
    made = MixSpec(parts, stages, 0 if positions is None else positions, block)
    mixed = Dataset(first.client, snapshot, ops, first.epoch, None, made)
    if all(stage.step is None for stage in stages):
        mixed.spec()  # reports invalid numbers now
    return mixed


def _common_ops(datasets: Sequence[Dataset]) -> tuple[OpSpec, ...]:
    """Check that the datasets can be mixed, and return their common ops. Raises ConfigurationError."""
    other = next((given for given in datasets if not isinstance(given, Dataset)), None)
    if len(datasets) < 2 or other is not None:
        given = "" if other is None else f"; got {type(other).__name__}"
        raise ConfigurationError(
            f"mix takes two or more datasets, such as mesh.mix(web, books, weights=[3, 1]){given}"
        )
    first = datasets[0]
    for number, dataset in enumerate(datasets):
        if dataset.packing is not None or dataset.mixing is not None:
            raise ConfigurationError(
                f"dataset {number} is already packed or mixed: mix all datasets in one call, then pack"
            )
        if dataset.ops != first.ops:
            raise ConfigurationError(
                f"dataset {number} has other ops than the first: map after mixing, with "
                "mesh.mix(...).map(...)"
            )
        if sorted(dataset.fields) != sorted(first.fields):
            raise ConfigurationError(
                f"dataset {number} has the fields {', '.join(dataset.fields)}, the first "
                f"{', '.join(first.fields)}: select and rename until all have the same"
            )
    return first.ops

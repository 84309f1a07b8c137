"""Options of `mesh view create`: shard layouts, and views of samples (`--batches`, `--zarr`).

Law: parses options only; the node validates a layout, and its errors name the field. Samples are named as
in `mesh.open` and in a plan's ops.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from meshsdk.admin import views
from meshsdk.client.native_api import pin_snapshot, register_plan
from meshsdk.datasets.dataset import Dataset
from meshsdk.datasets.fields import check_source, guess_fields, select_fields
from meshsdk.errors import ConfigurationError
from meshwire.plan.plan_spec import parse_spec
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshsdk.client.s3_client import Client
    from meshwire.plan.plan_spec import OpSpec


_SHARD_OPTIONS: Final = (
    click.option("--shards", type=int, metavar="N", help="Shards of N samples instead of objects.  [1000]"),
    click.option("--shard-size", type=int, metavar="BYTES", help="Shards of about this many bytes."),
    click.option("--tfrecord", is_flag=True, help="Shards are TFRecords of tf.Example, not tars."),
    click.option(
        "--feature",
        "features",
        multiple=True,
        metavar="EXT=KIND",
        help="Type in a TFRecord, int64 or float; repeatable.",
    ),
    click.option("--archives", is_flag=True, help="Regroup the members of tars, zips and so on."),
    click.option(
        "--where", default="", metavar="EXPR", help="Only samples for which it is true: 'size > 10000'."
    ),
    click.option("--sort", default="", metavar="EXPR", help="Sort by its value: 'part(stem, \"-\", 1)'."),
    click.option("--group", default="", metavar="EXPR", help="One folder per value: 'cls'."),
    click.option("--split", multiple=True, metavar="NAME=SHARE", help="Parts, one folder each; repeatable."),
    click.option(
        "--split-by", default="", metavar="EXPR", help="Samples with the same value are in the same part."
    ),
)


@dataclass(frozen=True)
class ShardChoices:
    """The values of the shard options."""

    shards: int | None
    shard_size: int | None
    tfrecord: bool
    features: Sequence[str]
    archives: bool
    where: str
    sort: str
    group: str
    split: Sequence[str]
    split_by: str

    @property
    def meant(self) -> bool:
        """Whether the view is one of shards."""
        return any(value not in (None, False, "", ()) for value in vars(self).values())

    def document(self, match: Sequence[str], prefix: str, shuffle: int | None) -> dict[str, Any]:
        """Return the view document. Raises ConfigurationError."""
        return views.shards_view(
            count=self.shards,
            size=self.shard_size,
            match=match,
            prefix=prefix,
            shuffle=shuffle,
            split=dict(map(_parse_share, self.split)),
            format="tfrecord" if self.tfrecord else "tar",
            samples="archives" if self.archives else "objects",
            where=self.where,
            sort=self.sort,
            group=self.group,
            split_by=self.split_by,
            features=dict(map(_feature, self.features)),
        )


def shard_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of shards, and pass `shards`, a ShardChoices."""

    @functools.wraps(command)
    def wrapped(*args: Any, **given: Any) -> Any:
        mine = {field.name: given.pop(field.name) for field in fields(ShardChoices)}
        return command(*args, shards=ShardChoices(**mine), **given)

    for option in reversed(_SHARD_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def shards_summary(view: Mapping[str, Any]) -> str:
    """Describe a layout in one line."""
    size = view.get("size")
    parts = [f"{size} bytes each" if size else f"{view.get('count')} samples each"]
    parts += [f"as {view['format']}"] if "format" in view else []
    parts += [f"of {view['samples']}"] if "samples" in view else []
    parts += [f"{name} {view[name]}" for name in ("where", "group", "sort", "split_by") if view.get(name)]
    parts += [f"shuffled by {view['shuffle']}"] if view.get("shuffle") is not None else []
    parts += [f"split {' '.join(view['split'])}"] if view.get("split") else []
    return ", ".join(parts)


def _parse_share(text: str) -> tuple[str, float]:
    name, equals, share = text.partition("=")
    try:
        return name, float(share if equals else "")
    except ValueError:
        raise ConfigurationError(f"--split {text!r}: expected NAME=SHARE, such as train=0.9") from None


def _feature(text: str) -> tuple[str, str]:
    name, equals, kind = text.partition("=")
    if not name or not equals:
        raise ConfigurationError(f"--feature {text!r}: expected EXT=KIND, such as cls=int64")
    return name, kind


F = TypeVar("F", bound="Callable[..., Any]")


@dataclass(frozen=True, slots=True)
class SampleChoices:
    """The values of the sample options."""

    batches: int | None
    world: int
    epochs: int
    plan: str
    zarr: bool
    chunk: int
    shard_chunks: int
    follow: bool
    fields: tuple[str, ...]
    seed: int | None
    on_bad: str | None

    @property
    def meant(self) -> bool:
        """Whether the view is one of samples."""
        return self.batches is not None or self.zarr


_SAMPLE_OPTIONS = (
    click.option("--batches", type=int, metavar="ROWS", help="Batches as .safetensors instead of objects."),
    click.option("--world", type=int, default=1, metavar="RANKS", help="Ranks that share a batch.  [1]"),
    click.option("--epochs", type=int, default=1, metavar="N", help="Epochs of batches.  [1]"),
    click.option("--plan", default="", metavar="HASH", help="Batches of a registered plan; leave out --op."),
    click.option("--zarr", is_flag=True, help="One Zarr v3 array per field instead of objects."),
    click.option("--chunk", type=int, default=64, metavar="SAMPLES", help="Samples per Zarr chunk.  [64]"),
    click.option("--shard-chunks", type=int, default=0, metavar="N", help="Chunks per Zarr shard.  [none]"),
    click.option("--follow", is_flag=True, help="Zarr rows follow the source.  [pinned now]"),
    click.option(
        "--field",
        "fields",
        multiple=True,
        metavar="NAME=EXT[;EXT…]",
        help="A field of the samples, or NAME=@class for the folder; repeatable.  [guessed]",
    ),
    click.option("--seed", type=int, metavar="SEED", help="Seed of random ops.  [--shuffle's, else 0]"),
    click.option(
        "--on-bad",
        type=click.Choice(["raise", "mask", "substitute", "drop"]),
        help="What replaces a bad sample.  [raise; substitute in shuffled batches]",
    ),
)


def sample_options(command: F) -> F:
    """Add the options of `SampleChoices` to a command."""
    for option in reversed(_SAMPLE_OPTIONS):
        command = option(command)
    return command


def sample_view(
    client: Client,
    bucket: str,
    prefix: str,
    ops: Sequence[Mapping[str, Any]],
    choices: SampleChoices,
    shuffle: int | None,
) -> dict[str, Any]:
    """Return the view document. Raises ConfigurationError, MeshError (rejected by the node)."""
    if choices.batches is not None and choices.zarr:
        raise ConfigurationError("give --batches or --zarr, not both")
    if choices.plan:
        if choices.batches is None or ops or choices.fields or shuffle is not None:
            raise ConfigurationError("--plan can be combined only with --batches ROWS, --world and --epochs")
        return views.batches_view(choices.plan, choices.batches, world=choices.world, epochs=choices.epochs)
    source = check_source(f"s3://{bucket}/{prefix}")
    given = dict(map(_parse_field, choices.fields))
    fields = select_fields(given) if given else guess_fields(client, source)
    placed = [_place_op(op, fields) for op in ops]
    if choices.zarr:
        if shuffle is not None:
            raise ConfigurationError(
                "--shuffle applies to --batches; the rows of --zarr are the samples in order"
            )
        return views.zarr_view(
            fields,
            placed,
            prefix=source.removeprefix(f"s3://{bucket}/"),
            chunk=choices.chunk,
            shard=choices.shard_chunks,
            follow=choices.follow,
            seed=choices.seed or 0,
            on_bad=choices.on_bad or "raise",
        )
    assert choices.batches is not None
    dataset = Dataset(client, pin_snapshot(client.transport, source, "auto", fields, None))
    dataset = dataset.map(*_specs(placed))
    seed = choices.seed if choices.seed is not None else shuffle or 0
    ordered = shuffle is None
    on_bad = choices.on_bad or ("raise" if ordered else "substitute")
    spec = dataset.spec(seed=seed, shuffle=not ordered, on_bad=on_bad)
    plan = register_plan(client.transport, dataset.snapshot.hash, spec)
    return views.batches_view(plan.hash, choices.batches, world=choices.world, epochs=choices.epochs)


def _specs(placed: Sequence[Mapping[str, Any]]) -> tuple[OpSpec, ...]:
    try:
        return parse_spec({"ops": list(placed)}).ops
    except PlanError as error:
        raise ConfigurationError(str(error)) from error


def _parse_field(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise ConfigurationError(f"--field {text!r}: expected NAME=EXT, as image=jpg;jpeg or label=@class")
    return name, value


def _place_op(op: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an op with its field: `field=NAME` among its arguments (`field=image,mask` for several), or
    the only field with bytes."""
    args = dict(op.get("args", {}))
    field = args.pop("field", None)
    if field is None:
        held = [name for name, spec in fields.items() if "class" not in spec]
        if len(held) != 1:
            raise ConfigurationError(
                f"--op {op['op']!r}: name the field it applies to, such as '{op['op']} field={held[0]}'; "
                f"there are {', '.join(held)}"
            )
        field = held[0]
    several = [name.strip() for name in str(field).split(",")]
    where = {"field": field} if len(several) == 1 else {"fields": several}
    version = {"version": op["version"]} if op.get("version") else {}
    return {"op": op["op"], **where, "args": args, **version}

"""`mesh view create --batches` and `--zarr`: views of samples instead of objects.

Law: samples are named as everywhere else (`mesh.open`'s fields, a plan's ops); what is wrong is said before
anything is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from meshsdk import views
from meshsdk.datasets import Dataset
from meshsdk.errors import ConfigurationError
from meshsdk.guessing import guess_fields
from meshsdk.native import pin_snapshot, register_plan
from meshsdk.selecting import check_source, select_fields
from meshwire.plans import PlanError, parse_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshsdk.client import Client
    from meshwire.plans import OpSpec

F = TypeVar("F", bound="Callable[..., Any]")


@dataclass(frozen=True, slots=True)
class SampleChoices:
    """What was said on the command line about samples."""

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


_OPTIONS = (
    click.option("--batches", type=int, metavar="ROWS", help="Not objects but batches, as .safetensors."),
    click.option("--world", type=int, default=1, metavar="RANKS", help="Batches cut for so many ranks.  [1]"),
    click.option("--epochs", type=int, default=1, metavar="N", help="Epochs of batches.  [1]"),
    click.option("--plan", default="", metavar="HASH", help="Batches of a registered plan; leave out --op."),
    click.option("--zarr", is_flag=True, help="Not objects but one Zarr v3 array a field."),
    click.option("--chunk", type=int, default=64, metavar="SAMPLES", help="Samples of a Zarr chunk.  [64]"),
    click.option("--shard-chunks", type=int, default=0, metavar="N", help="Chunks of a Zarr shard.  [none]"),
    click.option("--follow", is_flag=True, help="Zarr rows follow the source.  [pinned now]"),
    click.option(
        "--field",
        "fields",
        multiple=True,
        metavar="NAME=EXT[;EXT…]",
        help="A field of the samples, or NAME=@class for the folder; repeat.  [by the first keys]",
    ),
    click.option("--seed", type=int, metavar="SEED", help="Of ops that draw.  [--shuffle's, else 0]"),
    click.option(
        "--on-bad",
        type=click.Choice(["raise", "mask", "substitute", "drop"]),
        help="What stands for a bad sample.  [raise; substitute in shuffled batches]",
    ),
)


def sample_options(command: F) -> F:
    """The options of `SampleChoices`, on a command."""
    for option in reversed(_OPTIONS):
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
    """The document of the view. Raises ConfigurationError, MeshError (the node's refusal)."""
    if choices.batches is not None and choices.zarr:
        raise ConfigurationError("give --batches or --zarr, not both")
    if choices.plan:
        if choices.batches is None or ops or choices.fields or shuffle is not None:
            raise ConfigurationError("--plan says all but --batches ROWS, --world and --epochs")
        return views.batches_view(choices.plan, choices.batches, world=choices.world, epochs=choices.epochs)
    source = check_source(f"s3://{bucket}/{prefix}")
    given = dict(map(_field, choices.fields))
    fields = select_fields(given) if given else guess_fields(client, source)
    placed = [_placed(op, fields) for op in ops]
    if choices.zarr:
        if shuffle is not None:
            raise ConfigurationError("--shuffle is for --batches: rows of --zarr are the samples in order")
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


def _field(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise ConfigurationError(f"--field {text!r}: expected NAME=EXT, as image=jpg;jpeg or label=@class")
    return name, value


def _placed(op: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """An op with its field: `field=NAME` among its arguments (`field=image,mask` for several), or the only
    one that has bytes."""
    args = dict(op.get("args", {}))
    field = args.pop("field", None)
    if field is None:
        held = [name for name, spec in fields.items() if "class" not in spec]
        if len(held) != 1:
            raise ConfigurationError(
                f"--op {op['op']!r}: say which field it works on, as '{op['op']} field={held[0]}'; "
                f"there are {', '.join(held)}"
            )
        field = held[0]
    several = [name.strip() for name in str(field).split(",")]
    where = {"field": field} if len(several) == 1 else {"fields": several}
    version = {"version": op["version"]} if op.get("version") else {}
    return {"op": op["op"], **where, "args": args, **version}

"""`mesh schema`, `mesh stats`, `mesh preflight`: what a dataset's rows are, what it holds, if it works."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from meshsdk.cli.benching import OP_HELP, parse_op
from meshsdk.cli.places import RemoteType
from meshsdk.cli.reading import KIND_OPTION, chosen, parse_fields
from meshsdk.cli.running import shared_options
from meshsdk.errors import ConfigurationError
from meshsdk.sizes import human

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshsdk.cli.places import Remote
    from meshsdk.cli.running import Session, Steps
    from meshsdk.client import Client
    from meshsdk.datasets import Dataset
    from meshsdk.opening import Kind
    from meshwire.snapshotstats import Spread

_PATIENCE = 1.0  # seconds: a preflight is there to say at once that a server is not
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Opening:
    """The dataset that a command line names; calling it opens it, in so many `steps`, and tells them."""

    open: Callable[[Client, Steps], Dataset]
    steps: int

    def __call__(self, client: Client, done: Steps) -> Dataset:
        client.transport.watch = done.reached
        return self.open(client, done)


def dataset_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds URL, --field, --kind, --filter and --op, and passes an `Opening`."""

    @click.argument("url", type=RemoteType())
    @click.option("--field", "fields", multiple=True, help="NAME=EXT[;EXT], NAME=@class [default: guessed].")
    @KIND_OPTION
    @click.option("--filter", "condition", help="Only samples for which this expression holds.")
    @click.option("--snapshot", help="What was pinned before, by its hash, in place of what is there now.")
    @click.option("--op", "ops", multiple=True, help=OP_HELP)
    @functools.wraps(command)
    def wrapped(
        session: Session,
        /,
        *,
        url: Remote,
        fields: Sequence[str],
        kind: Kind,
        condition: str | None,
        snapshot: str | None,
        ops: Sequence[str],
        **rest: Any,
    ) -> Any:
        def opened(client: Client, done: Steps) -> Dataset:
            from meshsdk.opening import open as open_dataset

            made = [parse_op(op) for op in ops]
            if snapshot is not None and (fields or kind != "auto"):
                raise ConfigurationError(
                    "--snapshot has its fields and kind already: leave out --field, --kind"
                )
            wanted = parse_fields(fields) if fields else None
            ds = open_dataset(str(url), wanted, kind=kind, snapshot=snapshot, client=client)
            done(f"{ds.snapshot.samples} samples are pinned")
            return chosen(ds, condition, done).map(*made)

        return command(session, Opening(opened, 1 if condition is None else 2), **rest)

    return shared_options(wrapped)


@click.command()
@dataset_options
def schema(session: Session, opened: Opening) -> None:
    """Writes the fields of a dataset's rows, as its ops leave them: dtype and shape, or that rows differ in
    shape ("ragged").

    Shapes are those of the first sample; files that must be read for it (archives, JSONL, TFRecord, MDS,
    Parquet) are indexed once, and a bar tells how far that is.

    \b
    mesh schema s3://photos/train/
    mesh schema s3://photos/train/ --op decode:image --op center_crop:image:224
    mesh schema s3://corpus/v1/ --kind lines --field text=jsonl --op 'json:text path=body'
    mesh schema s3://photos/train/ --snapshot HASH --json
    """
    with session.client() as client, session.steps("schema", opened.steps + 1) as done:
        found = opened(client, done).schema()
        done("the first sample is prepared")
    for name, field in found.items():
        shape = None if field.shape is None else list(field.shape)
        session.show(f"{name}: {field}", field=name, dtype=field.dtype, shape=shape)


@click.command()
@dataset_options
def stats(session: Session, opened: Opening) -> None:
    """Writes what a dataset holds: samples, bytes a field, samples a class and a shard.

    It comes of the snapshot alone: no sample is read, and ops do not matter.

    \b
    mesh stats s3://photos/train/
    mesh stats s3://photos/train/ --filter 'label == "cat"' --json
    """
    with session.client() as client, session.steps("stats", opened.steps + 1) as done:
        ds = opened(client, done)
        found = ds.stats()
        done("they are counted")
    lines = [
        f"{ds.snapshot.source}: {found.samples} samples, {human(found.bytes)} in {found.objects} objects, "
        f"{ds.snapshot.skipped} skipped",
    ]
    if ds.snapshot.shards > 1:
        lines.append(f"  samples a shard: {_spread(found.shards, str)}")
    for name, spread in found.sizes.items():
        empty = f"; {found.empty[name]} are empty" if found.empty[name] else ""
        lines.append(f"  {name}: {_spread(spread, human)}{empty}")
    for name, counts in found.classes.items():
        rare = sorted(counts.items(), key=lambda item: (item[1], item[0]))
        told = ", ".join(f"{label} {count}" for label, count in rare[:_SHOWN])
        lines.append(f"  {name}: {len(counts)} classes, the rarest first: {told}")
    record = found.document() | {"skipped": ds.snapshot.skipped, "snapshot": ds.snapshot.hash}
    session.show("\n".join(lines), source=ds.snapshot.source, **record)


def _spread(spread: Spread, told: Callable[[int], str]) -> str:
    return (
        f"{told(spread.least)} to {told(spread.most)}, half up to {told(spread.median)}, "
        f"99 % up to {told(spread.p99)}"
    )


@click.command()
@click.option("-b", "--batch", type=click.IntRange(1), help="The global batch, to see whether it fits.")
@click.option("--world", type=click.IntRange(1), default=1, help="Ranks that share it [1].")
@click.option("-n", "--rows", type=click.IntRange(1, 512), default=8, help="Samples to prepare [8].")
@dataset_options
def preflight(session: Session, opened: Opening, batch: int | None, world: int, rows: int) -> None:
    """Prepares a few samples from all over a dataset and says whether a job with it would work; if not, why,
    and what to do.

    \b
    mesh preflight s3://photos/train/ --op decode:image --op center_crop:image:224 -b 1024 --world 8
    """
    with session.client(_PATIENCE) as client, session.steps("preflight", opened.steps + 1) as done:
        found = opened(client, done).preflight(batch, world=world, rows=rows)
        done(f"{rows} of them are tried")
    session.show(
        str(found),
        samples=found.samples,
        fields={name: str(field) for name, field in found.schema.items()},
        rows=found.rows,
        bad=list(found.bad),
        row_bytes=found.row_bytes,
        batch_bytes=found.batch_bytes,
        seconds=round(found.seconds, 4),
        notes=list(found.notes),
    )

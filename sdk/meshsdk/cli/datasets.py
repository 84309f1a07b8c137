"""`mesh schema`, `stats`, `preflight`, `split` and `mix`: inspect, check, split and mix datasets.

Law: read-only except that the parts of a split are snapshots pinned on the node, opened again by their
hash.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from meshsdk.byte_sizes import format_size
from meshsdk.cli.bench import OP_HELP, parse_op
from meshsdk.cli.cat import KIND_OPTION, filtered_dataset, parse_fields
from meshsdk.cli.command_base import shared_options
from meshsdk.cli.documents import whole_hash
from meshsdk.cli.path_arguments import Remote, RemoteType, parse_location
from meshsdk.errors import ConfigurationError
from meshwire.plan.mix import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshsdk.cli.command_base import Session, Steps
    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset
    from meshsdk.open_dataset import Kind
    from meshwire.dataset.snapshot_stats import Spread


_PATIENCE = 1.0  # seconds; a preflight should report an unreachable server at once
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Opening:
    """The dataset given on a command line; calling it opens the dataset in `steps` steps and reports them."""

    open: Callable[[Client, Steps], Dataset]
    steps: int

    def __call__(self, client: Client, done: Steps) -> Dataset:
        client.transport.on_progress = done.reached
        return self.open(client, done)


def dataset_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add URL, --field, --kind, --filter, --snapshot and --op, and pass an `Opening`."""

    @click.argument("url", type=RemoteType())
    @click.option("--field", "fields", multiple=True, help="NAME=EXT[;EXT], NAME=@class [default: guessed].")
    @KIND_OPTION
    @click.option("--filter", "condition", help="Only samples for which this expression is true.")
    @click.option(
        "--snapshot",
        help="Hash of an existing snapshot, or its first digits, to use instead of the current content.",
    )
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
            from meshsdk.open_dataset import open as open_dataset

            made = [parse_op(op) for op in ops]
            if snapshot is not None and (fields or kind != "auto"):
                raise ConfigurationError(
                    "a snapshot already has its fields and kind; leave out --field and --kind"
                )
            wanted = parse_fields(fields) if fields else None
            pinned = None if snapshot is None else whole_hash(client, "snapshots", snapshot)
            ds = open_dataset(str(url), wanted, kind=kind, snapshot=pinned, client=client)
            done(f"{ds.snapshot.samples} samples pinned")
            return filtered_dataset(ds, condition, done).map(*made)

        return command(session, Opening(opened, 1 if condition is None else 2), **rest)

    return shared_options(wrapped)


@click.command()
@dataset_options
def schema(session: Session, opened: Opening) -> None:
    """Show the fields of a dataset's rows with ops applied: dtype and shape, or that rows differ in shape
    ("ragged").

    Shapes are those of the first sample; files that must be read for it (archives, JSONL, TFRecord, MDS,
    Parquet) are indexed once, with a progress bar.

    \b
    mesh schema s3://photos/train/
    mesh schema s3://photos/train/ --op decode:image --op center_crop:image:224
    mesh schema s3://corpus/v1/ --kind lines --field text=jsonl --op 'json:text path=body'
    mesh schema s3://photos/train/ --snapshot HASH --json
    """
    with session.make_client() as client, session.steps("schema", opened.steps + 1) as done:
        found = opened(client, done).schema()
        done("first sample prepared")
    for name, field in found.items():
        shape = None if field.shape is None else list(field.shape)
        mode = {"decoded": field.decoded} if field.decoded else {}
        sound = {"rate": field.rate, "channels": field.channels} if field.rate else {}
        session.show(f"{name}: {field}", field=name, dtype=field.dtype, shape=shape, **mode, **sound)


@click.command()
@dataset_options
def stats(session: Session, opened: Opening) -> None:
    """Show what a dataset holds: samples, bytes per field, samples per class and shard.

    Computed from the snapshot alone: no sample is read, and ops do not matter.

    \b
    mesh stats s3://photos/train/
    mesh stats s3://photos/train/ --filter 'label == "cat"' --json
    """
    with session.make_client() as client, session.steps("stats", opened.steps + 1) as done:
        ds = opened(client, done)
        found = ds.stats()
        done("samples counted")
    lines = [
        f"{ds.snapshot.source}: {found.samples} samples, "
        f"{format_size(found.bytes)} in {found.objects} object{'' if found.objects == 1 else 's'}, "
        f"{ds.snapshot.skipped} skipped",
    ]
    if ds.snapshot.shards > 1:
        lines.append(f"  samples per shard: {_spread(found.shards, str)}")
    for name, spread in found.sizes.items():
        empty = f"; {found.empty[name]} are empty" if found.empty[name] else ""
        lines.append(f"  {name}: {_spread(spread, format_size)}{empty}")
    for name, counts in found.classes.items():
        rare = sorted(counts.items(), key=lambda item: (item[1], item[0]))
        examples = ", ".join(f"{label} {count}" for label, count in rare[:_SHOWN])
        lines.append(f"  {name}: {len(counts)} classes, rarest first: {examples}")
    record = found.document() | {"skipped": ds.snapshot.skipped, "snapshot": ds.snapshot.hash}
    session.show("\n".join(lines), source=ds.snapshot.source, **record)


def _spread(spread: Spread, told: Callable[[int], str]) -> str:
    return (
        f"{told(spread.least)} to {told(spread.most)}, median {told(spread.median)}, p99 {told(spread.p99)}"
    )


@click.command()
@click.option("-b", "--batch", type=click.IntRange(1), help="Global batch size, to check whether it fits.")
@click.option("--world", type=click.IntRange(1), default=1, help="Ranks that share it [1].")
@click.option("-n", "--rows", type=click.IntRange(1, 512), default=8, help="Samples to prepare [8].")
@dataset_options
def preflight(session: Session, opened: Opening, batch: int | None, world: int, rows: int) -> None:
    """Prepare a few samples from all over a dataset and report whether a job with it would work; if not,
    why, and what to do.

    \b
    mesh preflight s3://photos/train/ --op decode:image --op center_crop:image:224 -b 1024 --world 8
    """
    with session.make_client(_PATIENCE) as client, session.steps("preflight", opened.steps + 1) as done:
        found = opened(client, done).preflight(batch, world=world, rows=rows)
        done(f"{rows} samples tried")
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
        order=str(found.order),
        **({} if found.disk_cost is None else {"disk_cost": asdict(found.disk_cost)}),
    )


_DEADLINE = 600.0  # seconds to wait for an unavailable node


@click.command()
@click.option("--part", "parts", multiple=True, help="NAME=SHARE, such as train=0.9; repeatable. [required]")
@click.option("--by", default="name", show_default=True, help="Samples with the same value stay together.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the hash.")
@dataset_options
@click.argument("bare", nargs=-1, metavar="")  # shares without --part
def split(
    session: Session, opened: Opening, bare: Sequence[str], parts: Sequence[str], by: str, seed: int
) -> None:
    """Split a dataset into parts, such as train and val. A hash of a sample's name (or of --by) determines
    its part, so it stays there when samples are added.

    Each part is pinned; the hash of its snapshot opens it: mesh.open(URL, snapshot=HASH), or --snapshot
    HASH here.

    \b
    mesh split s3://photos/train/ --part train=0.8 --part val=0.2
    mesh split s3://scans/ --part train=0.9 --part test=0.1 --by 'part(name, "_", 0)'
    mesh stats s3://photos/train/ --snapshot HASH
    """
    shares = _part_shares(bare, parts)
    from meshsdk.datasets.split_mix import split as cut

    with session.make_client() as client, session.logged_steps("split", opened.steps + len(shares)) as done:
        ds = opened(client, done)
        found = cut(ds, shares, by, seed, _DEADLINE, lambda name: done(f"{name} pinned"))
    for name, part in found.items():
        share = len(part) / len(ds)
        session.show(
            f"{name}: {len(part)} samples, {share:.1%}, snapshot {part.snapshot.hash}",
            part=name,
            samples=len(part),
            share=round(share, 6),
            snapshot=part.snapshot.hash,
        )
    if left := len(ds) - sum(map(len, found.values())):
        rest = 1 - sum(Fraction(str(share)) for share in shares.values())
        session.tell(
            f"{left} of {len(ds)} samples are in no part, because the shares add up to less than 1; for a "
            f"part of them, add --part rest={float(rest):g}"
        )


def _part_shares(bare: Sequence[str], parts: Sequence[str]) -> dict[str, float]:
    """Return the share of each part. Raises ConfigurationError, with the options to write."""
    if bare or not parts:
        given = [*parts, *bare] if all("=" in text for text in bare) else []
        write = _part_options(given or ["train=0.9", "val=0.1"])
        raise ConfigurationError(f"split: each part is an option of its own: write {write}")
    shares = dict(_share("--part", part, "train=0.9") for part in parts)
    if len(shares) < len(parts):
        raise ConfigurationError("--part: two parts have the same name")
    from meshsdk.datasets.split_mix import proportional_fractions

    total = sum(Fraction(str(share)) for share in shares.values())
    if total > 1 or min(shares.values()) <= 0:
        suggested = proportional_fractions(shares) or {"train": 0.9, "val": 0.1}
        write = _part_options([f"{name}={share:g}" for name, share in suggested.items()])
        raise ConfigurationError(
            f"{_part_options(parts)}: each share must be above 0 and their sum at most 1: write {write}"
        )
    return shares


def _part_options(parts: Sequence[str]) -> str:
    return " ".join(f"--part {part}" for part in parts)


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="URL=WEIGHT…")
@click.option("--field", "fields", multiple=True, help="NAME=EXT[;EXT], NAME=@class [default: guessed].")
@KIND_OPTION
@click.option("--positions", type=click.IntRange(1), help="Positions per epoch [default: number of samples].")
@click.option(
    "--block",
    type=click.IntRange(2),
    default=BLOCK,
    show_default=True,
    help="Positions in which shares are exact.",
)
@click.option(
    "--epochs", type=click.IntRange(1, 10_000), default=1, show_default=True, help="Epochs to count."
)
@shared_options
def mix(
    session: Session,
    sources: Sequence[str],
    fields: Sequence[str],
    kind: Kind,
    positions: int | None,
    block: int,
    epochs: int,
) -> None:
    """Show what epochs of several datasets, drawn by weight, would hold: positions per dataset, and how
    often each sample appears. Nothing is read or stored; a program draws with mesh.mix(…, weights=…).

    \b
    mesh mix s3://web/=0.7 s3://books/=0.3
    mesh mix s3://photos/=3 s3://sketches/=1 --positions 1000000 --epochs 10
    """
    from meshsdk.datasets.dataset import mix as mixed
    from meshsdk.open_dataset import open as open_dataset
    from meshwire.plan.mix import draw_counts, parse_mix

    named = [_share("mix", source, "s3://web/=0.7") for source in sources]
    urls = [_folder(url) for url, _ in named]
    with session.make_client() as client, session.logged_steps("mix", len(urls) + 2) as done:
        chosen = parse_fields(fields) if fields else None
        parts = []
        client.transport.on_progress = done.reached
        for url in urls:
            parts.append(open_dataset(url, chosen, kind=kind, client=client))
            done(f"{url} pinned")
        ds = mixed(*parts, weights=[weight for _, weight in named], positions=positions, block=block)
        done("datasets mixed")
        spec = parse_mix(ds.spec()["mix"])
        length = spec.positions or ds.snapshot.samples
        drawn_each = (draw_counts(spec, length, epoch) for epoch in range(epochs))
        counts = [sum(each) for each in zip(*drawn_each, strict=True)]
        done("epochs counted")
    every = "an epoch" if epochs == 1 else f"{epochs} epochs"
    session.show(
        f"{every} of {length} positions, exact in each {block}",
        type="mix",
        positions=length,
        block=block,
        epochs=epochs,
    )
    for url, part, count in zip(urls, parts, counts, strict=True):
        samples = part.snapshot.samples
        least, most = count // samples, -(-count // samples)
        times = f"{least} or {most} times" if least < most else "once" if least == 1 else f"{least} times"
        share = count / (length * epochs)
        session.show(
            f"  {url}: {count} positions, {share:.2%}; each of {samples} samples {times}",
            type="part",
            source=url,
            positions=count,
            samples=samples,
            least=least,
            most=most,
        )


def _share(what: str, text: str, example: str) -> tuple[str, float]:
    name, equals, share = text.rpartition("=")
    try:
        number = float(share)
    except ValueError:
        number = -1.0
    if not equals or not name or not number >= 0:
        raise ConfigurationError(f"{what} {text}: write it like {example}")
    return name, number


def _folder(text: str) -> str:
    place = parse_location(text)
    if not isinstance(place, Remote):
        raise ConfigurationError(f"{text!r} is not in the store; write s3://BUCKET/FOLDER=WEIGHT")
    return str(place)

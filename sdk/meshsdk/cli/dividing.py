"""`mesh split` and `mesh mix`: a dataset cut into named parts, and what an epoch of several would hold.

Law: both only ask; the parts are snapshots, pinned on the node, and opened again by their hash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from meshsdk.cli.inspecting import dataset_options
from meshsdk.cli.places import Remote, parse_place
from meshsdk.cli.reading import KIND_OPTION, parse_fields
from meshsdk.cli.running import shared_options
from meshsdk.errors import ConfigurationError
from meshwire.mixes import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.cli.inspecting import Opening
    from meshsdk.cli.running import Session
    from meshsdk.opening import Kind

_DEADLINE = 600.0  # seconds an unavailable node is waited for


@click.command()
@click.option("--part", "parts", multiple=True, required=True, help="NAME=SHARE, as train=0.9; repeat.")
@click.option("--by", default="name", show_default=True, help="What has one value of this stays together.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the hash.")
@dataset_options
def split(session: Session, opened: Opening, parts: Sequence[str], by: str, seed: int) -> None:
    """Cuts a dataset into parts, such as train and val: where a sample goes follows from a hash of its name
    (or of --by), so it stays there when others come.

    Each part is pinned; its snapshot's hash opens it: mesh.open(URL, snapshot=HASH), or --snapshot HASH here.

    \b
    mesh split s3://photos/train/ --part train=0.8 --part val=0.2
    mesh split s3://scans/ --part train=0.9 --part test=0.1 --by 'part(name, "_", 0)'
    mesh stats s3://photos/train/ --snapshot HASH
    """
    shares = dict(_share("--part", part, "train=0.9") for part in parts)
    if len(shares) < len(parts):
        raise ConfigurationError("--part: two have one name")
    from meshsdk.splitting import split as cut

    with session.client() as client, session.told_steps("split", opened.steps + len(shares)) as done:
        ds = opened(client, done)
        found = cut(ds, shares, by, seed, _DEADLINE, lambda name: done(f"{name} is cut"))
    for name, part in found.items():
        share = len(part) / len(ds)
        session.show(
            f"{name}: {len(part)} samples, {share:.1%}, snapshot {part.snapshot.hash}",
            part=name,
            samples=len(part),
            share=round(share, 6),
            snapshot=part.snapshot.hash,
        )


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="URL=WEIGHT…")
@click.option("--field", "fields", multiple=True, help="NAME=EXT[;EXT], NAME=@class [default: guessed].")
@KIND_OPTION
@click.option("--positions", type=click.IntRange(1), help="Of an epoch [default: as many as samples].")
@click.option("--block", type=click.IntRange(2), default=BLOCK, show_default=True, help="Exact in so many.")
@click.option("--epochs", type=click.IntRange(1, 10_000), default=1, show_default=True, help="To count.")
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
    """Tells what epochs of several datasets, drawn by weight, would hold: positions of each, and how often
    its samples come. Nothing is read or kept; a program draws with mesh.mix(…, weights=…).

    \b
    mesh mix s3://web/=0.7 s3://books/=0.3
    mesh mix s3://photos/=3 s3://sketches/=1 --positions 1000000 --epochs 10
    """
    from meshsdk.mixing import mix as mixed
    from meshsdk.opening import open as open_dataset
    from meshwire.mixes import drawn, parse_mix

    named = [_share("mix", source, "s3://web/=0.7") for source in sources]
    urls = [_folder(url) for url, _ in named]
    with session.client() as client, session.told_steps("mix", len(urls) + 2) as done:
        chosen = parse_fields(fields) if fields else None
        parts = []
        client.transport.watch = done.reached
        for url in urls:
            parts.append(open_dataset(url, chosen, kind=kind, client=client))
            done(f"{url} is pinned")
        ds = mixed(*parts, weights=[weight for _, weight in named], positions=positions, block=block)
        done("they are one dataset")
        spec = parse_mix(ds.spec()["mix"])
        length = spec.positions or ds.snapshot.samples
        drawn_each = (drawn(spec, length, epoch) for epoch in range(epochs))
        counts = [sum(each) for each in zip(*drawn_each, strict=True)]
        done("epochs are counted")
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
        raise ConfigurationError(f"{what} {text}: write it as {example}")
    return name, number


def _folder(text: str) -> str:
    place = parse_place(text)
    if not isinstance(place, Remote):
        raise ConfigurationError(f"{text!r} is not in the store: write s3://BUCKET/FOLDER=WEIGHT")
    return str(place)

"""`mesh bench`: throughput of a dataset's batches, or of plain GETs.

Law: measures the real path, through the same Loader and Client as a job.
Invariant: every printed number was measured in this run; nothing is extrapolated.
"""

from __future__ import annotations

import re
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import click

from meshsdk import ops as op_constructors
from meshsdk.byte_sizes import format_size
from meshsdk.cli.cat import parse_fields
from meshsdk.cli.command_base import json_or_text, shared_options
from meshsdk.cli.path_arguments import RemoteType
from meshsdk.errors import ConfigurationError, NotFoundError
from meshwire.strict_json import suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshsdk.cli.command_base import Session
    from meshsdk.cli.path_arguments import Remote
    from meshsdk.client.s3_client import Client
    from meshsdk.loader.loader import Loader
    from meshwire.plan.plan_spec import OpSpec

OP_HELP = "OP:FIELD, OP:FIELD:SIZE or 'OP:FIELD NAME=VALUE …', in order."
_ARGUMENT = re.compile(r"\s+([A-Za-z_]\w*)=")


@click.command()
@click.argument("url", type=RemoteType())
@click.option("--field", "fields", multiple=True, help="NAME=EXT[;EXT] or NAME=@class [default: guessed].")
@click.option("--op", "ops", multiple=True, help=OP_HELP)
@click.option("-b", "--batch", type=click.IntRange(1), default=256, help="Samples per batch [256].")
@click.option("--epochs", type=click.IntRange(1), default=1, help="Passes over the dataset [1].")
@click.option("--gets", is_flag=True, help="Measure plain GETs of the objects under URL instead.")
@click.option("-c", "--concurrency", type=click.IntRange(1, 256), default=16, help="Concurrent GETs [16].")
@click.option("-n", "--requests", type=click.IntRange(1), default=2000, help="Total number of GETs [2000].")
@shared_options
def bench(
    session: Session,
    url: Remote,
    fields: Sequence[str],
    ops: Sequence[str],
    batch: int,
    epochs: int,
    gets: bool,
    concurrency: int,
    requests: int,
) -> None:
    """Measure a dataset's batches as a training job would get them, or with --gets plain reads.

    \b
    mesh bench s3://photos/train --op decode:image --op random_resized_crop:image:224 --epochs 2
    mesh bench --gets -c 16 s3://photos/train/
    """
    with session.make_client() as client:
        if gets:
            _bench_gets(session, client, url, concurrency, requests)
        else:
            _bench_loader(
                session, client, url, parse_fields(fields), [parse_op(op) for op in ops], batch, epochs
            )


def parse_op(text: str) -> OpSpec:
    """Parse `OP:FIELD`, `OP:FIELD:SIZE` or `OP:FIELD NAME=VALUE …`, with values as JSON or text, using the
    constructor of that name in `meshsdk.ops`. Raises ConfigurationError."""
    head, *more = _ARGUMENT.split(text.strip())
    name, _, rest = head.partition(":")
    field, _, size = rest.partition(":")
    if not field:
        raise ConfigurationError(
            f"--op {text}: write OP:FIELD, OP:FIELD:SIZE or 'OP:FIELD NAME=VALUE …', such as "
            "center_crop:image:224 or 'pad_to:text length=128'"
        )
    if size and not size.isdigit():
        raise ConfigurationError(f"--op {text}: {_name_argument(name, field, size)}")
    args = {key: json_or_text(value) for key, value in zip(more[::2], more[1::2], strict=True)}
    try:
        return _constructor(name)(field, **args | ({"size": int(size)} if size else {}))
    except TypeError as error:
        raise ConfigurationError(
            f"--op {text}: {error}; see its arguments with `mesh op show {name}`"
        ) from error
    except ConfigurationError as error:
        raise ConfigurationError(f"--op {text}: {error}") from error


def _name_argument(name: str, field: str, value: str) -> str:
    """Return how to write an argument that is no size: with its name, the first that the op requires."""
    _, *parameters = signature(_constructor(name)).parameters.values()
    required = (
        each.name for each in parameters if each.default is each.empty and each.kind != each.VAR_KEYWORD
    )
    argument = value if "=" in value else f"{next(required, 'NAME')}={value}"
    return (
        f"only a size may follow the field, and {value!r} is none; write "
        f"'{name}:{field} {argument}' (`mesh op show {name}` shows the arguments)"
    )


def _constructor(name: str) -> Callable[..., OpSpec]:
    if "/" in name:
        return partial(op_constructors.user, name)
    package = op_constructors.__name__
    known: dict[str, Callable[..., OpSpec]] = {
        made.__name__: made
        for made in vars(op_constructors).values()
        if getattr(made, "__module__", "").startswith(package) and not made.__name__.startswith("_")
    }
    plain = known.keys() - {"over", "user"}
    if name not in plain:
        raise ConfigurationError(f"no op {name!r}{suggestion(name, plain)}")
    return known[name]


def _bench_loader(
    session: Session,
    client: Client,
    url: Remote,
    fields: dict[str, str],
    ops: Sequence[OpSpec],
    batch: int,
    epochs: int,
) -> None:
    from meshsdk.loader.loader import Loader
    from meshsdk.open_dataset import open as open_dataset

    ds = open_dataset(str(url), fields or None, client=client).map(*ops)
    for epoch in range(epochs):
        with Loader(ds, batch, output="numpy", rank=0, world=1) as loader:
            loader.set_epoch(epoch)
            first = _drain(session, loader, epoch)
            _show_loader(session, loader, epoch, first)


def _drain(session: Session, loader: Loader, epoch: int) -> float:
    """Read the whole epoch and return the seconds to the first batch."""
    began, first = time.perf_counter(), 0.0
    with session.progress(f"epoch {epoch}", None) as advance:
        for batch in loader:
            first = first or time.perf_counter() - began
            advance(sum(getattr(value, "nbytes", 0) for value in batch.values()))
    return first


def _show_loader(session: Session, loader: Loader, epoch: int, first: float) -> None:
    stats = loader.stats()
    record: dict[str, Any] = {
        "samples": stats.samples,
        "seconds": round(stats.seconds, 4),
        "samples_per_second": round(stats.samples_per_second, 1),
        "bytes_per_second": round(stats.bytes / stats.seconds) if stats.seconds else 0,
        "first_batch_seconds": round(first, 4),
        "wait_share": round(stats.wait_share, 4),
        "client_cpu_per_1000": round(stats.cpu_per_1000, 4),
        "retries": stats.retries,
        "flagged": stats.flagged,
        "frames": dict(stats.frames),
    }
    text = (
        f"epoch {epoch}: {stats.samples_per_second:.0f} samples/s, "
        f"{format_size(record['bytes_per_second'])}/s, "
        f"first batch {first:.2f} s, waited {stats.wait_share:.0%}, "
        f"client CPU {stats.cpu_per_1000:.3f} s per 1000, {stats.retries} retries"
    )
    session.show(text, type="loader", epoch=epoch, **record)


def _bench_gets(session: Session, client: Client, url: Remote, concurrency: int, requests: int) -> None:
    keys = [entry.key for entry in islice(client.list(url.bucket, url.key), 10_000)]
    if not keys:
        raise NotFoundError(f"no key begins with {url}; list the existing keys with `mesh ls`", status=404)
    usage, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()

    def get(key: str) -> tuple[float, int]:
        start = time.perf_counter()
        size = len(client.get(url.bucket, key))
        return time.perf_counter() - start, size

    results = []
    with ThreadPoolExecutor(concurrency) as pool, session.steps("GET", requests) as done:
        for result in pool.map(get, islice(cycle(keys), requests)):
            results.append(result)
            done()
    results.sort()
    seconds, spent = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu = spent.ru_utime + spent.ru_stime - usage.ru_utime - usage.ru_stime
    _show_gets(session, results, seconds, cpu)


def _show_gets(session: Session, results: Sequence[tuple[float, int]], seconds: float, cpu: float) -> None:
    count, size = len(results), sum(size for _, size in results)
    median, tail = results[count // 2][0], results[min(count - 1, count * 99 // 100)][0]
    session.show(
        f"{count} GETs: {count / seconds:.0f}/s, {format_size(size / seconds)}/s, "
        f"median {1000 * median:.2f} ms, "
        f"99 % within {1000 * tail:.2f} ms, client CPU {1000 * cpu / count:.3f} s per 1000",
        type="gets",
        requests=count,
        requests_per_second=round(count / seconds, 1),
        bytes_per_second=round(size / seconds),
        median_seconds=round(median, 6),
        p99_seconds=round(tail, 6),
        client_cpu_per_1000=round(1000 * cpu / count, 4),
    )

"""The gather rows: many objects or members of a shard in one stream, beside a GET for each.

Law: the same objects, in the same shuffled order, from one daemon; every contender hands over all bytes, and
what the gather gives is compared with what was put before anything is timed. Invariant: contenders take turns
(`bench.interleave`).
"""

from __future__ import annotations

import gzip
import io
import random
import sys
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import boto3
from botocore.config import Config

from bench import fill_and_check
from bench.interleave import turns
from bench.results import Figure
from bench.rows import KIB, MIB
from meshsdk.client.gather import Item
from meshsdk.client.s3_client import connect

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.rows import Scale
    from bench.servers import Server
    from meshsdk.client.s3_client import Client

GATHER, ONE, SIXTEEN = "gather", "our client, one by one", "our client × 16"
BOTO_ONE, BOTO_SIXTEEN = "boto3, one by one", "boto3 × 16"
_PARALLEL: Final = 16
_MEMBER: Final = 1000  # bytes
_WORKLOADS: Final = 16  # a reading repeats small work until it has this many shares of a second


@dataclass(frozen=True, slots=True)
class GatherRow:
    """`count` objects of `size` bytes, or members of a shard (a `kind` of archive). `bars`: peer → the least
    the gather must do of its rate; `least`: items a second."""

    name: str
    title: str
    size: int
    count: int
    bars: tuple[tuple[str, float], ...] = ()
    least: float | None = None
    kind: str = "tar"

    @property
    def members(self) -> bool:
        return self.least is not None

    def asked(self) -> list[str]:
        """In the order they are asked for: not that of their writing, but in runs, as shuffled blocks are."""
        blocks = [range(start, min(start + 50, self.count)) for start in range(0, self.count, 50)]
        random.Random(7).shuffle(blocks)
        return [f"{self.name}/{number:06d}" for block in blocks for number in block]


def gather_rows(scale: Scale) -> tuple[GatherRow, ...]:
    """All of them, in the order of the report."""
    few, some, all_ = (max(8, scale.gathered // part) for part in (16, 5, 1))
    small = ((ONE, 15.0), (BOTO_ONE, 15.0), (SIXTEEN, 4.0), (BOTO_SIXTEEN, 4.0))
    return (
        GatherRow("gather-10k", f"{all_:,} × 10 KiB", 10 * KIB, all_, small),
        GatherRow("gather-100k", f"{some:,} × 100 KiB", 100 * KIB, some, ((ONE, 7.0), (BOTO_ONE, 7.0))),
        GatherRow("gather-1m", f"{few:,} × 1 MiB", MIB, few, ((ONE, 1.7), (BOTO_ONE, 1.7))),
        *(_member_row(kind, 20 * all_) for kind in ("tar", "tgz", "tar.zst", "zip")),
    )


def _member_row(kind: str, count: int) -> GatherRow:
    name = "gather-members" if kind == "tar" else f"gather-members-{kind.replace('.', '-')}"
    return GatherRow(
        name, f"{count:,} members of 1,000 bytes of a {kind}", _MEMBER, count, (), 40_000.0, kind
    )


def measure(row: GatherRow, server: Server, scale: Scale, say: Callable[[str], None]) -> Iterator[Figure]:
    """Fill, look, warm up, then every contender in turn."""
    assert server.account is not None
    account = server.account
    with connect(
        server.endpoint, access_key=account.access_key, secret_key=account.secret_key, region="us-east-1"
    ) as client:
        say(f"{row.name}: filling")
        items = _fill(row, server, client)
        contenders = _contenders(row, server, client, items)
        for work in contenders.values():
            work()
        for number, name in turns(row.name, contenders, scale.rounds, say):
            yield _take(name, number, row, contenders[name], scale.seconds / _WORKLOADS)


def _take(name: str, number: int, row: GatherRow, work: Callable[[], int], seconds: float) -> Figure:
    start, done, moved = time.perf_counter(), 0, 0
    while done == 0 or time.perf_counter() - start < seconds:
        moved += work()
        done += row.count
    taken = time.perf_counter() - start
    problem = "" if moved == done * row.size else f"{moved} bytes of {done} items of {row.size}"
    return Figure(name, number, {"rate": done / taken, "gigabytes": moved / taken / 1e9}, problem)


def _fill(row: GatherRow, server: Server, client: Client) -> list[Item]:
    """Puts what is asked for and compares what a gather gives of it. Raises AnswerError."""
    fill_and_check.make_bucket(server)
    body = fill_and_check.pattern(row.size)
    if row.members:
        shard, names = f"{row.name}/shard.{row.kind}", [f"{number:06d}.bin" for number in range(row.count)]
        client.put(fill_and_check.BUCKET, shard, _archive(row.kind, names, body))
        items = [Item(fill_and_check.BUCKET, shard, member=name) for name in names]
    else:
        fill_and_check.fill(server, sorted(row.asked()), body)
        items = [Item(fill_and_check.BUCKET, key) for key in row.asked()]
    for answer in client.gather(items):
        if answer.error is not None or answer.data != body:
            raise fill_and_check.AnswerError(f"{answer.item} was gathered wrong: {answer.error}")
    return items


def _archive(kind: str, names: Sequence[str], body: bytes) -> bytes:
    if kind == "zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                archive.writestr(name, body)
        return buffer.getvalue()
    tar = _tar(names, body)
    if kind == "tar.zst":
        return zstd.compress(tar)
    return gzip.compress(tar) if kind == "tgz" else tar


def _tar(names: Sequence[str], body: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    return buffer.getvalue()


def _contenders(
    row: GatherRow, server: Server, client: Client, items: Sequence[Item]
) -> dict[str, Callable[[], int]]:
    """name → one pass over the items, which gives the bytes it got."""

    def gather() -> int:
        return sum(len(answer.data) for answer in client.gather(items))

    if row.members:
        return {GATHER: gather}
    keys = [item.key for item in items]
    boto = _boto(server)

    def mine(key: str) -> int:
        return len(client.get(fill_and_check.BUCKET, key))

    def theirs(key: str) -> int:
        with closing(boto.get_object(Bucket=fill_and_check.BUCKET, Key=key)["Body"]) as body:
            return len(body.read())

    def parallel(get: Callable[[str], int]) -> int:
        with ThreadPoolExecutor(_PARALLEL) as pool:
            return sum(pool.map(get, keys))

    return {
        GATHER: gather,
        ONE: lambda: sum(map(mine, keys)),
        SIXTEEN: lambda: parallel(mine),
        BOTO_ONE: lambda: sum(map(theirs, keys)),
        BOTO_SIXTEEN: lambda: parallel(theirs),
    }


def _boto(server: Server) -> boto3.client:
    assert server.account is not None
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.account.access_key,
        aws_secret_access_key=server.account.secret_key,
        region_name="us-east-1",
        config=Config(max_pool_connections=_PARALLEL, retries={"max_attempts": 1}),
    )

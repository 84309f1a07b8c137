"""The rows of downloads: an object into a file, by the SDK and by others.

Law: the same objects, put by boto3 with a CRC-32, into files in memory; each contender in a process of its
own, in turns (`bench.interleave`), one download at a time. What arrives is compared before anything is timed.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import boto3

from bench.fill_and_check import pattern
from bench.ready_process import StandingContender, measure_in_turn
from bench.rows import FULL, MIB
from bench.tables import number, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bench.results import Figure, RowResult
    from bench.rows import Scale
    from bench.servers import Server

OURS, BOTO, CONNECTOR = "meshsdk", "boto3", "s3torchconnector"
WEED: Final = "boto3 from SeaweedFS"
CONTENDERS: Final = (OURS, BOTO, CONNECTOR, WEED)
BUCKET: Final = "downloads"
TEXT: Final = f"""\
One object after the other into a file in memory, from a node on the same machine. *{OURS}* is
`meshsdk.transfers.download`, *{BOTO}* is `download_file` with its defaults, *{CONNECTOR}* reads an object
from start to end. boto3 put the objects, with a CRC-32: {OURS} compares each of them with its checksum, and
boto3 those that it gets in one request."""


@dataclass(frozen=True, slots=True)
class DownloadRow:
    """`count` objects of `size` bytes."""

    name: str
    size: int
    count: int

    @property
    def title(self) -> str:
        return f"Downloads of {self.size // MIB} MiB"


def download_rows(scale: Scale) -> tuple[DownloadRow, ...]:
    """All of them, in the order of the report."""
    return tuple(
        DownloadRow(f"download-{mebibytes}m", min(mebibytes * MIB, scale.downloaded), count)
        for mebibytes, count in ((1, 16), (8, 4), (40, 2))
    )


ROWS: Final = download_rows(FULL)


def measure(
    row: DownloadRow, server: Server, weed: Server | None, scale: Scale, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Fill, start a process for each contender, then rounds in turn."""
    say(f"{row.name}: filling")
    for each in (server, weed):
        if each is not None:
            _fill(row, each)

    names = [name for name in CONTENDERS if name != WEED or weed is not None]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:

        def start(name: str) -> StandingContender:
            used = weed if name == WEED and weed is not None else server
            words = [name, used.endpoint, row.name, f"{memory}/{names.index(name)}"]
            sizes = [str(row.size), str(row.count), str(scale.reading), str(used.child.process.pid)]
            return StandingContender(name, ["bench.download_reader", *words, *sizes], used)

        yield from measure_in_turn(row.name, names, start, scale.rounds, say)


def _fill(row: DownloadRow, server: Server) -> None:
    assert server.account is not None
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.account.access_key,
        aws_secret_access_key=server.account.secret_key,
        region_name="us-east-1",
    )
    if BUCKET not in [each["Name"] for each in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET)
    body = pattern(row.size)
    for at in range(row.count):
        client.put_object(Bucket=BUCKET, Key=f"{row.name}/{at}", Body=body, ChecksumAlgorithm="CRC32")


def section(rows: Mapping[str, RowResult], scale: Scale) -> list[str]:
    """The part of the report."""
    here = [row for row in download_rows(scale) if row.name in rows]
    names = list(dict.fromkeys(name for row in here for name in rows[row.name].contenders()))
    if not names:
        return []
    lines, ratios = list[list[str]](), list[list[str]]()
    for row in here:
        result = rows[row.name]
        rates = {name: result.value(name, "rate") for name in names}
        costs = {name: (result.value(name, "client_us"), result.value(name, "server_us")) for name in names}
        lines += [
            [f"{row.title}, GB/s", *(number(_gigabytes(rates[name], row.size)) for name in names)],
            ["client CPU, ms each", *(number(_thousandth(costs[name][0])) for name in names)],
            ["server CPU, ms each", *(number(_thousandth(costs[name][1])) for name in names)],
        ]
        peers = [name for name in names if name != OURS]
        ratios.append([row.title, *(number(result.ratio(OURS, peer, "rate"), 2, "×") for peer in peers)])
    head = ["", *(f"{OURS} ÷ {name}" for name in names if name != OURS)]
    return ["## Downloads, beside other clients", TEXT, table(["", *names], lines), table(head, ratios)]


def _gigabytes(rate: float | None, size: int) -> float | None:
    return None if rate is None else rate * size / 1e9


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000

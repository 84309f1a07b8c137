"""The row of jobs: tar shards made into other tar shards, beside `cp` of the same bytes on the same disk.

Law: the same shards lie as plain files for `cp` and in the daemon for the job; each contender's output is
removed before the next begins, and nothing of it is left to be written out. A job's outputs are durable when
it is done, as `cp, then sync` is and `cp` is not. Invariant: contenders take
turns (`bench.interleave`).
"""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import tarfile
import time
from typing import TYPE_CHECKING, Final

from bench import fill_and_check
from bench.interleave import turns
from bench.results import Figure
from bench.rows import KIB, MIB
from meshsdk.admin import jobs
from meshsdk.client.s3_client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench.rows import Scale
    from bench.servers import Server
    from meshsdk.client.s3_client import Client

NAME: Final = "reshard"
COPY, SYNCED, STORED, SHUFFLED = "cp", "cp, then sync", "reshard", "reshard, shuffled"
BARS: Final = ((STORED, COPY, 0.5), (STORED, SYNCED, 0.5))
_MEMBER: Final = 100 * KIB
_SHARD: Final = 64 * MIB
_BUCKET, _SOURCE, _MADE = "resharded", "source/", "made/"


def title(scale: Scale) -> str:
    return f"Tar to tar, {scale.resharded / MIB:,.0f} MiB of {_MEMBER // KIB} KiB files"


def measure(server: Server, scale: Scale, scratch: Path, say: Callable[[str], None]) -> Iterator[Figure]:
    """Fill both sides, look, then every contender in turn."""
    assert server.account is not None
    account = server.account
    with connect(
        server.endpoint, access_key=account.access_key, secret_key=account.secret_key, region="us-east-1"
    ) as client:
        say(f"{NAME}: filling")
        plain = scratch / "plain"
        count, size = _fill(server, client, plain, scale.resharded)
        contenders: dict[str, Callable[[int], int]] = {
            COPY: lambda _: _copy(plain, synced=False),
            SYNCED: lambda _: _copy(plain, synced=True),
            STORED: lambda _: _job(client),
            SHUFFLED: lambda number: _job(client, shuffle=number),
        }
        for number, name in turns(NAME, contenders, scale.rounds, say):
            os.sync()
            began = time.perf_counter()
            done = contenders[name](number)
            taken = time.perf_counter() - began
            problem = _remove(client, plain, count)
            yield Figure(name, number, {"gigabytes": size / taken / 1e9}, problem if done else "")
        shutil.rmtree(plain)


def _fill(server: Server, client: Client, plain: Path, wanted: int) -> tuple[int, int]:
    """(files, bytes of the shards), written to both sides."""
    fill_and_check.make_bucket(server, _BUCKET)
    shutil.rmtree(plain, ignore_errors=True)
    plain.mkdir(parents=True)
    data, count, size = random.Random(1).randbytes(_MEMBER + 4096), 0, 0
    for number in range(max(1, wanted // _SHARD)):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(min(_SHARD, wanted) // _MEMBER):
                member = tarfile.TarInfo(f"{count:08d}.jpg")
                member.size = _MEMBER
                tar.addfile(member, io.BytesIO(data[count % 4096 :][:_MEMBER]))
                count += 1
        body = buffer.getvalue()
        (plain / f"{number:06d}.tar").write_bytes(body)
        client.put(_BUCKET, f"{_SOURCE}{number:06d}.tar", body)
        size += len(body)
    return count, size


def _copy(plain: Path, *, synced: bool) -> int:
    """0: there is nothing to look at afterwards."""
    target = plain.with_name("copied")
    subprocess.run(["cp", "-r", "--reflink=never", plain, target], check=True)
    if synced:
        subprocess.run(["sync", "-f", target], check=True)
    return 0


def _job(client: Client, **layout: int) -> int:
    """The samples it wrote."""
    document = jobs.reshard_job(f"s3://{_BUCKET}/{_SOURCE}", f"s3://{_BUCKET}/{_MADE}", count=1000, **layout)
    begun = jobs.start_job(client.transport, document)
    found = jobs.wait_for_job(client.transport, begun.id)
    if found.state != "done":
        raise fill_and_check.AnswerError(f"the job {found.state}: {found.error}")
    return found.progress.samples


def _remove(client: Client, plain: Path, count: int) -> str:
    """Take away what was made; what is wrong with a job's output."""
    shutil.rmtree(plain.with_name("copied"), ignore_errors=True)
    keys = [entry.key for entry in client.list(_BUCKET, _MADE)]
    names: list[str] = []
    for key in keys:
        with tarfile.open(fileobj=io.BytesIO(client.get(_BUCKET, key))) as tar:
            names += tar.getnames()
        client.delete(_BUCKET, key)
    return "" if sorted(names) == [f"{number:08d}.jpg" for number in range(count)] else f"{len(names)} files"

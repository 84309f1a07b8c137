"""The row of checkpoints: torch's distributed checkpoints saved to a store and loaded, by several writers.

Law: one daemon is the S3 server of all; the same tensors, each contender in a process of its own, in
turns (`bench.interleave`); a checkpoint is saved once it is durable in the store, and loaded once every
tensor equals what was saved. Invariant: what a round wrote is removed before the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.ready_process import StandingContender, measure_in_turn
from bench.rows import MIB
from bench.tables import number, table
from meshsdk.client.s3_client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bench.results import Figure, RowResult
    from bench.rows import Scale
    from bench.servers import Server

NAME: Final = "checkpoints"
OURS, CONNECTOR, BOTO = "meshsdk", "s3torchconnector", "boto3, torch.save"
CONTENDERS: Final = (OURS, CONNECTOR, BOTO)
BUCKET: Final = "checkpoints"
PARTS: Final = 16
"""Tensors of equal size that a checkpoint has, and one small one."""
TEXT: Final = f"""\
{PARTS} float32 tensors from one process, without a process group. *{OURS}* and *{CONNECTOR}* are writers
and readers of `torch.distributed.checkpoint`, with one file per rank; *{BOTO}* serialises into memory and
sends it with `upload_fileobj` (parts of 16 MiB, four at once), and does the reverse. All use the same
daemon, whose cores they share. Saving ends when the store has answered, which means that everything is on
its disk. Loading ends when the tensors are complete; then they are compared. CPU is the sum of client and
server."""
_METRICS: Final = ("save", "load", "save_cpu", "load_cpu")


def title(scale: Scale) -> str:
    return f"Checkpoints of {scale.checkpoint / MIB:,.0f} MiB"


def measure(server: Server, scale: Scale, say: Callable[[str], None]) -> Iterator[Figure]:
    """A process for each contender, then rounds in turn."""
    assert server.account is not None
    account = server.account
    with connect(
        server.endpoint, access_key=account.access_key, secret_key=account.secret_key, region="us-east-1"
    ) as client:
        client.create_bucket(BUCKET)
    yield from measure_in_turn(
        NAME, CONTENDERS, lambda name: _contender(name, server, scale), scale.rounds, say
    )


def _contender(name: str, server: Server, scale: Scale) -> StandingContender:
    """A process that saves and loads once when it is told to."""
    size, pid = str(scale.checkpoint), str(server.child.process.pid)
    return StandingContender(name, ["bench.checkpoint_writer", name, server.endpoint, size, pid], server)


def section(rows: Mapping[str, RowResult]) -> list[str]:
    """The part of the report."""
    result = rows.get(NAME)
    if result is None:
        return []
    lines = [
        [name, *(number(result.value(name, metric), 2 if "cpu" in metric else 0) for metric in _METRICS)]
        for name in result.contenders()
    ]
    ratios = [
        [f"{OURS} ÷ {peer}", *(number(result.ratio(OURS, peer, metric), 2, "×") for metric in _METRICS[:2])]
        for peer in (CONNECTOR, BOTO)
    ]
    head = ["", "saved, MB/s", "loaded, MB/s", "CPU ms a MiB saved", "CPU ms a MiB loaded"]
    return [f"## {result.title}", TEXT, table(head, lines), table(["", "saved", "loaded"], ratios)]

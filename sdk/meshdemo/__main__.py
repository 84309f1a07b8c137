"""`mesh demo`: every stage, the closing table, what to try next. Exit code 1 when a claim is false."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from rich.table import Table

from meshdemo.daemon import Daemon, DaemonError
from meshdemo.scale import FULL, QUICK
from meshdemo.screen import ClaimError, console, fact, stage, welcome

if TYPE_CHECKING:
    from meshdemo.scale import Scale
    from meshdemo.shared_jobs import Sweep
    from meshdemo.training import Trained

WELCOME = """[bold]Shardmesh[/]: a store that hands out training batches.
A daemon keeps objects (plain S3) and turns them into finished batches: \
decoded, cropped, collated, in an order that is a pure function of (seed, epoch, step). \
A trainer only asks for them. This takes one to three minutes."""


def show_table(trained: Trained, sweep: Sweep, decoded: int) -> None:
    """samples/s, waiting, CPU, decode passes."""
    table = Table(title="What it cost", title_justify="left", header_style="bold")
    for name in ("job", "samples/s", "waited", "CPU s/1,000", "decoded / asked"):
        table.add_column(name, justify="left" if name == "job" else "right")
    stats = trained.stats
    table.add_row(
        "digits, training",
        f"{stats.samples_per_second:,.0f}",
        f"{stats.wait_share:.0%}",
        f"{stats.cpu_per_1000:.3f}",
        f"{decoded:,} / {trained.asked:,}",
    )
    table.add_row(
        f"photographs, {sweep.jobs} jobs",
        f"{sweep.asked / sweep.seconds:,.0f}",
        f"{sweep.waited_share:.0%}",
        f"{1000 * sweep.cpu / sweep.asked:.3f}",
        f"{sweep.decoded:,} / {sweep.asked:,}",
    )
    console.print()
    console.print(table)
    console.print(
        "[dim]waited: share of its time the trainer waited for data · CPU: of the client, per 1,000 "
        "samples · decoded: samples the daemon worked on, from its /metrics"
    )


NEXT = """
[bold]What to try next[/]
{commands}  [dim]# a daemon of your own; at its first start it prints the line that another terminal needs[/]
  meshd serve --data-dir ./data
  export AWS_ENDPOINT_URL=http://127.0.0.1:9000 AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…
  [dim]# your pictures, a folder for each class; `aws s3 sync`, s5cmd and boto3 do as well[/]
  mesh mb s3://pictures && mesh sync ./pictures s3://pictures
  mesh preflight s3://pictures/ --op decode:image --op random_resized_crop:image:224
  [dim]# three nodes, a training job that outlives one of them: docs/quickstart.md of the source[/]
"""
_COMMANDS = """\
  [dim]# the commands[/]
  . {folder}/activate
"""


def next_steps() -> str:
    """Return what to try next; first how to reach the commands, if they are not on the search path."""
    folder = Path(sys.executable).parent
    return NEXT.format(commands="" if which("meshd") else _COMMANDS.format(folder=folder))


def stay(daemon: Daemon) -> None:
    """Print the address of the daemon's console, and return at Ctrl-C or SIGTERM, which is not a failure
    then, also when it comes as soon as the address is printed.
    """
    mine, handler = socket.socketpair()
    with mine, handler:
        before = {
            number: signal.signal(number, lambda *_: handler.send(b"."))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            console.print(f"\n[bold]The daemon stays up.[/] Look at it: [bold]{daemon.endpoint}/console[/]")
            console.print(
                f"  access key  {daemon.access_key}\n  secret key  {daemon.secret_key}", soft_wrap=True
            )
            console.print("[dim]Ctrl-C stops it, and removes its data.")
            mine.recv(1)
        finally:
            for number, action in before.items():
                signal.signal(number, action)


def run(root: Path, scale: Scale, *, stays: bool = False) -> None:
    """Run all stages in order. `stays`: the daemon then keeps running until Ctrl-C."""
    from meshdemo.equality_checks import compare_worlds, resume
    from meshdemo.photographs import origin
    from meshdemo.shared_jobs import DECODED, sweep
    from meshdemo.training import train
    from meshdemo.upload import store

    stage(1, "A daemon", "One command, one directory, one port; its keys are made up for this run.")
    with Daemon(root) as daemon:
        fact(f"`meshd serve` is ready at {daemon.endpoint}")
        fact(f"its web console, meanwhile: {daemon.endpoint}/console")
        stage(
            2,
            "Data, over plain S3",
            f"1,797 handwritten digits, and cut-outs of {origin()}.",
        )
        store(daemon, scale)
        stage(3, "Training", "The daemon decodes, augments and collates; the trainer only casts to float.")
        before = daemon.metric(DECODED)
        trained = train(daemon, scale)
        decoded = round(daemon.metric(DECODED) - before)
        stage(4, "Stop and resume", "A position in an addressed epoch is all the state a job has.")
        resume(daemon, scale)
        stage(5, "World size", "Ranks are slices of one global batch: how many there are changes nothing.")
        compare_worlds(daemon, scale)
        stage(6, "A sweep", "Jobs over the same plan meet: each batch is prepared once for all of them.")
        show_table(trained, sweep(daemon, scale), decoded)
        if stays:
            stay(daemon)


_NEEDS = {"lmdb": "server", "PIL": "server", "torch": "torch"}
"""Modules that the bare SDK does without, and the extras that bring them."""


def interrupt(_signal: int, _frame: object) -> None:
    """SIGTERM ends the run as Ctrl-C does: in order."""
    raise KeyboardInterrupt


def main() -> int:
    """Parse, run, report; 0, 1 for a false claim or a daemon that does not start, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="mesh demo", description="Store, preprocess, train, resume, share.")
    parser.add_argument(
        "--quick", action="store_true", help="toy size, under half a minute; what the tests run"
    )
    parser.add_argument("--stay", action="store_true", help="keep the daemon and its console up until Ctrl-C")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    missing = [module for module in _NEEDS if find_spec(module) is None]
    if missing:
        extras = ",".join(dict.fromkeys(_NEEDS.values()))
        parser.error(f"no module {', '.join(missing)}; install it with: pip install 'shardmesh[{extras}]'")
    signal.signal(signal.SIGTERM, interrupt)
    welcome(WELCOME)
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="shardmesh-demo-") as root:
            run(Path(root), scale, stays=arguments.stay)
    except KeyboardInterrupt:
        console.print("\nstopped; the daemon is stopped too, its data removed")
        return 130
    except (ClaimError, DaemonError) as error:
        console.print(f"\n  [red]✗ {error}[/]")
        return 1
    console.print(f"\n[green]Everything above was checked[/], in {time.monotonic() - start:.0f} s.")
    console.print(next_steps(), soft_wrap=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

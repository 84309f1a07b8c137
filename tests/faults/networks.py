"""Hosts as network namespaces on one bridge, whose connections can be cut.

Law: takes Linux, iproute2 and the right to make namespaces; `available()` says whether they are there. Names
carry this process's id, so that two test runs do not meet, and all of it is gone after `close`. Only the
machine itself can reach the bridge.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

_FIRST: Final = 64  # 10.213.64.0/24 and following: one network a test process


class Networks:
    """`with Networks(3) as net: subprocess.Popen([*net.prefix(0), "meshd", ...])`. Hosts are 0, 1, …; the
    machine itself is the last address of the network, and what is started there reaches every host.
    """

    def __init__(self, hosts: int) -> None:
        self._tag = f"{os.getpid() % 100_000:x}"
        self._third = _FIRST + os.getpid() % (256 - _FIRST)
        self._hosts, self._cut = hosts, set[tuple[int, str]]()

    def __repr__(self) -> str:
        return f"<Networks {self._hosts} hosts at {self.address(0)}…, {len(self._cut)} cuts>"

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

    def cut(self, host: int, other: str) -> None:
        """From now on nothing passes between a host and an address. Open connections fall silent."""
        if (host, other) not in self._cut:
            _ip("-n", self._space(host), "route", "add", "blackhole", f"{other}/32")
            self._cut.add((host, other))

    def part(self, host: int, other: int) -> None:
        """Cuts two hosts off from each other, both ways."""
        self.cut(host, self.address(other))
        self.cut(other, self.address(host))

    def heal(self) -> None:
        """Everybody reaches everybody."""
        for host, other in sorted(self._cut):
            _ip("-n", self._space(host), "route", "del", "blackhole", f"{other}/32")
        self._cut.clear()

    def close(self) -> None:
        """Removes namespaces and bridge."""
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

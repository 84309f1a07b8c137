"""Runs a row by name: starts the servers it wants once, keeps them idle beside each other, ends them at
the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from bench import (
    accelerators,
    albums,
    checkpoints,
    confining,
    delivering,
    epochs,
    gathering,
    limits,
    loading,
    origins,
    owners,
    passing,
    preparing,
    resharding,
    residency,
    restoring,
    sharing,
    storing,
    windows,
)
from bench.gathering import gather_rows
from bench.generating import available
from bench.processes import ChildError, Children
from bench.results import Figure
from bench.rows import FULL, store_rows
from bench.servers import SERVERS, binary, new_account
from bench.signing import Account
from bench.turns import turns

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.rows import Row, Scale
    from bench.servers import Server

GATHERS = tuple(row.name for row in gather_rows(FULL))
SPECIAL = (
    *("limits", "ops", "userops", *loading.ROWS, sharing.NAME, delivering.NAME),
    *(*accelerators.NAMES, "memory"),
    *(*GATHERS, resharding.NAME, restoring.NAME, passing.NAME, *origins.NAMES, epochs.NAME),
    windows.NAME,
    checkpoints.NAME,
    owners.NAME,
)
DEBIAN = {"wrk": "wrk", "nginx": "nginx-light"}
NO_WRK = "wrk is not installed: `apt-get install wrk`"
Outcome = tuple[str, tuple[Figure, ...], dict[str, str]]


@dataclass(slots=True)
class Bench:
    """A run: servers on demand. `say` is told what happens now."""

    scratch: Path
    scale: Scale
    say: Callable[[str], None]
    servers: dict[str, Server] = field(default_factory=dict)
    kept: dict[str, Server] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _children: Children | None = None
    _site: origins.Site | None = None
    _filled: list[Server] = field(default_factory=list)

    def __enter__(self) -> Self:
        shutil.rmtree(self.scratch / "run", ignore_errors=True)
        (self.scratch / "run").mkdir(parents=True)
        self._children = self._stack.enter_context(Children(self.scratch / "logs"))
        install_missing(self.say)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def server(self, name: str, *, kept: bool = False) -> Server | None:
        """The running server, started if need be; None, with a reason in `absent`, when it cannot be had.

        `kept`: the one whose data outlives the run.
        """
        running = self.kept if kept else self.servers
        if name not in running and name not in self.absent and self._children is not None:
            self.say(f"starting {SERVERS[name].title}")
            reason = SERVERS[name].missing()
            try:
                if not reason:
                    running[name] = self._start(self._children, name, kept=kept)
            except ChildError as error:
                reason = str(error)
            if reason:
                self.absent[name] = reason
        return running.get(name)

    def _start(self, children: Children, name: str, *, kept: bool) -> Server:
        if not kept:
            return SERVERS[name].start(children, self.scratch / "run" / name, new_account())
        # the key pair stays the same, for the server keeps it with its data
        return SERVERS[name].start(
            children, self.scratch / "kept" / name, Account("bench", "kept-secret-key")
        )

    def run(self, name: str) -> Outcome:
        """(title, figures, why contenders are absent) of the row."""
        if name == "limits":
            return "What the machine allows", tuple(self._limits()), {}
        if name == "ops":
            files = self._album().files()
            self.say("ops beside a bare decode, on one core")
            return "Photographs on one core", tuple(preparing.measure(files, self.scale.rounds)), {}
        if name == "userops":
            self.say("a confined process beside other ways")
            side, samples = limits.SIDE, self.scale.confined
            return "A sample there and back", tuple(confining.measure(side, samples, self.scale.rounds)), {}
        if name in loading.ROWS:
            return self._loaders(name)
        if name == sharing.NAME:
            return self._share()
        if name == delivering.NAME:
            return self._deliver()
        if name in accelerators.NAMES:
            return self._accelerate(name)
        if name == "memory":
            return self._memory()
        if name == resharding.NAME:
            return self._reshard()
        if name in origins.NAMES:
            return self._origins(name)
        if name == epochs.NAME:
            return epochs.TITLE, tuple(epochs.measure(self.scale, self.say)), {}
        if name == restoring.NAME:
            figures = restoring.measure(self.scale, self.scratch / "run", self.say)
            return restoring.title(self.scale), tuple(figures), {}
        if name == windows.NAME:
            return self._windows()
        if name == checkpoints.NAME:
            return self._checkpoints()
        if name == owners.NAME:
            return self._owners()
        if name == passing.NAME:
            return self._pass_on()
        if name in GATHERS:
            return self._gather(next(row for row in gather_rows(self.scale) if row.name == name))
        return self._store(next(row for row in store_rows(self.scale) if row.name == name))

    def _store(self, row: Row) -> Outcome:
        if not available():
            return row.title, (), dict.fromkeys(row.servers, NO_WRK)
        running = {name: server for name in row.servers if (server := self.server(name, kept=row.kept))}
        figures = tuple(storing.measure(row, running, self.scale, self.scratch / "run", self.say))
        return row.title, figures, {name: self.absent[name] for name in row.servers if name in self.absent}

    def _gather(self, row: gathering.GatherRow) -> Outcome:
        server = self.server("meshd")
        if server is None:
            return row.title, (), dict(self.absent)
        return row.title, tuple(gathering.measure(row, server, self.scale, self.say)), {}

    def _reshard(self) -> Outcome:
        title, server = resharding.title(self.scale), self.server("meshd")
        if server is None:
            return title, (), dict(self.absent)
        folder = self.scratch / "run" / "resharding"
        return title, tuple(resharding.measure(server, self.scale, folder, self.say)), {}

    def _windows(self) -> Outcome:
        server = self.server("meshd")
        if server is None:
            return windows.title(self.scale), (), dict(self.absent)
        return windows.title(self.scale), tuple(windows.measure(server, self.scale, self.say)), {}

    def _checkpoints(self) -> Outcome:
        title, server = checkpoints.title(self.scale), self.server("meshd")
        if server is None:
            return title, (), dict(self.absent)
        return title, tuple(checkpoints.measure(server, self.scale, self.say)), {}

    def _pass_on(self) -> Outcome:
        reason = passing.missing()
        if reason:
            return passing.TITLE, (), {passing.NAME: reason}
        return passing.TITLE, tuple(passing.measure(self.scale, self.scratch / "run", self.say)), {}

    def _owners(self) -> Outcome:
        title, reason = owners.title(self.scale), owners.missing()
        if reason:
            return title, (), {owners.NAME: reason}
        return title, tuple(owners.measure(self._album(), self.scale, self.say)), {}

    def _origins(self, name: str) -> Outcome:
        title, weed = origins.title(name, self.scale), self.server("seaweedfs")
        if weed is None or self._children is None:
            return title, (), dict(self.absent)
        if self._site is None:
            self.say("starting a node before an origin that is far away")
            self._site = origins.build(self._children, weed, self.scratch / "run" / "origins")
        return title, tuple(origins.measure(name, self._site, self.scale, self.say)), {}

    def _album(self) -> albums.Album:
        self.say(f"making {self.scale.photographs} photographs")
        return albums.make_album(self.scratch, self.scale.photographs)

    def _limits(self) -> list[Figure]:
        files, found = self._album().files(), list[Figure]()
        for number, name in turns("limits", ("socket", "transform"), self.scale.rounds, self.say):
            if name == "socket":
                metrics = {"gigabytes": limits.socket_rate(self.scale.seconds) / 1e9}
            else:
                metrics = {"rate": limits.transform_rate(files)}
            found.append(Figure(name, number, metrics))
        return found

    def _loaders(self, name: str) -> Outcome:
        turns, skipped = self._turns(loading.PEERS, loading.ROWS[name])
        figures = loading.measure(turns, self.scale.loader_rounds, self.scale, self.scratch, self.say)
        return f"Loaders, peers from {SERVERS[loading.ROWS[name]].title}", tuple(figures), skipped

    def _share(self) -> Outcome:
        turns, skipped = self._turns(sharing.PEERS, "seaweedfs")
        figures = sharing.measure(turns, self.scale.loader_rounds, self.scale, self.scratch, self.say)
        return sharing.title(self.scale), tuple(figures), skipped

    def _deliver(self) -> Outcome:
        turns, skipped = self._turns((), "meshd")
        figures = [each for turn in turns for each in delivering.measure(turn.server, self.scale, self.say)]
        return delivering.title(self.scale), tuple(figures), skipped

    def _accelerate(self, name: str) -> Outcome:
        work, skipped = accelerators.workload(name, self.scale), dict[str, str]()
        names = ["meshd", "seaweedfs"]
        try:
            self.say("making the peers' environment")
            albums.make_peers(self.scratch)
        except albums.PeersError as error:
            names, skipped = names[:1], dict.fromkeys(work.peers, str(error))
        servers = {name: server for name in names if (server := self.server(name))}
        figures = accelerators.measure(work, servers, self.scale, self.scratch, self.say)
        return work.title, tuple(figures), skipped | self.absent

    def _turns(self, peers: tuple[str, ...], place: str) -> tuple[list[loading.Turn], dict[str, str]]:
        """Ours from meshd, then the peers from the server of that name, all photographs uploaded."""
        skipped: dict[str, str] = {}
        album = self._album()
        albums.compile_ours()
        try:
            if peers:
                self.say("making the peers' environment")
                albums.pack(albums.make_peers(self.scratch), album)
        except albums.PeersError as error:
            skipped, peers = dict.fromkeys(peers, str(error)), ()
        names = dict.fromkeys(("meshd", *([place] if peers else [])))
        servers = {name: server for name in names if (server := self.server(name))}
        for server in servers.values():
            if server not in self._filled:
                albums.upload(server, album, self.say)
                self._filled.append(server)
        turns = [loading.Turn(ours, servers["meshd"]) for ours in loading.OURS] if "meshd" in servers else []
        if place in servers:
            turns += [loading.Turn(peer, servers[place]) for peer in peers]
        return turns, skipped | self.absent

    def _memory(self) -> Outcome:
        server = self.server("meshd")
        title = f"Memory under {self.scale.memory_connections} large bodies"
        if server is None:
            return title, (), dict(self.absent)
        figures = [self._idle()]
        residency.prepare(server, self.scale)
        for direction in residency.DIRECTIONS:
            self.say(f"memory: {direction}")
            self._await_space(self.scale.memory_bytes * self.scale.memory_connections)
            figures.append(residency.measure(server, direction, self.scale))
        return title, tuple(figures), {}

    def _idle(self) -> Figure:
        """A node of its own that nobody has asked for anything."""
        assert self._children is not None
        server = SERVERS["meshd"].start(self._children, self.scratch / "run" / "idle", new_account())
        time.sleep(self.scale.seconds)  # what the start has left behind is let go by then
        try:
            return residency.idle(server)
        finally:
            server.child.stop()

    def _await_space(self, wanted: int) -> None:
        """Uploads that ended half way give their reserved space back a moment later."""
        deadline = time.monotonic() + 30
        while shutil.disk_usage(self.scratch).free < wanted and time.monotonic() < deadline:
            time.sleep(0.2)


def install_missing(say: Callable[[str], None]) -> None:
    """Install wrk and nginx with apt when this is root on Debian and BENCH_INSTALL is not 0."""
    missing = [package for program, package in DEBIAN.items() if not binary(program)]
    if (
        not missing
        or os.geteuid() != 0
        or os.environ.get("BENCH_INSTALL") == "0"
        or not shutil.which("apt-get")
    ):
        return
    say(f"installing {', '.join(missing)}")
    argv = ["apt-get", "install", "-y", "-q", *missing]
    subprocess.run(
        argv, capture_output=True, check=False, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    )

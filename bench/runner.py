"""Runs rows: starts the servers they want once, keeps them idle beside each other, ends them at the end.

A method here takes one row or a family of them: what is timed is in the row's own module, this brings its
servers, photographs and folders. `bench.catalogue` says which method is of which row.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from bench import (
    accelerators,
    checkpoints,
    decode_cost,
    download_row,
    epochs,
    foretold,
    gather_timing,
    kept_row,
    limits,
    loader_cpu_cost,
    loader_timing,
    long_texts,
    media_row,
    origins,
    owners,
    photo_dataset,
    proxy_overhead,
    raw_row,
    re_replication,
    reshard_row,
    residency,
    rotational_drive,
    rotational_row,
    sandbox_overhead,
    shared_jobs,
    store_timing,
    table_row,
    tokens,
    windows,
)
from bench.gather_timing import gather_rows
from bench.interleave import turns
from bench.load_generator import available
from bench.peers import raw_rows
from bench.presigned_requests import Account
from bench.processes import ChildError, Children
from bench.results import Figure
from bench.rows import store_rows
from bench.servers import SERVERS, binary, new_account

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench.rows import Scale
    from bench.servers import Server

DEBIAN = {"wrk": "wrk", "nginx": "nginx-light"}
NO_WRK = "wrk is not installed: `apt-get install wrk`"
Outcome = tuple[str, Iterable[Figure], dict[str, str]]
"""A row's title, its figures as they are taken, and why contenders are absent."""


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

    def ops(self) -> Outcome:
        files = self._album().files()
        self.say("ops beside a bare decode, on one core")
        return "Photographs on one core", decode_cost.measure(files, self.scale.rounds), {}

    def userops(self) -> Outcome:
        self.say("a confined process beside other ways")
        figures = sandbox_overhead.measure(limits.SIDE, self.scale.confined, self.scale.rounds)
        return "A sample there and back", figures, {}

    def epochs(self) -> Outcome:
        return epochs.TITLE, epochs.measure(self.scale, self.say), {}

    def restore(self) -> Outcome:
        figures = re_replication.measure(self.scale, self.scratch / "run", self.say)
        return re_replication.title(self.scale), figures, {}

    def store(self, name: str) -> Outcome:
        row = next(row for row in store_rows(self.scale) if row.name == name)
        if not available():
            return row.title, (), dict.fromkeys(row.servers, NO_WRK)
        running = {name: server for name in row.servers if (server := self.server(name, kept=row.kept))}
        figures = store_timing.measure(row, running, self.scale, self.scratch / "run", self.say)
        return row.title, figures, {name: self.absent[name] for name in row.servers if name in self.absent}

    def gather(self, name: str) -> Outcome:
        row = next(row for row in gather_rows(self.scale) if row.name == name)
        server = self.server("meshd")
        if server is None:
            return row.title, (), dict(self.absent)
        return row.title, gather_timing.measure(row, server, self.scale, self.say), {}

    def reshard(self) -> Outcome:
        title, server = reshard_row.title(self.scale), self.server("meshd")
        if server is None:
            return title, (), dict(self.absent)
        folder = self.scratch / "run" / "resharding"
        return title, reshard_row.measure(server, self.scale, folder, self.say), {}

    def windows(self) -> Outcome:
        server = self.server("meshd")
        if server is None:
            return windows.title(self.scale), (), dict(self.absent)
        return windows.title(self.scale), windows.measure(server, self.scale, self.say), {}

    def tokens(self) -> Outcome:
        server = self.server("meshd")
        if server is None:
            return tokens.title(self.scale), (), dict(self.absent)
        peers, skipped = self._peers(tuple(tokens.FORMATS))
        figures = tokens.measure(server, peers, self.scale, self.scratch, self.say)
        return tokens.title(self.scale), figures, skipped

    def raw_samples(self) -> Outcome:
        server = self.server("meshd")
        if server is None:
            return raw_row.title(self.scale), (), dict(self.absent)
        peers, skipped = self._peers(raw_rows.PEERS)
        figures = raw_row.measure(server, peers, self.scale, self.scratch, self.say)
        return raw_row.title(self.scale), figures, skipped

    def _peers(self, names: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
        """Make the peers' environment; return the peers, and why there are none."""
        try:
            self.say("making the peers' environment")
            photo_dataset.make_peers(self.scratch)
        except photo_dataset.PeersError as error:
            return (), dict.fromkeys(names, str(error))
        return names, {}

    def tables(self) -> Outcome:
        server = self.server("meshd")
        if server is None:
            return table_row.title(self.scale), (), dict(self.absent)
        return table_row.title(self.scale), table_row.measure(server, self.scale, self.say), {}

    def long_texts(self) -> Outcome:
        server = self.server("meshd")
        if server is None:
            return long_texts.title(self.scale), (), dict(self.absent)
        return long_texts.title(self.scale), long_texts.measure(server, self.scale, self.say), {}

    def media(self, media: media_row.Media) -> Outcome:
        title, server = media_row.title(media, self.scale), self.server("meshd")
        if server is None:
            return title, (), dict(self.absent)
        return title, media_row.measure(media, server, self.scale, self.say), {}

    def checkpoints(self) -> Outcome:
        title, server = checkpoints.title(self.scale), self.server("meshd")
        if server is None:
            return title, (), dict(self.absent)
        return title, checkpoints.measure(server, self.scale, self.say), {}

    def downloads(self, name: str) -> Outcome:
        row = next(row for row in download_row.download_rows(self.scale) if row.name == name)
        server, weed = self.server("meshd"), self.server("seaweedfs")
        if server is None:
            return row.title, (), dict(self.absent)
        skipped = {} if weed else {download_row.WEED: self.absent["seaweedfs"]}
        return row.title, download_row.measure(row, server, weed, self.scale, self.say), skipped

    def pass_on(self) -> Outcome:
        reason = proxy_overhead.missing()
        if reason:
            return proxy_overhead.TITLE, (), {proxy_overhead.NAME: reason}
        return proxy_overhead.TITLE, proxy_overhead.measure(self.scale, self.scratch / "run", self.say), {}

    def owners(self) -> Outcome:
        title, reason = owners.title(self.scale), owners.missing()
        if reason:
            return title, (), {owners.NAME: reason}
        return title, owners.measure(self._album(), self.scale, self.say), {}

    def foretold(self) -> Outcome:
        title, reason = foretold.title(self.scale), foretold.missing()
        if reason:
            return title, (), {foretold.NAME: reason}
        return title, foretold.measure(self.scale, self.scratch / "run" / foretold.NAME, self.say), {}

    def origins(self, name: str) -> Outcome:
        title, weed = origins.title(name, self.scale), self.server("seaweedfs")
        if weed is None or self._children is None:
            return title, (), dict(self.absent)
        if self._site is None:
            self.say("starting a node before an origin that is far away")
            self._site = origins.build(self._children, weed, self.scratch / "run" / "origins")
        return title, origins.measure(name, self._site, self.scale, self.say), {}

    def _album(self) -> photo_dataset.Album:
        self.say(f"making {self.scale.photographs} photographs")
        return photo_dataset.make_album(self.scratch, self.scale.photographs)

    def limits(self) -> Outcome:
        return "What the machine allows", self._limit_figures(), {}

    def _limit_figures(self) -> Iterator[Figure]:
        files = self._album().files()
        for number, name in turns("limits", ("socket", "transform"), self.scale.rounds, self.say):
            if name == "socket":
                metrics = {"gigabytes": limits.socket_rate(self.scale.seconds) / 1e9}
            else:
                metrics = {"rate": limits.transform_rate(files)}
            yield Figure(name, number, metrics)

    def loaders(self, name: str) -> Outcome:
        turns, skipped = self._turns(loader_timing.PEERS, loader_timing.ROWS[name])
        figures = loader_timing.measure(turns, self.scale.loader_rounds, self.scale, self.scratch, self.say)
        return f"Loaders, peers from {SERVERS[loader_timing.ROWS[name]].title}", figures, skipped

    def share(self) -> Outcome:
        turns, skipped = self._turns(shared_jobs.PEERS, "seaweedfs")
        figures = shared_jobs.measure(turns, self.scale.loader_rounds, self.scale, self.scratch, self.say)
        return shared_jobs.title(self.scale), figures, skipped

    def keep(self) -> Outcome:
        album = self._album()
        photo_dataset.compile_ours()
        return kept_row.title(self.scale), kept_row.measure(album, self.scale, self.scratch, self.say), {}

    def rotational(self) -> Outcome:
        title, reason = rotational_row.title(self.scale), rotational_drive.missing()
        if reason:
            return title, (), {rotational_row.NAME: reason}
        self.say(f"making {self.scale.rotational} photographs")
        album = photo_dataset.make_album(self.scratch, self.scale.rotational)
        photo_dataset.compile_ours()
        reason = SERVERS["seaweedfs"].missing() or self._pack(album)
        peers = () if reason else rotational_row.PEERS
        figures = rotational_row.measure(album, peers, self.scale, self.scratch, self.say)
        return title, figures, dict.fromkeys(rotational_row.PEERS, reason) if reason else {}

    def _pack(self, album: photo_dataset.Album) -> str:
        """Write the shards of the peers' formats; why it cannot be done, or empty."""
        self.say("making the peers' environment")
        try:
            photo_dataset.pack(photo_dataset.make_peers(self.scratch), album)
        except photo_dataset.PeersError as error:
            return str(error)
        return ""

    def deliver(self) -> Outcome:
        turns, skipped = self._turns((), "meshd")
        server = next((turn.server for turn in turns), None)
        figures = loader_cpu_cost.measure(server, self.scale, self.say) if server else ()
        return loader_cpu_cost.title(self.scale), figures, skipped

    def accelerate(self, name: str) -> Outcome:
        work, skipped = accelerators.workload(name, self.scale), dict[str, str]()
        names = ["meshd", "seaweedfs"]
        try:
            self.say("making the peers' environment")
            photo_dataset.make_peers(self.scratch)
        except photo_dataset.PeersError as error:
            names, skipped = names[:1], dict.fromkeys(work.peers, str(error))
        servers = {name: server for name in names if (server := self.server(name))}
        figures = accelerators.measure(work, servers, self.scale, self.scratch, self.say)
        return work.title, figures, skipped | self.absent

    def _turns(self, peers: tuple[str, ...], place: str) -> tuple[list[loader_timing.Turn], dict[str, str]]:
        """Ours from meshd, then the peers from the server of that name, all photographs uploaded."""
        skipped: dict[str, str] = {}
        album = self._album()
        photo_dataset.compile_ours()
        try:
            if peers:
                self.say("making the peers' environment")
                photo_dataset.pack(photo_dataset.make_peers(self.scratch), album)
        except photo_dataset.PeersError as error:
            skipped, peers = dict.fromkeys(peers, str(error)), ()
        names = dict.fromkeys(("meshd", *([place] if peers else [])))
        servers = {name: server for name in names if (server := self.server(name))}
        for server in servers.values():
            if server not in self._filled:
                photo_dataset.upload(server, album, self.say)
                self._filled.append(server)
        turns = (
            [loader_timing.Turn(ours, servers["meshd"]) for ours in loader_timing.OURS]
            if "meshd" in servers
            else []
        )
        if place in servers:
            turns += [loader_timing.Turn(peer, servers[place]) for peer in peers]
        return turns, skipped | self.absent

    def memory(self) -> Outcome:
        server = self.server("meshd")
        title = f"Memory under {self.scale.memory_connections} large bodies"
        if server is None:
            return title, (), dict(self.absent)
        return title, self._memory_figures(server), {}

    def _memory_figures(self, server: Server) -> Iterator[Figure]:
        yield self._idle()
        residency.prepare(server, self.scale)
        for direction in residency.DIRECTIONS:
            self.say(f"memory: {direction}")
            self._await_space(2 * self.scale.memory_bytes * self.scale.memory_connections)
            yield residency.measure(server, direction, self.scale)

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

"""`meshd serve` once the settings are known: recover, bind, fork, supervise.

Law: the caller holds the directory lock and has set the environment (see `environment`) before importing this
module, for it imports everything heavy, once, so that all children share the memory.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import signal
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from meshd.cluster.belonging import check_lone
from meshd.config import ConfigError
from meshd.control.earlier import bring_forward
from meshd.control.identities import IdentityTable
from meshd.control.nodesecret import NodeSecret
from meshd.control.opening import open_control
from meshd.errors import IndexLostError, MeshdError, StartupError
from meshd.kit.clock import SystemClock
from meshd.runtime.board import Board
from meshd.runtime.caching import close_cache, recover_cache
from meshd.runtime.carrying import MOVER, run_mover
from meshd.runtime.children import ChildSpec, ended, fork
from meshd.runtime.credentials import given_credentials, root_credentials
from meshd.runtime.indexloss import remember_loss
from meshd.runtime.listening import endpoint, open_doors
from meshd.runtime.loglevels import LevelWatch
from meshd.runtime.meeting import MADE, meet
from meshd.runtime.sparing import spare_disk
from meshd.runtime.steward import run_steward
from meshd.runtime.supervisor import Hooks, Stage, Supervisor
from meshd.runtime.transforming import run_transform
from meshd.runtime.worker import run_worker
from meshd.store.preparing import recover
from meshd.store.unreadable import advice, check_readable
from meshd.telemetry import logs, verbosity
from meshd.telemetry.audit import open_audit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from meshd.config import NodeSettings
    from meshd.control.identities import Account, Origin
    from meshd.control.interface import ControlStore
    from meshd.runtime.children import Reporter
    from meshd.runtime.listening import Doors

_log = logging.getLogger("meshd.supervisor")
_TRANSFORM_DELAY = 0.2  # samples may kill these; whoever brings such is not to slow down the others
_GRACE = 5.0  # seconds beyond a stage's own before its children are killed


def launch(settings: NodeSettings, env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Run the node until it is told to stop; `say` prints the lines meant for the operator.

    Raises ConfigError and StartupError.
    """
    logs.configure(settings.log_format, settings.log_level, "supervisor")
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # ask for another log level once it runs
        signal.signal(number, signal.SIG_IGN)
    _set_limits()
    _warn_if_open(settings.store.data_dir)
    check_readable(settings.store)
    if settings.cluster.control is None:
        check_lone(settings.store.data_dir)
    else:
        given = given_credentials(env)
        _in_child("joining", lambda _: meet(settings, root_given=given))
    root = root_credentials(settings.store.data_dir, env)
    people = _People(settings, root.account())
    people.read()
    _check_audit(settings.audit_log)
    doors = open_doors(settings)
    settings = _advertised(settings, doors)
    if root.made or (settings.run_dir / MADE).exists():
        say(
            f"meshd root access_key={root.access_key} secret_key={root.secret_key} "
            f"(shown this once; kept in {settings.store.data_dir / 'root-credentials.json'})\n"
            f"  export AWS_ENDPOINT_URL={settings.cluster.advertise} "
            f"AWS_ACCESS_KEY_ID={root.access_key} AWS_SECRET_ACCESS_KEY={root.secret_key}"
        )
    _in_child("recovery", lambda _: _recover(settings, people))
    doors.listen(settings.http.backlog)
    try:
        _supervise(settings, doors, people, say)
    except IndexLostError as error:
        _log.critical(advice(settings.store.index_dir), extra={"why": str(error)})
        with suppress(StartupError):
            _in_child("last word", lambda _: remember_loss(settings))
        raise StartupError(f"{error}: {advice(settings.store.index_dir)}") from error
    _in_child("cache", lambda _: close_cache(settings.cache_store))


def _advertised(settings: NodeSettings, doors: Doors) -> NodeSettings:
    """With the URL that others are told: where it listens, unless it was said."""
    where = settings.cluster.advertise or endpoint(doors)
    return replace(settings, cluster=replace(settings.cluster, advertise=where))


def _supervise(settings: NodeSettings, doors: Doors, people: _People, say: Callable[[str], None]) -> None:
    ready = f"meshd ready endpoint={endpoint(doors)} node={settings.node_id} data={settings.store.data_dir}"
    on_demand = [MOVER] if settings.cluster.control is not None else []
    board = Board(_names(settings), on_demand)
    clock = SystemClock()
    supervisor = Supervisor(
        [_spec(settings, doors, board, name) for name in (*_names(settings), *on_demand)],
        _stages(settings),
        board=board,
        clock=clock,
        level=LevelWatch(settings.log_level, verbosity.shared, clock),
        hooks=Hooks(ready=lambda: say(ready), draining=doors.close_http, hangup=people.reload),
        held=doors.fds,
        hang_timeout=settings.hang_timeout,
    )
    gc.collect()
    gc.freeze()  # keeps the collector of a child from touching, and so copying, what all share
    supervisor.run()


def _names(settings: NodeSettings) -> list[str]:
    workers = [f"worker-{index}" for index in range(settings.workers)]
    transforms = [f"transform-{index}" for index in range(settings.transform.processes)]
    return [*workers, *(["steward-0"] if settings.workers > 1 else []), *transforms]


def _spec(settings: NodeSettings, doors: Doors, board: Board, name: str) -> ChildSpec:
    role, _, number = name.partition("-")
    index = int(number)
    if role == "transform":
        sock = doors.transforms[index]
        body = partial(run_transform, settings, index, sock)
        return ChildSpec(name, body, frozenset([sock.fileno()]), _TRANSFORM_DELAY)
    if role == "mover":
        door = doors.mover.fileno()
        return ChildSpec(name, partial(run_mover, settings, doors), frozenset([door]), door=door)
    if role == "steward":
        return ChildSpec(name, partial(run_steward, settings, doors), frozenset([doors.steward.fileno()]))
    own = {doors.http.fileno()} | ({doors.steward.fileno()} if settings.workers == 1 else set())
    return ChildSpec(name, partial(run_worker, settings, index, doors, board.trouble), frozenset(own))


def _stages(settings: NodeSettings) -> Sequence[Stage]:
    """Workers finish their requests first, for these may need the steward, and it the transforms."""
    return (
        Stage(frozenset({"worker"}), settings.http.drain_timeout + _GRACE),
        Stage(frozenset({"steward", "mover"}), _GRACE),
        Stage(frozenset({"transform"}), _GRACE),
    )


def _set_limits() -> None:
    """All the open files the system allows: connections, data files and descriptors in flight add up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.umask(0o077)  # objects and keys are nobody else's to read


def _warn_if_open(data_dir: Path) -> None:
    if data_dir.stat().st_mode & 0o077:
        _log.warning("the data directory can be read by others; chmod 700 it", extra={"path": str(data_dir)})


def _check_audit(path: Path | None) -> None:
    """Raise ConfigError if lines could not be appended to the audit log."""
    if path is None:
        return
    try:
        os.close(open_audit(path))
    except OSError as error:
        raise ConfigError(f"audit-log: cannot append to {path}: {error.strerror}") from error


class _People:
    """Root and the users of the file, as the supervisor last read them."""

    def __init__(self, settings: NodeSettings, root: Account) -> None:
        self._settings, self._root = settings, root
        self._users: tuple[Account, ...] = ()

    def read(self) -> None:
        """Read the file. Raises ConfigError."""
        path = self._settings.users_file
        if path is not None:
            from meshd.runtime.users import read_users  # it needs YAML, which most nodes do not

            self._users = read_users(path, [self._root.key.access_key])
        logs.scrubber.hide(account.key.secret_key for account in (self._root, *self._users))

    def reload(self) -> None:
        """Read the file again and have a child write it to the control state, and say how that went; a bad
        file changes nothing."""
        try:
            self.read()
        except ConfigError as error:
            _log.error("users not reloaded", extra={"why": str(error)})
            return
        _, pipe = fork(ChildSpec("users-0", lambda _: self._store_anew()), ())
        os.close(pipe)

    def _store_anew(self) -> None:
        try:
            self.store()
        except MeshdError as error:
            why = f"{error}; they are as they were: send SIGHUP again then"
            _log.error("users not reloaded", extra={"why": why})
        else:
            _log.info("users reloaded", extra={"users": len(self._users)})

    def store(self) -> None:
        """Make the control state's identities these. In a child: it opens LMDB."""
        clock = SystemClock()
        with closing(open_control(self._settings, clock)) as control:
            asyncio.run(self._store(control, clock.now_ms()))

    async def _store(self, control: ControlStore, now_ms: int) -> None:
        await NodeSecret(control).ensure()
        await bring_forward(control, now_ms)
        accounts = (self._root, *self._users)
        # In a mesh a node without a users file says nothing about those of another node's.
        shared = self._settings.cluster.control is not None and self._settings.users_file is None
        origins: frozenset[Origin] = frozenset({"root"} if shared else {"root", "file"})
        await IdentityTable(control).replace(origins, accounts, now_ms)


def _recover(settings: NodeSettings, people: _People) -> None:
    lost = recover(settings.store, partial(spare_disk, settings))
    if lost:
        _log.error("the bytes of versions are lost with a disk", extra={"number": lost})
    recover_cache(settings.cache_store)
    people.store()


def _in_child(name: str, work: Callable[[Reporter], None]) -> None:
    """Do `work` in a child and wait: LMDB must not be open across a fork. Raises StartupError."""

    def body(reporter: Reporter) -> None:
        try:
            work(reporter)
        except MeshdError as error:
            reporter.failed(str(error))
            raise

    pid, pipe = fork(ChildSpec(name, body), ())
    os.set_blocking(pipe, True)
    with os.fdopen(pipe, "rb") as reports:
        said = reports.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise StartupError(f"{name} failed: {_reason(said) or ended(status)}")


def _reason(said: bytes) -> str:
    lines = said.splitlines()
    return str(json.loads(lines[0]).get("reason", "")) if lines else ""

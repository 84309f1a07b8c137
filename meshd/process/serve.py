"""`meshd serve` after the settings are known: recover, bind, fork, supervise.

The caller holds the directory lock and has set the environment (`environment`) before it imports this module,
which imports everything heavy once, so that all children share the memory. A node starts without one of
its disks only if, by the map, available nodes have all of its data, or with --lost-disk: the disk may just
not be mounted, and data given up is never looked for on it again. A node that cannot read its index stops
and refuses to restart until an operator intervenes; otherwise it would rejoin and crash on the next read.
`mesh cluster status` shows its last report.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import select
import signal
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from meshd.cluster.data_dir_identity import copy_identity, require_single_node
from meshd.cluster.repair.scrub_scheduler import publish_disks
from meshd.config import ConfigError
from meshd.control.buckets import BucketTable
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.factory import open_control
from meshd.control.identities import IdentityTable
from meshd.control.migrations import migrate_control_state
from meshd.errors import IndexLostError, MeshdError, StartupError
from meshd.process import memory_usage
from meshd.process.child_process import Child, ChildSpec, describe_exit, fork_child
from meshd.process.coordinator import run_coordinator
from meshd.process.join_cluster import ROOT_MADE, join_cluster
from meshd.process.listen_sockets import local_endpoint, open_listen_sockets
from meshd.process.log_level import LogLevelWatcher
from meshd.process.process_status import ProcessStatus
from meshd.process.rebalance_process import REBALANCE_PROCESS, run_rebalance_process
from meshd.process.root_credentials import has_environment_credentials, root_credentials
from meshd.process.supervisor import Hooks, Stage, Supervisor
from meshd.process.transform_process import run_transform
from meshd.process.wiring.cache import forget_writes_through, recover_cache
from meshd.process.worker import run_worker
from meshd.store.disks.data_dir_guards import mark_index_unreadable, recovery_advice, require_readable_index
from meshd.store.disks.health_monitor import DiskState
from meshd.store.disks.startup_recovery import recover
from meshd.store.engine.checkpointer import close_relaxed, has_lost_sync
from meshd.store.errors import FormatError
from meshd.telemetry import logs
from meshd.telemetry.audit_log import open_audit_file
from meshd.telemetry.span_export import require_tracing_library
from meshd.util.clock import SystemClock
from meshwire.cluster import transitions as turn
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from meshd.config import NodeSettings
    from meshd.control.control_api import ControlStore
    from meshd.control.identities import Account, Origin
    from meshd.process.child_process import ChildReporter
    from meshd.process.listen_sockets import ListenSockets


_log = logging.getLogger("meshd.config")
_disk_log = logging.getLogger("meshd.disks")


def require_covered_disk(settings: NodeSettings, path: Path, how: str) -> None:
    """Raise FormatError unless the node may start without the disk; `how`: `is missing`, `cannot be read`."""
    if path in settings.lost_disks:
        _disk_log.warning("starting without a disk (--lost-disk)", extra={"disk": str(path), "why": how})
    elif settings.cluster.control is None:
        raise FormatError(
            f"disk {path} {how}; mount it and start again with its --disk. If it is lost for good, "
            f"--lost-disk {path} starts without its data"
        )
    elif _is_covered(settings):
        fields = {"disk": str(path), "why": how}
        _disk_log.error("a disk is out of service: its data is fetched from other nodes", extra=fields)
    else:
        raise FormatError(
            f"disk {path} {how}, and by the cluster map no available node has all data of this one: "
            "mount it, or start the other nodes first. If it is lost for good, with data that only it had, "
            f"start once with --lost-disk {path}"
        )


def _is_covered(settings: NodeSettings) -> bool:
    with closing(open_control(settings, SystemClock())) as control:
        cluster = ClusterMapStore(control).current()
        if cluster is None:
            return False
        copies = BucketTable(control).min_replica_count(cluster.copies, cluster.counts)
        return turn.can_lose_node(cluster, settings.node_id, copies)


_REPORT_TIMEOUT: Final = 10.0
_INDEX_LOST: Final = "holds the index and cannot be read; the node has stopped, and its log says what to do"


def record_index_loss(settings: NodeSettings) -> None:
    """Record the loss for the next start and, in a cluster, for its operators. Runs in a child, because it
    opens the control store. Raises ControlError, TimeoutError."""
    mark_index_unreadable(settings.store)
    if settings.cluster.control is None:
        return
    state = DiskState(str(settings.store.index_dir), False, _INDEX_LOST)
    with closing(open_control(settings, SystemClock())) as control:
        asyncio.run(asyncio.wait_for(publish_disks(control, settings.node_id, (state,)), _REPORT_TIMEOUT))


_log = logging.getLogger("meshd.supervisor")
_TRANSFORM_DELAY = 0.2  # a sample may crash one; other clients must not be slowed down by it
_STAGE_GRACE = 5.0  # seconds after a stage's own limit before its children are killed
_CHECKPOINT_TIMEOUT = 600.0  # seconds for the last checkpoint: all that the page cache holds, to a slow disk


def serve_node(settings: NodeSettings, env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Run the node until it is stopped; `say` prints the lines meant for the operator, as JSON if the log is.

    Raises ConfigError and StartupError.
    """
    logs.configure(settings.log_format, settings.log_level, "supervisor")
    say = _said_as_json(say) if settings.log_format == "json" else say
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # these change the log level once the node runs
        signal.signal(number, signal.SIG_IGN)
    for warning in settings.start_warnings:
        _log.warning("%s", warning)
    if settings.tracing is not None:
        require_tracing_library()
    _set_limits()
    _warn_if_open(settings.store.data_dir)
    _warn_of_frame_cache(settings.transform.frame_cache_bytes)
    require_readable_index(settings.store)
    if settings.cluster.control is None:
        require_single_node(settings.store)
    else:
        given = has_environment_credentials(env)
        _in_child("joining", lambda _: join_cluster(settings, root_given=given))
    root = root_credentials(settings.store.data_dir, env)
    people = _Accounts(settings, root.account())
    people.read()
    _check_audit(settings.audit_log)
    sockets = open_listen_sockets(settings)
    settings = _advertised_node(settings, sockets)
    if root.generated or (settings.run_dir / ROOT_MADE).exists():
        say(
            f"meshd root access_key={root.access_key} secret_key={root.secret_key} "
            f"(shown only once; stored in {settings.store.data_dir / 'root-credentials.json'})\n"
            f"  export AWS_ENDPOINT_URL={settings.cluster.advertise} "
            f"AWS_ACCESS_KEY_ID={root.access_key} AWS_SECRET_ACCESS_KEY={root.secret_key}"
        )
    _in_child("recovery", lambda _: _recover(settings, people))
    sockets.listen_http(settings.http.backlog)
    try:
        _supervise(settings, sockets, people, say)
    except IndexLostError as error:
        _log.critical(recovery_advice(settings.store.index_dir), extra={"why": str(error)})
        with suppress(StartupError):
            _in_child("last word", lambda _: record_index_loss(settings), 3 * _REPORT_TIMEOUT)
        raise StartupError(f"{error}: {recovery_advice(settings.store.index_dir)}") from error
    _in_child("checkpoint", lambda _: _close_stores(settings), _CHECKPOINT_TIMEOUT)
    if has_lost_sync(settings.store):
        raise StartupError(
            "a sync failed: start the node again, which goes back to its last checkpoint; see the kernel log"
        )


def _said_as_json(say: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: say(logs.notice_line(line))


def _advertised_node(settings: NodeSettings, sockets: ListenSockets) -> NodeSettings:
    """Return the settings with the URL that other nodes use: by default where the node listens."""
    where = settings.cluster.advertise or local_endpoint(sockets)
    return replace(settings, cluster=replace(settings.cluster, advertise=where))


def _supervise(
    settings: NodeSettings, sockets: ListenSockets, people: _Accounts, say: Callable[[str], None]
) -> None:
    endpoint, data = local_endpoint(sockets), settings.store.data_dir
    ready = f"meshd ready endpoint={endpoint} node={settings.node_id} data={data}"
    on_demand = [REBALANCE_PROCESS] if settings.cluster.control is not None else []
    board = ProcessStatus(_names(settings), on_demand)
    clock = SystemClock()
    supervisor = Supervisor(
        [_spec(settings, sockets, board, name) for name in (*_names(settings), *on_demand)],
        _stages(settings),
        board=board,
        clock=clock,
        level=LogLevelWatcher(settings.log_level, logs.runtime_level, clock),
        hooks=Hooks(ready=lambda: say(ready), draining=sockets.close_http, hangup=people.reload),
        held=sockets.fds,
        hang_timeout=settings.hang_timeout,
        shutdown_delay=settings.http.shutdown_delay,
    )
    gc.collect()
    gc.freeze()  # keeps a child's garbage collector from writing to, and so copying, shared pages
    supervisor.run()


def _names(settings: NodeSettings) -> list[str]:
    workers = [f"worker-{index}" for index in range(settings.workers)]
    transforms = [f"transform-{index}" for index in range(settings.transform.processes)]
    return [*workers, *(["coordinator-0"] if settings.workers > 1 else []), *transforms]


def _spec(settings: NodeSettings, sockets: ListenSockets, board: ProcessStatus, name: str) -> ChildSpec:
    role, _, number = name.partition("-")
    index = int(number)
    if role == "transform":
        sock = sockets.transforms[index]
        body = partial(run_transform, settings, index, sock)
        return ChildSpec(name, body, frozenset([sock.fileno()]), _TRANSFORM_DELAY)
    if role == "rebalancer":
        listen_socket = sockets.rebalancer.fileno()
        return ChildSpec(
            name,
            partial(run_rebalance_process, settings, sockets),
            frozenset([listen_socket]),
            listen_fd=listen_socket,
        )
    if role == "coordinator":
        return ChildSpec(
            name, partial(run_coordinator, settings, sockets), frozenset([sockets.coordinator.fileno()])
        )
    own = {sockets.http.fileno()} | ({sockets.coordinator.fileno()} if settings.workers == 1 else set())
    return ChildSpec(
        name, partial(run_worker, settings, index, sockets, board.unready_reason), frozenset(own)
    )


def _stages(settings: NodeSettings) -> Sequence[Stage]:
    """Order the stages: workers finish their requests first, which may need the coordinator and the
    transforms."""
    return (
        Stage(frozenset({"worker"}), settings.http.drain_timeout + _STAGE_GRACE),
        Stage(frozenset({"coordinator", "rebalancer"}), _STAGE_GRACE),
        Stage(frozenset({"transform"}), _STAGE_GRACE),
    )


def _set_limits() -> None:
    """Allow as many open files as the system permits: connections, data files and passed descriptors add
    up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.umask(0o077)  # other users must not read objects and keys


def _warn_if_open(data_dir: Path) -> None:
    """Warn of an own directory that others can read. The mode of a directory of another user, as on the
    volumes of Kubernetes, is for that user to change; files in it are this user's alone in any case."""
    found = data_dir.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        _log.warning("other users can read the data directory; chmod 700 it", extra={"path": str(data_dir)})


def _warn_of_frame_cache(size: int) -> None:
    """Warn of a cache that would take all memory, as of a unit that was mistaken: the kernel would kill
    processes once it is full."""
    room = memory_usage.memory_room()
    if room is not None and size > room.whole:
        _log.warning(
            "frame-cache is more than the memory of this machine or control group; set a smaller one",
            extra={"frame_cache": size, "memory": room.whole},
        )


def _check_audit(path: Path | None) -> None:
    """Raise ConfigError if the audit log cannot be appended to."""
    if path is None:
        return
    try:
        os.close(open_audit_file(path))
    except OSError as error:
        raise ConfigError(f"audit-log: cannot append to {path}: {error.strerror}") from error


class _Accounts:
    """Root and the users of the users file, as the supervisor last read them."""

    def __init__(self, settings: NodeSettings, root: Account) -> None:
        self._settings, self._root = settings, root
        self._users: tuple[Account, ...] = ()

    def read(self) -> None:
        """Read the users file. Raises ConfigError."""
        path = self._settings.users_file
        if path is not None:
            from meshd.process.users_file import read_users  # it needs YAML, which most nodes do not

            self._users = read_users(path, [self._root.key.access_key])
        logs.secret_masker.add_secrets(account.key.secret_key for account in (self._root, *self._users))

    def reload(self) -> None:
        """Read the users file again, have a child write it to the control state, and log the result. An
        invalid file changes nothing."""
        try:
            self.read()
        except ConfigError as error:
            _log.error("users not reloaded", extra={"why": str(error)})
            return
        try:
            _, pipe = fork_child(ChildSpec("users-0", lambda _: self._store_again()), ())
        except OSError as error:
            _log.error("users not reloaded", extra={"why": f"{error}; send SIGHUP again to retry"})
            return
        os.close(pipe)

    def _store_again(self) -> None:
        try:
            self.store()
        except MeshdError as error:
            why = f"{error}; the users are unchanged; send SIGHUP again to retry"
            _log.error("users not reloaded", extra={"why": why})
        else:
            _log.info("users reloaded", extra={"users": len(self._users)})

    def store(self) -> None:
        """Replace the identities in the control state. Runs in a child, because it opens LMDB."""
        clock = SystemClock()
        with closing(open_control(self._settings, clock)) as control:
            asyncio.run(self._store(control, clock.now_ms()))

    async def _store(self, control: ControlStore, now_ms: int) -> None:
        await ClusterSecret(control).create_if_missing()
        await migrate_control_state(control, now_ms)
        accounts = (self._root, *self._users)
        # In a cluster, a node without a users file does not replace the file users of another node.
        shared = self._settings.cluster.control is not None and self._settings.users_file is None
        origins: frozenset[Origin] = frozenset({"root"} if shared else {"root", "file"})
        table = IdentityTable(control)
        before = [key for key in table.keys().values() if key.origin == "root"]
        await table.replace_accounts(origins, accounts, now_ms)
        mine = self._root.key
        if any((key.access_key, key.secret_key) != (mine.access_key, mine.secret_key) for key in before):
            where = "" if self._settings.cluster.control is None else " by every node of the mesh"
            _log.warning(
                f"root's key pair was replaced by the one of this node: the former pair is refused{where}",
                extra={"former": before[0].access_key, "now": mine.access_key},
            )


def _recover(settings: NodeSettings, people: _Accounts) -> None:
    lost = recover(settings.store, partial(require_covered_disk, settings))
    if lost:
        _log.error("versions lost their data with a disk", extra={"number": lost})
    recover_cache(settings.cache_store)
    copy_identity(settings.store)
    people.store()
    forget_writes_through(settings)


def _close_stores(settings: NodeSettings) -> None:
    for store in (settings.store, settings.cache_store):
        close_relaxed(store, SystemClock())


def _in_child(name: str, work: Callable[[ChildReporter], None], timeout: float | None = None) -> None:
    """Run `work` in a child and wait for it: LMDB must not be open across a fork. Raises StartupError.

    `timeout`: seconds after which it is killed. None: before the node runs, a signal ends this process and
    with it the child, and recovery may take as long as it needs.
    """
    spec = ChildSpec(name, work)
    try:
        child = Child(spec, *fork_child(spec, ()))
    except OSError as error:
        why = open_files_message(error) or error
        raise StartupError(f"{name} cannot be started: {why}") from error
    end = select.poll()
    end.register(child.pipe, 0)  # only the hangup, when the child's end of the pipe is closed
    if not end.poll(None if timeout is None else timeout * 1000):
        os.kill(child.pid, signal.SIGKILL)
        raise StartupError(
            f"{name} did not end within {timeout:.0f} seconds: a disk may not answer, see the kernel log"
        )
    reports = child.read_reports()
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    if status:
        raise StartupError(f"{name} failed: {reports[0]['reason'] if reports else describe_exit(status)}")

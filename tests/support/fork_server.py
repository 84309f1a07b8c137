"""Fork servers: fork test nodes from processes that have loaded all modules, which saves start-up time.

Law: it ends what it started; a node nobody ends lives on, as a subprocess does. Several servers take
turns, so that the nodes of one cluster do not all hash strings alike.

    with ForkServers() as servers, forked_from(servers):
        Daemon.start()

Where several processes run tests (`-n`), their servers are forked, too: from two that have loaded the modules
once for all (`NodeTemplates`). Programs that tests run, as a benchmark, find the servers of the process that
runs the test, and have their nodes forked from these.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Protocol, Self

from tests.support.fork_server_main import FORK_SERVER, MAX_REQUEST, REQUESTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SERVERS: Final = 2
TEMPLATES: Final = "MESH_TEST_NODE_TEMPLATES"
"""Names the folders of the processes that servers are forked from; without it they are executed."""
PLACES: Final = "MESH_TEST_FORK_SERVERS"
"""Names the folders of the servers that the programs of a test use."""
_PATIENCE: Final = 60.0
_used: list[ForkServers | None] = []


class Process(Protocol):
    """What is asked of a `subprocess.Popen`, or of what stands for one."""

    @property
    def pid(self) -> int: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@contextmanager
def forked_from(servers: ForkServers | None) -> Iterator[None]:
    """Meanwhile what is launched is forked from these (None: executed)."""
    before = _used[:]
    _used[:] = [servers]
    try:
        yield
    finally:
        _used[:] = before


def launch(
    arguments: Sequence[str],
    env: Mapping[str, str],
    stderr: IO[bytes],
    *,
    stdout: IO[bytes] | None = None,
    folder: Path | None = None,
    namespace: str = "",
) -> Process:
    """`python -m meshd` with these arguments in this environment and folder (default: this process's), its
    output a file or else a pipe; forked where servers are used. `namespace`: the file of the network
    namespace it runs in (default: this process's)."""
    servers = _used[0] if _used else None
    if servers is not None:
        return servers.start(arguments, env, stderr, stdout, folder, namespace)
    if not _used and (places := [each for each in folders(PLACES) if (each / REQUESTS).exists()]):
        return ask(secrets.choice(places), arguments, env, stderr, stdout, folder, namespace)
    prefix = ("nsenter", f"--net={namespace}") if namespace else ()
    return execute(arguments, env, stderr, stdout=stdout, folder=folder, prefix=prefix)


def outcome_of(
    *arguments: str, env: Mapping[str, str] | None = None, timeout: float = _PATIENCE
) -> subprocess.CompletedProcess[str]:
    """What came of `python -m meshd` with these arguments, which ends by itself, in this environment
    (default: this process's); launched."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = launch(arguments, os.environ if env is None else env, stderr, stdout=stdout)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(arguments, code, *texts)


def execute(
    arguments: Sequence[str],
    env: Mapping[str, str],
    stderr: IO[bytes],
    *,
    stdout: IO[bytes] | None = None,
    folder: Path | None = None,
    prefix: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """As `launch`, never forked; `prefix` is a command that runs it."""
    command = [*prefix, sys.executable, "-m", "meshd", *arguments]
    return subprocess.Popen(command, stdout=stdout or subprocess.PIPE, stderr=stderr, env=env, cwd=folder)


class ForkedProcess:
    """As `subprocess.Popen` of `python -m meshd …`, `stdout` being a pipe's end, if any. Safe to use from any
    thread."""

    def __init__(self, arguments: Sequence[str], stdout: int | None, told: socket.socket) -> None:
        self.args, self._told = list(arguments), told
        self.stdout = None if stdout is None else os.fdopen(stdout, "rb", 0)
        self.returncode: int | None = None
        self._waiting = threading.Lock()
        self.pid = self._read(_PATIENCE)

    def __repr__(self) -> str:
        return f"<ForkedProcess {self.pid} returncode={self.returncode}>"

    def poll(self) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, so many seconds at most. Raises subprocess.TimeoutExpired."""
        # Who asks while another thread waits is told that it runs.
        if not self._waiting.acquire(timeout=-1 if timeout is None else timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        try:
            if self.returncode is None:
                self.returncode = self._read(timeout)
                self._told.settimeout(_PATIENCE)
                self._told.shutdown(socket.SHUT_WR)
                self._told.recv(1)  # the end: it is no zombie any more
                self._told.close()
            return self.returncode
        finally:
            self._waiting.release()

    def terminate(self) -> None:
        """SIGTERM, unless it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _read(self, timeout: float | None) -> int:
        """A number that the server tells."""
        line = b""
        self._told.settimeout(timeout)
        while not line.endswith(b"\n"):
            try:
                got = self._told.recv(1)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            if not got:
                raise ChildProcessError("the process that nodes are forked from has ended")
            line += got
        return int(line)


def folders(variable: str) -> list[Path]:
    """Those that a variable names."""
    return [Path(each) for each in os.environ.get(variable, "").split(os.pathsep) if each]


def ask(
    place: Path,
    arguments: Sequence[str],
    env: Mapping[str, str],
    stderr: IO[bytes],
    stdout: IO[bytes] | None = None,
    folder: Path | None = None,
    namespace: str = "",
    more: Sequence[socket.socket] = (),
) -> ForkedProcess:
    """Have a node forked by the server whose folder this is; `more`: what a fork server has besides."""
    asked = {"arguments": list(arguments), "environment": dict(env), "namespace": namespace}
    asked["folder"] = str(folder or Path.cwd())
    text = json.dumps(asked).encode()
    assert len(text) <= MAX_REQUEST, "the environment is too large"
    mine, theirs = socket.socketpair()
    output, printed = os.pipe() if stdout is None else (None, os.dup(stdout.fileno()))
    files = [printed, stderr.fileno(), theirs.fileno(), *(each.fileno() for each in more)]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
            requests.connect(str(place / REQUESTS))
            socket.send_fds(requests, [text], files)
    finally:
        theirs.close()
        os.close(printed)
    return ForkedProcess(arguments, output, mine)


class _ForkServer:
    """One process to fork from, until it is closed or this process ends. With a template (its folder) it is
    forked from that."""

    def __init__(self, place: Path, env: Mapping[str, str], template: Path | None = None) -> None:
        self.place = place
        place.mkdir()
        requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        requests.bind(str(place / REQUESTS))  # what is asked before there is a process waits
        self._life, theirs = socket.socketpair()
        self.process: Process
        with requests, theirs, open(os.devnull, "wb") as nothing, open(2, "wb", closefd=False) as errors:
            if template is not None:
                more = (requests, theirs)
                self.process = ask(template, [FORK_SERVER], env, errors, nothing, more=more)
                return
            numbers = [requests.fileno(), theirs.fileno()]
            words = ["-m", "tests.support.fork_server_main", *map(str, numbers), str(place / "data")]
            self.process = subprocess.Popen(
                [sys.executable, *words],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(env),
            )

    def close(self) -> None:
        self._life.shutdown(socket.SHUT_RDWR)  # whoever else was forked from here may have it open
        self._life.close()
        self.process.wait(_PATIENCE)


class NodeTemplates:
    """Processes that fork servers are forked from, by all processes that inherit this one's environment,
    until they are closed. Can be asked at once: they answer when they have loaded all modules."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="meshd-templates-")
        env = {name: value for name, value in os.environ.items() if not name.startswith("MESHD_")}
        self._servers = [_ForkServer(Path(self._place.name, str(n)), env) for n in range(SERVERS)]
        os.environ[TEMPLATES] = os.pathsep.join(str(server.place) for server in self._servers)

    def __repr__(self) -> str:
        return f"<NodeTemplates {self._place.name}>"

    def close(self) -> None:
        """End them."""
        os.environ.pop(TEMPLATES, None)
        for server in self._servers:
            server.close()
        self._place.cleanup()


class ForkServers:
    """Started when the first nodes are, in the environment of now. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends = ExitStack()
        self.places = list[Path]()
        """Their folders: what `PLACES` names."""
        self._servers = list[_ForkServer]()
        self._turns = cycle(range(SERVERS))
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("MESHD_")}

    def __repr__(self) -> str:
        return f"<ForkServers {sorted(self.pids)}>"

    def __enter__(self) -> Self:
        place = self._ends.enter_context(tempfile.TemporaryDirectory(prefix="meshd-forkservers-"))
        self.places = [Path(place, str(number)) for number in range(SERVERS)]
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._ends.close()

    @property
    def pids(self) -> set[int]:
        """Of the processes that nodes are forked from, whose children these are."""
        return {server.process.pid for server in self._servers}

    def start(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        stderr: IO[bytes],
        stdout: IO[bytes] | None = None,
        folder: Path | None = None,
        namespace: str = "",
    ) -> ForkedProcess:
        """As `launch`."""
        with self._lock:
            turn = next(self._turns)
            if turn == len(self._servers):
                templates = folders(TEMPLATES)
                template = templates[turn] if turn < len(templates) else None
                self._servers.append(_ForkServer(self.places[turn], self._env, template))
            place = self.places[turn]
        return ask(place, arguments, env, stderr, stdout, folder, namespace)

"""A daemon as a subprocess, for component and crash tests, the demo and the benchmarks.

Law: it ends what it started, by process id; keeps all output in files; listens on loopback, on its own
port.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import secrets
import select
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit
from weakref import WeakSet

from meshd.process.local_etcd import reserve_port
from meshd.util.clock import SystemClock
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, sign
from tests.support.bounded_wait import await_true
from tests.support.earlier_release import code_path
from tests.support.fork_server import execute, launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from tests.support.certificates import Authority
    from tests.support.fork_server import Process

FAILPOINTS: Final = "MESHD_FAILPOINTS"
_READY = re.compile(r"\bmeshd ready endpoint=(\S+).*\n")  # also as JSON
_clock = SystemClock()
_all: WeakSet[Daemon] = WeakSet()
_failing = list[str]()


def live_daemons() -> list[Daemon]:
    """Those that somebody still has; what starts them again may be another test."""
    return list(_all)


@contextmanager
def with_failpoints(points: str) -> Iterator[None]:
    """Meanwhile what is started has these failpoints, in the words of MESHD_FAILPOINTS, where its own do not
    say otherwise."""
    _failing.append(points)
    try:
        yield
    finally:
        _failing.remove(points)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered. Header names are lower-case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class DaemonFailedError(AssertionError):
    """The daemon did not come up, or did not end, as it should. Carries its output."""


class Daemon:
    """`with Daemon.start() as daemon: daemon.client().create_bucket(Bucket="b")`.

    Without `data_dir`, a temporary one is used and removed at the end. `args` are more flags of `meshd serve`
    (a later one wins), `env` more environment; `host`, `namespace` (the file of the network namespace it
    runs in), `prefix` (a command before its own, as `prlimit`) and `checkout` (of an earlier release, whose
    code it runs) may be set before it is up. Root keys are `access_key` and `secret_key`. With `tls` it
    speaks https with a certificate of an `authority` of its own, which its clients here trust.
    """

    def __init__(
        self,
        data_dir: Path | None,
        args: Sequence[str],
        env: Mapping[str, str],
        workers: int,
        *,
        tls: bool = False,
    ) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="meshd-"))
        self.data_dir = Path(data_dir) if data_dir is not None else self._scratch / "data"
        self.args, self.env, self.workers = tuple(args), dict(env), workers
        self.access_key = self.env.setdefault("MESHD_ROOT_ACCESS_KEY", "MESHROOT" + secrets.token_hex(4))
        self.secret_key = self.env.setdefault("MESHD_ROOT_SECRET_KEY", secrets.token_urlsafe(24))
        self.authority = authority_in(self._scratch / "tls") if tls else None
        self.pair = self.authority.issue() if self.authority else None
        self.endpoint = ""
        _all.add(self)
        self.host, self.namespace, self.prefix = "127.0.0.1", "", tuple[str, ...]()
        self.checkout: Path | None = None
        self._stdout = ""
        self._process: Process | None = None

    def __repr__(self) -> str:
        return f"<Daemon {self.endpoint or 'down'} pid={self.pid} {self.data_dir}>"

    @classmethod
    def start(
        cls,
        data_dir: Path | None = None,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        workers: int = 1,
        timeout: float = 60.0,
        tls: bool = False,
    ) -> Self:
        """Start one and wait until it is ready. Raises DaemonFailedError with its output."""
        daemon = cls(data_dir, args, env or {}, workers, tls=tls)
        try:
            daemon.up(timeout)
        except BaseException:
            daemon.close()
            raise
        return daemon

    # its life

    def up(self, timeout: float = 60.0) -> None:
        """Start the process (again); a restart keeps the port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        listen = urlsplit(self.endpoint).netloc or f"{host}:{reserve_port(self.host)}"
        arguments = ["serve", "--data-dir", str(self.data_dir), "--listen", listen]
        transform_workers = "--transform-workers" if self.checkout is None else "--transforms"
        arguments += ["--workers", str(self.workers), transform_workers, "1"]
        if self.pair is not None:
            arguments += ["--tls-cert", str(self.pair.cert), "--tls-key", str(self.pair.key)]
        self._process = self._launched([*arguments, *self.args])
        self._await_ready(timeout)

    def _launched(self, arguments: Sequence[str]) -> Process:
        env = {name: value for name, value in os.environ.items() if not name.startswith("MESHD_")} | self.env
        if points := ",".join(filter(None, (*_failing, env.get(FAILPOINTS)))):
            env[FAILPOINTS] = points
        with self.stderr_path.open("ab") as stderr:
            if self.checkout is not None:
                env["PYTHONPATH"] = code_path(self.checkout)
                return execute(arguments, env, stderr, folder=self.checkout, prefix=self.prefix)
            if self.prefix:
                return execute(arguments, env, stderr, prefix=self.prefix)
            return launch(arguments, env, stderr, namespace=self.namespace)

    def stop(self, timeout: float = 60.0) -> int:
        """SIGTERM, wait, return the exit code; 0 when it is not running. Kills it when it takes too long."""
        if self._process is None:
            return 0
        self._process.terminate()
        return self.wait(timeout)

    def wait(self, timeout: float = 60.0) -> int:
        """Wait until it has ended, and return the exit code. Kills it when it takes too long."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise DaemonFailedError(f"meshd did not end within {timeout} s\n{self.output()}") from None
        self._forget()
        return code

    def kill(self) -> None:
        """SIGKILL to the supervisor (its children follow), and wait."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._forget()

    def pause(self) -> None:
        """SIGSTOP to all its processes: it neither answers nor ends."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to all its processes."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        """To the supervisor first, which starts no child then, or buries those that ended; and to each child
        that is still there, also to those that have no name of their own yet."""
        os.kill(self.pid, number)
        for pid in self._child_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def restart(self) -> None:
        """Stop cleanly, start again on the same data and port."""
        self.stop()
        self.up()

    def close(self) -> None:
        """Stop it if it runs and remove what was temporary."""
        try:
            self.stop()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.output(), file=sys.stderr)
        self.close()

    # looking at it

    @property
    def pid(self) -> int:
        """The supervisor's process id; 0 when it is down."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether the supervisor runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def stderr_path(self) -> Path:
        """Its log, of all its lives."""
        return self._scratch / "stderr.log"

    def children(self) -> dict[str, int]:
        """Process ids of its children by name, such as `worker-0` or `transform-1`."""
        found = {}
        for pid in self._child_pids():
            with contextlib.suppress(OSError):
                found[Path(f"/proc/{pid}/comm").read_text().strip()] = pid
        return found

    def _child_pids(self) -> list[int]:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]

    def signal_child(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a child, when one that ended has been started again; returns its process id."""
        await_true(lambda: name in self.children())
        pid = self.children()[name]
        os.kill(pid, number)
        return pid

    def output(self) -> str:
        """Everything it printed and logged."""
        log = self.stderr_path.read_text(errors="replace") if self.stderr_path.exists() else ""
        return f"--- meshd stdout\n{self._stdout}--- meshd stderr\n{log}"

    # talking to it

    @property
    def ca_cert(self) -> str:
        """Path of what its clients must trust; empty without TLS."""
        return str(self.authority.cert) if self.authority else ""

    def client(self, **changes: Any) -> Any:
        """A boto3 S3 client with the root keys; `changes` go to `boto3.client` (config, say)."""
        from botocore.config import Config

        from tests.support.boto_sessions import boto_session

        # One attempt: a retry would hide what a test is about.
        config = Config(
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
            connect_timeout=60,
            read_timeout=60,
        )
        options = {
            "endpoint_url": self.endpoint,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "region_name": "us-east-1",
            "config": config,
            "verify": self.ca_cert or None,
        }
        return boto_session().client("s3", **(options | changes))

    def connect(self) -> http.client.HTTPConnection:
        """A connection to it, not yet open."""
        where = urlsplit(self.endpoint)
        if where.scheme == "http":
            return http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
        context = ssl.create_default_context(cafile=self.ca_cert)
        return http.client.HTTPSConnection(str(where.hostname), where.port, timeout=60, context=context)

    def request(self, method: str, target: str, body: bytes = b"") -> Answer:
        """One request signed with the root keys, over a connection of its own. `target` is path and query."""
        where = urlsplit(self.endpoint)
        digest = hashlib.sha256(body).hexdigest()
        path, _, query = target.partition("?")
        headers = {"host": where.netloc}
        headers |= sign(
            RequestHead(method, path, query, headers),
            Credential(self.access_key, self.secret_key),
            region="us-east-1",
            timestamp=_clock.now_ms() // 1000,
            payload_hash=digest,
        )
        connection = self.connect()
        with contextlib.closing(connection):
            connection.request(method, target, body, headers)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())

    # waiting

    def _await_ready(self, timeout: float) -> None:
        deadline = _clock.monotonic() + timeout
        start = len(self._stdout)
        while (match := _READY.search(self._stdout, start)) is None:
            if not self._read(deadline - _clock.monotonic()):
                code = self._ended()
                raise DaemonFailedError(f"meshd did not become ready (exit code {code})\n{self.output()}")
        self.endpoint = match[1]

    def _read(self, patience: float) -> bool:
        """Take in more of stdout; False at its end or when patience runs out."""
        assert self._process is not None
        assert self._process.stdout is not None
        if patience <= 0 or not select.select([self._process.stdout], [], [], patience)[0]:
            return False
        chunk = os.read(self._process.stdout.fileno(), 65536)
        self._stdout += chunk.decode(errors="replace")
        return bool(chunk)

    def _ended(self) -> int | None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        self.kill()
        return code

    def _forget(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            while self._read(1.0):
                pass
            self._process.stdout.close()
        self._process = None


def authority_in(folder: Path) -> Authority:
    """An authority of its own."""
    from tests.support.certificates import Authority  # only tests with TLS need the cryptography package

    return Authority(folder)

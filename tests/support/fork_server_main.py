"""Main of a fork server: a process that has loaded what `meshd serve` loads, and forks test nodes from it.

Law: one thread, no event loop, no store. A forked node behaves like an executed one: it has its own
environment, output and folder, shares memory only with its own processes, and modules that read the
environment at import time read it again.

A node that is asked for with the one argument `FORK_SERVER` is another fork server, with the socket of its
requests, and one that closes when it is to end.

    python -m tests.support.fork_server_main REQUESTS LIFE DIR   # numbers of two sockets; a scratch folder
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import mmap
import os
import re
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_REQUEST: Final = 128 << 10
"""Bytes of a request, at most."""
FORK_SERVER: Final = "fork-server"
REQUESTS: Final = "requests"
"""The name of the socket that a fork server is asked by, in its folder."""
_MAP_FIXED: Final = 0x10
_CLONE_NEWNET: Final = 0x40000000
_SHARED: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-s .* /dev/zero \(deleted\)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Request:
    """A node to be: its arguments, its whole environment, the folder it is started in, where it prints and
    reads (-1: nothing), the network namespace it runs in (its file; "" for this one). A fork server reads
    requests, until `life` has no other end."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    stdout: int
    stderr: int
    stdin: int = -1
    namespace: str = ""
    life: int = -1


@dataclass(slots=True)
class _Node:
    """`owner`: who is told how it ended, and says by closing that its process id may be another's; None when
    nobody asks any more."""

    pid: int
    ending: int
    owner: socket.socket | None


class NodeForker:
    """Forks a node for each request, tells its process id and later how it ended (as `Popen.returncode`),
    until nobody can ask: until `requests`, or `life`, has no other end. `kept`: a node lives on when whoever
    asked for it has gone; otherwise it leads a session, which is ended."""

    def __init__(
        self, requests: socket.socket, life: socket.socket | None = None, *, kept: bool = True
    ) -> None:
        self._requests, self._life, self._kept = requests, life, kept
        self._selector = selectors.DefaultSelector()
        self._nodes = list[_Node]()
        self._selector.register(requests, selectors.EVENT_READ)
        if life is not None:
            self._selector.register(life, selectors.EVENT_READ)

    def __repr__(self) -> str:
        return f"<Nursery of {[node.pid for node in self._nodes]}>"

    def run(self) -> Request | None:
        """Returns in each node that is forked, with what it is to be; here with None, when nobody can ask."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    key.data()
                    continue
                if key.fileobj is self._life:
                    return None
                text, files, _, _ = socket.recv_fds(self._requests, MAX_REQUEST, 5)
                if not text:
                    return None
                request = self._fork(json.loads(text), *files)
                if request is not None:
                    return request

    def _fork(
        self, asked: dict[str, Any], stdout: int, stderr: int, owner: int, stdin: int = -1, life: int = -1
    ) -> Request | None:
        pid = os.fork()
        if pid == 0:
            self._leave(owner)
            if not self._kept:
                os.setsid()
            return Request(**asked, stdout=stdout, stderr=stderr, stdin=stdin, life=life)
        for file in (stdout, stderr, stdin, life):
            if file >= 0:
                os.close(file)
        told = socket.socket(fileno=owner)
        node = _Node(pid, os.pidfd_open(pid), told)
        self._nodes.append(node)
        self._watch(node.ending, lambda: self._tell(node))
        self._watch(told, lambda: self._let_go(node))
        told.send(b"%d\n" % pid)
        return None

    def _watch(self, what: int | socket.socket, seen: Callable[[], None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, seen)

    def _leave(self, owner: int) -> None:
        """In a node: close what is the nursery's."""
        self._selector.close()
        self._requests.close()
        if self._life is not None:
            self._life.close()
        os.close(owner)
        for node in self._nodes:
            if node.ending >= 0:
                os.close(node.ending)
            if node.owner is not None:
                node.owner.close()

    def _tell(self, node: _Node) -> None:
        """It has ended, and stays a zombie for as long as somebody may send it a signal."""
        self._selector.unregister(node.ending)
        os.close(node.ending)
        node.ending = -1
        found = os.waitid(os.P_PID, node.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        if node.owner is not None:
            with suppress(OSError):  # it is about to let go
                node.owner.send(b"%d\n" % code)
        self._bury(node)

    def _let_go(self, node: _Node) -> None:
        owner, node.owner = node.owner, None
        assert owner is not None
        self._selector.unregister(owner)
        if not self._kept:
            with suppress(ProcessLookupError):  # it has ended, and has left nothing
                os.killpg(node.pid, signal.SIGKILL)
        self._bury(node)
        owner.close()  # tells that it is buried

    def _bury(self, node: _Node) -> None:
        if node.owner is None and node.ending < 0:
            os.waitpid(node.pid, 0)
            self._nodes.remove(node)


def load_modules(place: Path) -> dict[str, str]:
    """Load what a node loads, as it does. Returns what that leaves in the environment."""
    from meshd.cli.serve import set_environment
    from meshd.config import load_settings

    before = dict(os.environ)
    settings = load_settings({"data_dir": str(place)})
    settings.metrics_dir.mkdir(parents=True)
    set_environment(settings, os.environ)
    import meshd.cli.fsck
    import meshd.cli.serve
    import meshd.process.serve  # noqa: F401

    "localhost".encode("idna")  # as each process does that connects somewhere; it loads tables
    gc.collect()
    gc.freeze()  # the collector of a node that looked through it would copy it
    return {name: value for name, value in os.environ.items() if name not in before}


def apply_request(request: Request, loaded: Mapping[str, str]) -> None:
    """Have this process be as one that was executed for the request."""
    from meshd.util import failpoints

    for number, file in ((1, request.stdout), (2, request.stderr)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.folder)
    if request.namespace:
        enter_network(request.namespace)
    os.environ.clear()
    os.environ.update({**loaded, **request.environment})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    renew_shared_memory()
    failpoints.configure(os.environ.get("MESHD_FAILPOINTS", ""))


def enter_network(namespace: str) -> None:
    """Have this process, and those that it starts, use the network namespace of a file."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(namespace).open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", namespace)


def renew_shared_memory() -> None:
    """Put empty memory at the place of all that modules have made for the processes of a node to share: it
    would be shared by all nodes."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_FIXED
    for first, last in _SHARED.findall(Path("/proc/self/maps").read_text()):
        start, end = int(first, 16), int(last, 16)
        if libc.mmap(start, end - start, protection, flags, -1, 0) != start:
            raise OSError(ctypes.get_errno(), "mmap")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: who asks decides
    requests, life = int(sys.argv[1]), int(sys.argv[2])
    loaded = load_modules(Path(sys.argv[3]))
    while (request := _next_node(requests, life)) is not None:
        apply_request(request, loaded)
        if list(request.arguments) != [FORK_SERVER]:
            run_node(request.arguments)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        requests, life = request.stdin, request.life
    os._exit(0)  # modules that are taken apart are first copied


def _next_node(requests: int, life: int) -> Request | None:
    return NodeForker(socket.socket(fileno=requests), socket.socket(fileno=life)).run()


def run_node(arguments: Sequence[str]) -> NoReturn:
    """Be a node, from start to end. Its modules are not taken apart at the end: that would first copy all
    their memory."""
    from meshd.cli import main as meshd

    code = 1
    try:
        meshd(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

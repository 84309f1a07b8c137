"""Interpreters that have loaded what tests load: forked from one process that has collected the tests, which
saves each of them a second, and those that run tests eight.

Law: a program run so is the one that was asked for: its own arguments, environment, folder and files; signals
reach it, and it ends when whoever started it has ended. Where there is no such process, it is executed.

There is one where several processes run tests (`-n`): these are forked from it. Tests run programs with
`python()`, `program()` and `launch_python`, where how an interpreter starts is not what they are about.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from tests.support.fork_server import ForkedProcess

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.support.fork_server import Process

PLACE: Final = "MESH_TEST_INTERPRETERS"
"""Names the folder of the programs that are forked; without it all are executed."""
SOCKET: Final = "requests"
PROGRAMS: Final = ("python", "mesh", "meshd", "aws", "torchrun")
"""Of `meshd` only `admin`: nodes are families of processes with signals and metric files of their own."""
_PATIENCE: Final = 60.0


def python() -> str:
    """What `sys.executable` is for, with everything loaded."""
    return program("python")


def program(name: str) -> str:
    """A program as it lies beside the interpreter, forked if it is one of `PROGRAMS`."""
    place = os.environ.get(PLACE)
    if place and name in PROGRAMS:
        return str(Path(place) / name)
    return sys.executable if name == "python" else str(Path(sys.executable).with_name(name))


def path() -> str:
    """`PATH` for a shell whose programs these are, and all others of this environment."""
    folders = [os.environ.get(PLACE), str(Path(sys.executable).parent), os.environ["PATH"]]
    return os.pathsep.join(filter(None, folders))


def launch_python(words: Sequence[str], env: Mapping[str, str], output: IO[bytes], folder: Path) -> Process:
    """`python` with these words in this environment and folder, its output one file, without input. What is
    forked has the process id that is told: every signal reaches it."""
    asked = {"arguments": ["python", *words], "environment": dict(env), "folder": str(folder)}
    with open(os.devnull, "rb") as nothing:
        if place := os.environ.get(PLACE):
            mine, theirs = socket.socketpair()
            files = [output.fileno(), output.fileno(), theirs.fileno(), nothing.fileno()]
            with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
                try:
                    requests.connect(str(Path(place) / SOCKET))
                    socket.send_fds(requests, [json.dumps(asked).encode()], files)
                except OSError:  # it has died
                    mine.close()
                else:
                    return ForkedProcess(words, None, mine)
        return subprocess.Popen(
            [sys.executable, *words], env=env, stdin=nothing, stdout=output, stderr=output, cwd=folder
        )


class InterpreterServer:
    """Collects tests, named as for pytest, in a process of its own, and forks interpreters from it until it
    is closed. Can be asked at once: it answers when it has collected."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mesh-interpreters-")
        place = Path(self._folder.name)
        text = Path(__file__).with_name("forked_program.py").read_text()
        for name in PROGRAMS:
            (place / name).write_text(f"#!{sys.executable} -IS\n{text}")
            (place / name).chmod(0o700)
        self._life, theirs = socket.socketpair()
        requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        requests.bind(str(place / SOCKET))
        numbers = (requests.fileno(), theirs.fileno())
        words = ("-m", "tests.support.interpreter_server", *map(str, numbers), *tests)
        self.process = subprocess.Popen(
            [sys.executable, *words], pass_fds=numbers, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        requests.close()
        theirs.close()
        os.environ[PLACE] = str(place)

    def __repr__(self) -> str:
        return f"<InterpreterServer {self.process.pid}>"

    def close(self) -> None:
        """End it, and whatever was forked from it."""
        os.environ.pop(PLACE, None)
        self._life.close()
        self.process.wait(_PATIENCE)
        self._folder.cleanup()

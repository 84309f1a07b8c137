"""A sandbox process: runs one module of user ops, takes values and returns the results of its ops.

Law: calls block and end within their time limit. Replies are untrusted: a malformed one counts as a crash
and ends the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

import meshd
import meshwire
from meshd.telemetry import metrics
from meshd.transform.assets import Asset
from meshd.transform.errors import BadSampleError, WrongOutputError
from meshd.transform.messages import value_bytes
from meshd.transform.sandbox.messages import (
    ARENA_BYTES,
    ASSET_ROOM,
    IN,
    MAX_MESSAGE,
    MAX_TEXT,
    MAX_VALUE,
    OUT,
    aligned,
)
from meshd.transform.sandbox.wheel_tags import WrongWheelError, choose_wheels
from meshwire.plan.op_declarations import MAX_VALUES, parse_declarations
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwire.plan.module_bundle import SharedObject
    from meshwire.plan.op_declarations import OpDeclaration


START_SECONDS: Final = 60.0
_KEEP_PAGES = 16 << 20  # bytes of the arena that stay allocated between values
_NUMBERS = ["bool", "float16", "float32", "float64"]
_NUMBERS += [f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)]
_CODE = "from meshd.transform.sandbox.child_main import main; main()"
ENVIRONMENT: Final = {
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"), "1"
    ),
}


class SandboxPolicy(msgspec.Struct, frozen=True):
    """The limits that a node sets for user ops.

    `hidden`: folders that no op may ever read. `seconds` per sample and `memory` in bytes: maximum, whatever
    a module declares. `sealed`: open no files, even if Landlock could restrict them.
    """

    hidden: tuple[str, ...] = ()
    seconds: float = 30.0
    memory: int = 4 << 30
    sealed: bool = False


class SandboxDiedError(Exception):
    """A sandbox process is dead. `kind`: crash, time, memory or nonsense."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class UnusableModuleError(Exception):
    """The module cannot be run; the message has the reason, in Python's format."""


class SandboxProcess:
    """One process for one module; `close` it. Not thread-safe."""

    def __init__(
        self,
        name: str,
        source: bytes,
        memory: int,
        confinement: SandboxPolicy,
        wheels: Mapping[str, bytes] | None = None,
        objects: Sequence[SharedObject] = (),
    ) -> None:
        """Start the process. `wheels`: what the module imports from memory, of which those for this node are
        used; `objects`: the shared objects in them.

        Raises UnusableModuleError, SandboxDiedError.
        """
        try:
            used = {wheel: (wheels or {})[wheel] for wheel in choose_wheels(wheels or {})}
        except WrongWheelError as error:
            raise UnusableModuleError(str(error)) from error
        self._memory = memory
        self._asked = 0
        self._given: OrderedDict[str, int] = OrderedDict()
        self._arena_fd = os.memfd_create("mesh-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._log = os.memfd_create("mesh-log", os.MFD_CLOEXEC)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.ftruncate(self._arena_fd, ARENA_BYTES)
        fcntl.fcntl(
            self._arena_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)
        self._arena = mmap.mmap(self._arena_fd, ARENA_BYTES)
        self._waiting = select.poll()
        self._waiting.register(self._socket, select.POLLIN)
        content = b"".join([source, *used.values()])
        self._arena[IN : IN + len(content)] = content
        settings = {
            "parent": os.getpid(),
            "hidden": confinement.hidden,
            "sealed": confinement.sealed,
            "name": name,
            "source": len(source),
            "wheels": [[wheel, len(data)] for wheel, data in used.items()],
            "objects": [each for each in objects if each.wheel in used],
            "memory": memory,
            "socket": theirs.fileno(),
            "arena": self._arena_fd,
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", _CODE, json.dumps(settings)],
                env=ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(package_paths())},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(), self._arena_fd),
            )
        metrics.user_op_processes.labels("started").inc()
        try:
            self.declared, self.held = self._welcome(self._receive(START_SECONDS, "import"))
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<SandboxProcess {self._process.pid}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    def _welcome(self, said: dict[str, Any]) -> tuple[dict[str, OpDeclaration], tuple[str, ...]]:
        for why in ("error", "refused"):
            if why in said:
                raise UnusableModuleError(str(said[why])[:MAX_TEXT])
        try:
            held = said.get("held")
            return parse_declarations(said.get("ops")), tuple(
                map(str, held if isinstance(held, list) else ())
            )
        except PlanError as error:
            raise UnusableModuleError(str(error)) from error

    def run_op(
        self, op: str, args: Mapping[str, Any], value: Any, *, key: int, random: bool, seconds: float
    ) -> Any:
        """Return the op's result for `value`: bytes, or an array with memory of its own; a tuple for a tuple.

        `key` seeds its draws. Raises SandboxDiedError, BadSampleError, WrongOutputError.
        """
        contents = {name: item for name, item in args.items() if isinstance(item, Asset)}
        for content in contents.values():
            self._give(content)
        plain = {name: item for name, item in args.items() if name not in contents}
        assets = {name: content.digest for name, content in contents.items()}
        several = isinstance(value, tuple)
        asked = self._place_values(value if several else (value,))
        question = {"op": op, "args": plain, "assets": assets, "key": key, "random": random}
        self._send({**question, "values": asked, "several": several})
        said = self._receive(seconds, "sample")
        if "bad" in said or "error" in said:
            raise BadSampleError(str(said.get("bad", said.get("error"))))
        if "wrong" in said:
            raise WrongOutputError(str(said["wrong"])[:300])
        made = self._take_values(said.get("made"))
        last = asked[-1]
        self._trim(max(last["at"] + last["bytes"] - IN, sum(map(value_bytes, made))))
        if several:
            return made
        if len(made) != 1:
            raise self._nonsense()
        return made[0]

    def _give(self, content: Asset) -> None:
        """Send the content of an asset argument, unless the process has it."""
        if content.digest in self._given:
            self._given.move_to_end(content.digest)
            return
        forget: list[str] = []
        while self._given and sum(self._given.values()) + len(content.data) > ASSET_ROOM:
            forget.append(self._given.popitem(last=False)[0])
        self._arena[IN : IN + len(content.data)] = content.data
        self._send({"asset": content.digest, "bytes": len(content.data), "forget": forget})
        if "kept" not in self._receive(START_SECONDS, "asset"):
            raise self._nonsense()
        self._given[content.digest] = len(content.data)

    def _place_values(self, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Copy values into the arena and return their places."""
        at, places = IN, []
        for value in values:
            data = value if isinstance(value, bytes) else np.asarray(value)
            size = value_bytes(data)
            if at + size > IN + MAX_VALUE:
                raise BadSampleError(f"{size} bytes; a user op takes at most {MAX_VALUE}")
            if isinstance(data, bytes):
                self._arena[at : at + size] = data
                places.append({"kind": "bytes", "bytes": size, "at": at})
            else:
                target = np.frombuffer(self._arena, data.dtype, data.size, at).reshape(data.shape)
                np.copyto(target, data)
                shape = {"dtype": data.dtype.name, "shape": data.shape}
                places.append({"kind": "array", "bytes": size, "at": at, **shape})
            at = aligned(at + size)
        return places

    def _take_values(self, said: Any) -> tuple[Any, ...]:
        if not isinstance(said, list) or not 1 <= len(said) <= MAX_VALUES:
            raise self._nonsense()
        return tuple(map(self._taken_one, said))

    def _taken_one(self, said: Any) -> Any:
        if not isinstance(said, dict):
            raise self._nonsense()
        at, size = said.get("at"), said.get("bytes")
        if type(at) is not int or not OUT <= at <= OUT + MAX_VALUE:
            raise self._nonsense()
        room = OUT + MAX_VALUE - at
        if said.get("kind") == "bytes" and type(size) is int and 0 <= size <= room:
            return self._arena[at : at + size]
        dtype, shape = said.get("dtype"), said.get("shape")
        if said.get("kind") != "array" or dtype not in _NUMBERS or not _is_shape(shape):
            raise self._nonsense()
        assert isinstance(shape, list)
        count = math.prod(shape)
        if count * np.dtype(dtype).itemsize > room:
            raise self._nonsense()
        return np.frombuffer(self._arena, dtype, count, at).reshape(shape).copy()

    def _trim(self, size: int) -> None:
        """Free the pages of large values, because the arena uses memory."""
        if size > _KEEP_PAGES:
            self._arena.madvise(mmap.MADV_REMOVE)

    # --- messages ---------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        self._asked += 1
        data = json.dumps({"number": self._asked, **message}).encode()
        if len(data) > MAX_MESSAGE:
            raise BadSampleError(
                f"the op's arguments have {len(data)} bytes; at most {MAX_MESSAGE} are allowed"
            )
        if self._waiting.poll(0):  # the process is dead, or it sent a message without a request
            raise self._died_error()
        try:
            self._socket.send(data)
        except OSError:
            raise self._died_error() from None

    def _receive(self, seconds: float, what: str) -> dict[str, Any]:
        if not self._waiting.poll(seconds * 1000):
            self.kill()
            raise SandboxDiedError("time", f"took longer than {seconds:g} s for one {what}")
        try:
            data = self._socket.recv(MAX_MESSAGE + 1)
        except OSError:
            data = b""
        if not data:
            raise self._died_error()
        try:
            said = json.loads(data)
        except (ValueError, RecursionError):
            raise self._nonsense() from None
        if not isinstance(said, dict):
            raise self._nonsense()
        if "memory" in said:
            self.kill()
            limit = f"{self._memory / (1 << 20):.0f} MiB"
            raise SandboxDiedError(
                "memory", f"needed more than the {limit} of memory it has beyond its imports"
            )
        if said.get("number", 0) != self._asked:  # a reply to another request
            raise self._nonsense()
        return said

    def _nonsense(self) -> SandboxDiedError:
        self.kill()
        return SandboxDiedError("nonsense", "its process sent an invalid reply")

    def _died_error(self) -> SandboxDiedError:
        """Return the error that says why the process is dead."""
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:  # it closed the socket but is still running
            self.kill()
            return self._nonsense()
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        where = self._where()
        return SandboxDiedError("crash", f"its process ended ({name}){where}")

    def _where(self) -> str:
        """Return the line of the module that ran when the process crashed, from Python's fault handler."""
        lines = os.pread(self._log, 16 << 10, 0).decode(errors="replace").splitlines()
        found = [line.split('"') for line in lines if line.startswith("  File ") and line.count('"') == 2]
        mine = [parts for parts in found if os.sep not in parts[1]]
        return f" at {mine[0][1]}{mine[0][2]}"[:200] if mine else ""

    def kill(self) -> None:
        """Kill the process. Idempotent."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process and release all shared resources. Idempotent."""
        self.kill()
        self._socket.close()
        with contextlib.suppress(BufferError):  # a view of the arena still exists and closes it later
            self._arena.close()
        while self._log >= 0:
            os.close(self._log)
            os.close(self._arena_fd)
            self._log = -1


def read_declarations(
    name: str,
    source: bytes,
    confinement: SandboxPolicy,
    wheels: Mapping[str, bytes] | None = None,
    objects: Sequence[SharedObject] = (),
) -> tuple[dict[str, OpDeclaration], tuple[str, ...]]:
    """Return (the ops that a module declares, the restrictions it runs under on this node).

    Raises UnusableModuleError, SandboxDiedError.
    """
    process = SandboxProcess(name, source, confinement.memory, confinement, wheels, objects)
    try:
        return process.declared, process.held
    finally:
        process.close()


def _is_shape(shape: Any) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) <= 16
        and all(type(extent) is int and 0 <= extent <= MAX_VALUE for extent in shape)
    )


def package_paths() -> list[str]:
    """Return the folders of the packages that a sandbox process starts with."""
    return sorted(
        {
            os.path.dirname(os.path.realpath(path))
            for package in (meshd, meshwire)
            for path in package.__path__
        }
    )

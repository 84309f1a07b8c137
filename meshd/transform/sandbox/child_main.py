"""Main of a sandbox process: restricts itself, runs a module, then applies its ops until it is killed.

Law: the process is executed, never forked from the daemon, and inherits only the descriptors named in
`messages`. It imports little. Before the restrictions it loads the installed libraries that the module
names, without running any of the module. Invariant: the first line of the module runs after the last
right is dropped.
"""

from __future__ import annotations

import ast
import builtins
import ctypes.util
import faulthandler
import functools
import importlib
import io
import json
import linecache
import mmap
import os
import sys
import sysconfig
import tempfile
import traceback
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NoReturn

from meshd.transform.sandbox import restrictions, seccomp
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
from meshd.transform.sandbox.native_wheels import create_memory_files
from meshd.transform.sandbox.wheel_imports import WARMED, WheelFinder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType


_ALWAYS = (
    *("meshsdk.userops", "meshwire.plan.keyed_random", "random"),
    *("numpy", "numpy.fft", "numpy.linalg", "numpy.ma", "numpy.polynomial", "numpy.random"),
    *(f"encodings.{name}" for name in ("ascii", "cp1252", "cp437", "idna", "latin_1", "punycode", "utf_7")),
    *(f"encodings.{name}" for name in ("utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_8_sig")),
)
"""Modules that are available in any case; numpy and the codecs load many of them only on first use."""
_NOT_IMPORTED = ("meshd", "antigravity")
_CAUSES = 4


def preload(source: str, finder: WheelFinder | None = None) -> dict[str, str]:
    """Load what the module and its wheels import by name, anywhere in them, from installed libraries only.

    Their memory does not count as the op's, and once files are sealed they cannot be loaded any more.
    Returns the reasons for modules that failed to load.
    """
    failures: dict[str, str] = {}
    sys.meta_path.insert(0, _NotOurs())
    theirs = () if finder is None else (*WARMED, *chain.from_iterable(map(_imported_names, finder.sources())))
    provided = set() if finder is None else finder.packages()
    for name in dict.fromkeys(
        (*_ALWAYS, *_imported_names(source), *islice(dict.fromkeys(theirs), _FROM_WHEELS))
    ):
        if name.partition(".")[0] in provided:
            continue
        try:
            _warm(importlib.import_module(name))
        except BaseException as error:
            failures[name] = f"{type(error).__name__}: {error}"
    return failures


class _NotOurs:
    """Refuses imports of the daemon's own code, which ops must not use."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in _NOT_IMPORTED:
            raise ImportError(f"user ops cannot import {name!r}", name=name)


def _warm(module: ModuleType) -> None:
    """Initialize libraries that load parts of themselves on first use."""
    if module.__name__ in ("PIL", "PIL.Image"):
        importlib.import_module("PIL.Image").init()


def _imported_names(source: str) -> list[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # running the module reports the error
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name: None for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found[node.module] = None
            found |= {f"{node.module}.{alias.name}": None for alias in node.names if alias.name != "*"}
    return list(found)[:200]


_SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
)
_DEVICES = (
    "/dev/null",
    "/dev/zero",
    "/dev/urandom",
    "/dev/random",
    "/proc/cpuinfo",
    "/proc/meminfo",
)
_FROM_WHEELS = 1000  # modules that wheels import
_PACKAGES = ("meshwire", "meshsdk")  # the packages of this project that an op may use
_LIBRARIES = 8 << 30  # address space for the modules that a module imports


def main() -> None:
    """Entry point of the process, run by `python -c` with the settings as the first argument."""
    settings = json.loads(sys.argv[1])
    restrictions.set_parent_death_signal(settings["parent"])
    stream = _Stream(settings["socket"])
    faulthandler.enable(2, all_threads=False)
    try:
        held = _SandboxedModule(settings, stream)
    except OSError as error:
        stream.send({"refused": f"this node cannot restrict a process: {error}"})
        os._exit(1)
    held.serve()


class _Stream:
    """The connection to the parent; plain reads and writes, because nothing else is allowed later."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def receive(self) -> Any:
        data = os.read(self._fd, MAX_MESSAGE)
        if not data:
            os._exit(0)
        return json.loads(data)

    def send(self, message: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps(message).encode())


class _SandboxedModule:
    """A module in a process that restricts itself.

    `settings`: "parent", "hidden" (folders that must never be read), "sealed" (open no files, even if the
    kernel has Landlock), "name", "source" (its length in the arena), "memory", "socket" and "arena"
    (descriptors), "wheels" ([name, bytes] each, in the arena behind the source), "objects" ([wheel, file,
    bytes] of each shared object in them).
    """

    def __init__(self, settings: dict[str, Any], stream: _Stream) -> None:
        self._stream = stream
        self._arena = mmap.mmap(settings["arena"], ARENA_BYTES)
        self._name = f"{settings['name']}.py"
        self._source = self._arena[IN : IN + settings["source"]].decode(errors="replace")
        at, wheels = IN + settings["source"], list[tuple[str, bytes]]()
        for name, size in settings["wheels"]:
            wheels.append((name, self._arena[at : at + size]))
            at += size
        self._functions: dict[str, Callable[..., Any]] = {}
        self._outputs: dict[str, tuple[str, ...]] = {}
        self._assets: dict[str, bytes] = {}
        self._memory = settings["memory"]
        statm = os.open("/proc/self/statm", os.O_RDONLY)
        objects = create_memory_files(settings["objects"])
        readable = _readable()
        self._sealed = settings["sealed"] or not _are_disjoint(readable, settings["hidden"])
        self._sealed = self._sealed or not restrictions.landlock_version()
        _accommodate_imports()
        restrictions.set_resource_limits(files=len(objects))
        restrictions.drop_capabilities()
        version = 0 if self._sealed else restrictions.restrict_files(readable)
        seccomp.install_filter(files=True, last=not self._sealed)
        restrictions.set_memory_limit(statm, self._memory + _LIBRARIES)
        self._broken, finder = "", None
        try:
            finder = WheelFinder(wheels, objects) if wheels else None
        except ImportError as error:
            self._broken = str(error)
        if objects and self._sealed:
            self._broken = (
                "its wheels have compiled code, which a node runs only if its kernel has Landlock and no "
                "data is stored below the interpreter's libraries: install these libraries beside meshd "
                "on each node"
            )
        self._failures = preload(self._source, finder)
        restrictions.set_memory_limit(statm, self._memory + ASSET_ROOM)
        os.close(statm)
        if self._sealed:
            seccomp.install_filter(files=False, last=True)
        if finder is not None:
            sys.meta_path.insert(1, finder)  # behind what refuses the daemon's code
        self._held = ["seccomp", f"landlock {version}" if version else "no files"]

    def serve(self) -> None:
        """Send the module's declarations, then apply its ops. Printed output is discarded."""
        sys.stdout = sys.stderr = _Nowhere()
        self._stream.send(self._load())
        while True:
            asked = self._stream.receive()
            self._stream.send({"number": asked["number"], **self._answer(asked)})

    def _load(self) -> dict[str, Any]:
        if self._broken:
            return {"error": self._broken}
        try:
            module = self._run()
            declared = self._declarations(module)
        except MemoryError:
            self._out_of_memory()
        except BaseException as error:
            return {"error": self._error_report(error, whole=True)}
        return {"ready": True, "ops": declared, "held": self._held}

    def _run(self) -> dict[str, Any]:
        lines = self._source.splitlines(keepends=True)
        linecache.cache[self._name] = (len(self._source), None, lines, self._name)
        names: dict[str, Any] = {"__name__": self._name.removesuffix(".py"), "__file__": self._name}
        try:
            exec(compile(self._source, self._name, "exec"), names)
        except ImportError as error:
            raise ImportError(self._why(error)) from error
        return names

    def _why(self, error: ImportError) -> str:
        name = error.name or ""
        why = self._failures.get(name, str(error))
        return str(error) if str(error) in why else f"{error} ({why})"

    def _declarations(self, names: dict[str, Any]) -> list[dict[str, Any]]:
        from meshwire.plan.op_decorator import MARK

        found = {id(item): item for item in names.values() if hasattr(item, MARK)}
        self._functions = {getattr(item, MARK).name: item for item in found.values()}
        self._outputs = {
            getattr(item, MARK).name: tuple(dict(getattr(item, MARK).outputs)) for item in found.values()
        }
        return [getattr(item, MARK).document() for item in found.values()]

    def _out_of_memory(self) -> NoReturn:
        """Report that memory ran out and exit; the next process starts with all of it."""
        self._stream.send({"memory": True})
        os._exit(1)

    # --- one sample --------------------------------------------------------------------------------------

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        from meshwire.plan.op_decorator import BadSample

        try:
            return self._store_assets(asked) if "asset" in asked else self._apply(asked)
        except BadSample as error:
            return {"bad": str(error)[:MAX_TEXT]}
        except MemoryError:
            self._out_of_memory()
        except BaseException as error:
            return {"error": self._error_report(error)}

    def _store_assets(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Store the content of an argument, and drop contents that are no longer needed."""
        for digest in asked["forget"]:
            self._assets.pop(digest, None)
        self._assets[asked["asset"]] = self._arena[IN : IN + asked["bytes"]]
        return {"kept": True}

    def _apply(self, asked: dict[str, Any]) -> dict[str, Any]:
        from meshwire.plan.keyed_random import KeyedRandom

        _seed(asked["key"])
        draws = {"random": KeyedRandom(asked["key"], 0, 0)} if asked["random"] else {}
        values = [self._value(place) for place in asked["values"]]
        contents = {name: self._assets[digest] for name, digest in asked["assets"].items()}
        made = self._functions[asked["op"]](*values, **asked["args"], **contents, **draws)
        outputs = self._outputs[asked["op"]]
        if not outputs:
            return self._place_results((made,))
        if not isinstance(made, dict) or set(made) != set(outputs):
            return {"wrong": f"returned {_keys(made)}, declared a dict of {', '.join(outputs)}"}
        return self._place_results([made[name] for name in outputs])

    def _value(self, place: dict[str, Any]) -> Any:
        if place["kind"] == "bytes":
            return self._arena[place["at"] : place["at"] + place["bytes"]]
        import numpy as np

        count = place["bytes"] // np.dtype(place["dtype"]).itemsize
        return np.frombuffer(self._arena, place["dtype"], count, place["at"]).reshape(place["shape"])

    def _place_results(self, made: Sequence[Any]) -> dict[str, Any]:
        """Write the results into the arena."""
        at, places = OUT, list[dict[str, Any]]()
        for value in made:
            place = self._put(value, at)
            if "wrong" in place:
                return place
            places.append(place)
            at = aligned(at + place["bytes"])
        return {"made": places}

    def _put(self, made: Any, at: int) -> dict[str, Any]:
        room = OUT + MAX_VALUE - at
        if isinstance(made, bytes | bytearray | memoryview):
            data = bytes(made)
            if len(data) > room:
                return {"wrong": f"returned {len(data)} bytes; at most {MAX_VALUE} are allowed"}
            self._arena[at : at + len(data)] = data
            return {"kind": "bytes", "bytes": len(data), "at": at}
        import numpy as np

        array = np.asarray(made)
        if array.dtype.kind not in "buif" or array.nbytes > room:
            return {
                "wrong": f"returned {_type_name(made, array)}, which is not an array of numbers of at most "
                f"{MAX_VALUE} bytes"
            }
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        target = np.frombuffer(self._arena, array.dtype, array.size, at).reshape(array.shape)
        np.copyto(target, array)
        shape = {"dtype": array.dtype.name, "shape": array.shape}
        return {"kind": "array", "bytes": array.nbytes, "at": at, **shape}

    def _error_report(self, error: BaseException, *, whole: bool = False) -> str:
        """Describe an error with its line in the module; `whole`: as Python would print it."""
        frames = traceback.extract_tb(error.__traceback__)
        mine = [frame for frame in frames if frame.filename == self._name]
        if whole and mine:
            text = "".join(traceback.format_list(mine) + traceback.format_exception_only(error))
            return text.strip()[-MAX_TEXT:]
        where = f" ({self._name}:{mine[-1].lineno})" if mine else ""
        return f"{type(error).__name__}: {str(error)[: MAX_TEXT // 2]}{self._advice(error)}{where}"

    def _advice(self, error: BaseException) -> str:
        """Return what to do about an error that the confinement causes; "" for any other."""
        if self._sealed and isinstance(error, ImportError | PermissionError):
            return " (no files can be opened here: import it by its full name)"
        if isinstance(error, ModuleNotFoundError):
            return " (the node lacks it: push it along with --wheel, or install it beside meshd)"
        return " (an op has no files, network, threads or programs)" if _is_confined(error) else ""


def _is_confined(error: BaseException) -> bool:
    """Return whether an error comes of a refused system call, perhaps of a library that translates it."""
    found: BaseException | None = error
    for _ in range(_CAUSES):
        if isinstance(found, PermissionError) or str(found) == "can't start new thread":
            return True
        found = found and (found.__cause__ or found.__context__)
    return False


def _keys(made: Any) -> str:
    return f"a dict of {', '.join(map(str, made))}"[:200] if isinstance(made, dict) else type(made).__name__


def _type_name(made: Any, array: Any) -> str:
    return type(made).__name__ if array.dtype.kind == "O" else f"{array.dtype.name}{list(array.shape)}"


def _seed(key: int) -> None:
    """Seed the global generators, too, so that they start the same for the same sample."""
    random, arrays = sys.modules.get("random"), sys.modules.get("numpy.random")
    torch = sys.modules.get("torch")
    if random is not None:
        random.seed(key)
    if arrays is not None:
        arrays.seed(key & 0xFFFFFFFF)
    if torch is not None:
        torch.manual_seed(key & 0xFFFFFFFF)


class _Nowhere(io.TextIOBase):
    def write(self, text: str, /) -> int:
        return len(text)


def _accommodate_imports() -> None:
    """Let `os.devnull` be opened in every mode, and name a temporary folder: libraries ask for both while
    they are imported (dill, which torch imports), and the system call filter refuses all opens for writing.
    `ctypes.util.find_library` runs no programs, which would raise: torch with CUDA looks for libraries by it.
    Grants no right: the folder cannot be written."""
    null = 0  # subprocess.DEVNULL is open for both
    plain_open, plain_os_open = builtins.open, os.open

    @functools.wraps(plain_open)
    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        return plain_open(os.dup(null) if file == os.devnull else file, *args, **kwargs)

    @functools.wraps(plain_os_open)
    def descriptor(path: Any, *args: Any, **kwargs: Any) -> int:
        return os.dup(null) if path == os.devnull else plain_os_open(path, *args, **kwargs)

    builtins.open = io.open = opened
    os.open = descriptor
    for search in ("_findSoname_ldconfig", "_findLib_gcc", "_findLib_ld"):
        setattr(ctypes.util, search, lambda name: None)
    tempfile.tempdir = "/tmp"  # libraries ask for its name, and would find no folder that can be written


# --- before the module ------------------------------------------------------------------------------------


def _readable() -> list[str]:
    """Return the folders of the interpreter, its libraries, and the two packages an op may use."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {os.path.join(sys.base_prefix, "lib"), os.path.join(sys.prefix, "lib")}
    paths |= {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    paths |= {folder for name in _PACKAGES for folder in importlib.import_module(name).__path__}
    return [*sorted(map(os.path.realpath, paths)), *_SYSTEM, *_DEVICES]


def _are_disjoint(readable: list[str], hidden: list[str]) -> bool:
    """Return whether no hidden folder is inside a readable one."""
    return not any(
        os.path.commonpath([path, secret]) == path
        for path in readable
        for secret in map(os.path.realpath, hidden)
    )

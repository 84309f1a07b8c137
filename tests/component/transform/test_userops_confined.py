"""Confined processes, for real: what they may not do, how they end, that nothing of the daemon's is there."""

from __future__ import annotations

import io
import json
import os
import zipfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshd.transform.errors import BadSampleError, WrongOutputError
from meshd.transform.sandbox import restrictions, seccomp
from meshd.transform.sandbox.messages import ARENA_BYTES, OUT
from meshd.transform.sandbox.process_pool import SandboxProcessPool
from meshd.transform.sandbox.sandbox_process import (
    SandboxDiedError,
    SandboxPolicy,
    SandboxProcess,
    UnusableModuleError,
)
from meshd.transform.sandbox.user_op_definitions import encode_module, parse_module
from meshwire.plan.op_declarations import OpDeclaration, parse_declarations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshd.transform.sandbox.user_op_definitions import UserModule

SOURCE = b"""
import ctypes, fcntl, json, os, random, resource, socket, subprocess, sys, threading, time
import numpy as np
from meshsdk.userops import BYTES, BadSample, array, image, op

@op(input=image("h", "w", 3), output=array("float32", (3, "h", "w")))
def planes(pixels, *, gain: float = 1.0):
    return np.moveaxis(pixels, 2, 0).astype(np.float32) * np.float32(gain)

@op(input=BYTES, output=BYTES)
def tell(data, *, what: str):
    try:
        return repr(eval(what)).encode()
    except Exception as error:
        return f"{type(error).__name__}: {error}".encode()

@op(input=BYTES, output=BYTES)
def do(data, *, what: str):
    exec(what, globals())
    return b"done"

@op(input=BYTES, output=array("int64", (3,)))
def drawn(data, *, random):
    import random as chance
    return np.array([random.integer(1000), chance.randrange(1000), np.random.randint(1000)])

@op(input=array("int16", (None,)), output=array("int16", (None,)))
def give(values, *, what: str):
    return eval(what)

def each(call, *more):
    for fd in range(3, 4096):
        try:
            call(fd, *more)
        except OSError:
            pass

kept = []
"""
MIB = 1 << 20
OPEN = SandboxPolicy()


@contextmanager
def confined(
    confinement: SandboxPolicy = OPEN, source: bytes = SOURCE, memory: int = 256 * MIB
) -> Iterator[SandboxProcess]:
    process = SandboxProcess("mine", source, memory, confinement)
    try:
        yield process
    finally:
        process.close()


def call(
    process: SandboxProcess, op: str, value: Any = b"", *, seconds: float = 20, key: int = 7, **args: Any
) -> Any:
    return process.run_op(op, args, value, key=key, random=op == "drawn", seconds=seconds)


SEALED = pytest.param(SandboxPolicy(sealed=True), id="sealed")
BOTH = pytest.mark.parametrize(
    "confinement",
    [
        pytest.param(
            SandboxPolicy(),
            id="landlock",
            marks=pytest.mark.skipif(
                not restrictions.landlock_version(), reason="this kernel has no Landlock"
            ),
        ),
        SEALED,
    ],
)
REFUSED = [
    "open('/etc/passwd').read()",
    "open('/proc/%d/environ' % os.getppid(), 'rb').read()",
    "open('/proc/%d/mem' % os.getppid(), 'rb').read(1)",
    "open('/proc/self/root/etc/passwd').read()",
    "open('/proc/self/environ', 'rb').read()",
    "os.listdir('/')",
    "os.listdir('/proc')",
    "open('/tmp/userops-was-here', 'w')",
    "open('/dev/shm/userops-was-here', 'w')",
    "os.mkdir('/tmp/userops-was-here')",
    "os.unlink('/etc/passwd')",
    "os.chmod('/etc/passwd', 0o777)",
    "socket.socket(socket.AF_INET)",
    "socket.socket(socket.AF_UNIX)",
    "socket.socketpair()",
    "subprocess.run(['/bin/true'])",
    "os.execv('/bin/true', ['true'])",
    "os.fork()",
    "threading.Thread(target=print).start()",
    "os.kill(os.getppid(), 0)",
    "os.killpg(0, 0)",
    "os.setuid(0)",
    "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "os.memfd_create('more')",
    "os.pipe()",
    "os.chroot('/')",
    "os.nice(-1)",
    "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)",
    "[os.ftruncate(fd, 0) for fd in range(3, 9)]",
    "__import__('meshd.config')",
]


@BOTH
def test_it_does_its_work_and_nothing_else(confinement: SandboxPolicy, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the daemon's")
    with confined(confinement) as process:
        pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
        made = call(process, "planes", pixels, gain=2.0)
        assert made.dtype == np.float32
        assert np.array_equal(made, np.moveaxis(pixels, 2, 0).astype(np.float32) * 2)
        said = {
            what: call(process, "tell", what=what).decode() for what in [*REFUSED, f"open({str(secret)!r})"]
        }
        for what, answer in said.items():
            assert answer.split(":")[0] in (
                "PermissionError",
                "RuntimeError",
                "ValueError",
                "OSError",
                "ImportError",
            ), (
                what,
                answer,
            )
        assert not os.path.exists("/tmp/userops-was-here")


@BOTH
def test_nothing_of_the_daemons_is_in_it(confinement: SandboxPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHD_ROOT_SECRET_KEY", "hush")
    read, write = os.pipe()
    os.set_inheritable(read, True)
    try:
        with confined(confinement) as process:
            names = eval(call(process, "tell", what="sorted(os.environ)"))
            assert not [name for name in names if name.startswith(("MESHD", "AWS", "PATH", "HOME"))]
            held = "[fd for fd in range(64) if not fstat_fails(fd)]"
            call(
                process,
                "do",
                what="def fstat_fails(fd):\n try: os.fstat(fd)\n except OSError: return True",
            )
            open_fds = eval(call(process, "tell", what=held))
            assert len(open_fds) <= 6  # null, log twice, socket, arena, and the arena's mapping
            assert call(process, "tell", what="os.getcwd()") == b"'/'"
            loaded = eval(call(process, "tell", what="[k for k in sys.modules if k.startswith('meshd.')]"))
            package = "meshd.transform.sandbox"
            assert [name for name in loaded if not name.startswith(package)] == ["meshd.transform"]
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize(
    ("what", "kind", "reason"),
    [
        ("ctypes.string_at(0)", "crash", r"SIGSEGV\) at "),
        ("os.abort()", "crash", "SIGABRT"),
        ("os._exit(3)", "crash", "exit code 3"),
        ("time.sleep(60)", "time", "took longer than 0.3 s for one sample"),
        ("while True: pass", "time", "took longer"),
        ("np.ones(1 << 40)", "memory", "more than the 256 MiB"),
        ("kept.append(b'x' * (1 << 30))", "memory", "more than the 256 MiB"),
        ("each(os.write, b'[]'); time.sleep(60)", "nonsense", "invalid reply"),
        ("each(os.write, b'{'); time.sleep(60)", "nonsense", "invalid reply"),
        ("each(os.close); time.sleep(60)", "nonsense", "invalid reply"),
    ],
)
def test_each_way_to_die_is_named(what: str, kind: str, reason: str) -> None:
    with confined() as process:
        with pytest.raises(SandboxDiedError, match=reason) as caught:
            call(process, "do", what=what, seconds=0.3 if kind == "time" else 20)
        assert caught.value.kind == kind


@pytest.mark.parametrize(
    "answer",
    [
        {"kind": "bytes", "bytes": -1},
        {"kind": "bytes", "bytes": 1 << 60},
        {"kind": "bytes", "bytes": True, "dtype": 7},
        {"kind": "bytes", "bytes": "9"},
        {"kind": "array", "dtype": "object", "shape": [1]},
        {"kind": "array", "dtype": "float32"},
        {"kind": "array", "dtype": "float32", "shape": [-1]},
        {"kind": "array", "dtype": "float32", "shape": [True]},
        {"kind": "array", "dtype": "float32", "shape": [1 << 20, 1 << 20]},
        {"kind": "array", "dtype": "float32", "shape": [0] * 17},
        {"kind": "array", "dtype": ["float32"], "shape": [1]},
        {"kind": "array", "dtype": {}, "shape": [1]},
        {"kind": "bytes", "bytes": 1, "at": 0},
        {"kind": "bytes", "bytes": 1, "at": -1},
        {"kind": "bytes", "bytes": 1, "at": True},
        {"kind": "bytes", "bytes": 1, "at": "0"},
        {"kind": "bytes", "bytes": 2, "at": ARENA_BYTES - 1},
        {"kind": "bytes", "bytes": 0, "at": 1 << 62},
        {"kind": "array", "dtype": "uint8", "shape": [2], "at": ARENA_BYTES - 1},
        {"ready": True},
        {"kept": True},
        {"made": []},
        {"made": {}},
        {"made": [1]},
        {"made": [{"kind": "bytes", "bytes": 0, "at": OUT}] * 17},
        {"made": [{"kind": "bytes", "bytes": 0, "at": OUT}] * 2},
        [1],
        None,
        "memory",
    ],
    ids=str,
)
def test_an_answer_that_is_none_is_nonsense(answer: Any) -> None:
    with confined() as process:
        said = answer
        if isinstance(answer, dict):
            made = {"made": [{"at": OUT, **answer}]} if "kind" in answer else answer
            said = {"number": 1, **made}
        what = f"each(os.write, {json.dumps(said).encode()!r}); time.sleep(60)"
        with pytest.raises(SandboxDiedError) as caught:
            call(process, "do", what=what)
        assert caught.value.kind == "nonsense"


def test_what_it_said_before_it_was_asked_is_nonsense() -> None:
    with confined() as process:
        call(process, "do", what="pass")
        empty = {"kind": "bytes", "bytes": 0, "at": OUT}
        more = json.dumps({"number": 2, "made": [empty]}).encode()
        assert call(process, "do", what=f"each(os.write, {more!r})") == b""  # a lie about itself
        with pytest.raises(SandboxDiedError, match="invalid reply"):
            call(process, "do", what="pass")


def test_what_a_function_raises_is_a_bad_sample_with_the_line() -> None:
    with confined() as process:
        for what, reason in (
            ("1 / 0", r"ZeroDivisionError: division by zero \(mine.py:"),
            ("raise BadSample('no face in it')", "^no face in it$"),
            ("sys.exit(1)", "SystemExit"),
            ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ):
            with pytest.raises(BadSampleError, match=reason):
                call(process, "do", what=what)
        assert call(process, "do", what="print('x' * 1000000)") == b"done"


def test_a_module_that_speaks_before_it_is_read_is_not_believed() -> None:
    answers: list[dict[str, Any]] = [
        {"ready": True, "ops": [], "held": 5},
        {"ready": True, "ops": 5},
        {"held": {}},
        {},
    ]
    for answer in answers:
        said = json.dumps(answer).encode()
        source = f"import os\nfor fd in range(3, 4096):\n try: os.write(fd, {said!r})\n"
        with pytest.raises(UnusableModuleError, match="must declare"):
            SandboxProcess("mine", f"{source} except OSError: pass".encode(), 256 * MIB, OPEN)


@pytest.mark.parametrize(
    "what", ["None", "object()", "'text'", "{}", "np.zeros(3, complex)", "[[1], [2, 3]]"]
)
def test_what_is_no_array_of_numbers_is_the_ops_defect(what: str) -> None:
    with confined() as process, pytest.raises((WrongOutputError, BadSampleError)):
        call(process, "give", np.zeros(3, np.int16), what=what)


def test_arrays_of_any_memory_order_and_size_come_back_as_they_were() -> None:
    values = np.arange(12, dtype=np.int16)
    with confined() as process:
        for what, expected in (
            ("values", values),
            ("values[::-2]", values[::-2]),
            ("values.reshape(3, 4).T", values.reshape(3, 4).T),
            ("values.astype('>i2')", values),
            ("values[:0]", values[:0]),
            ("np.int16(7)", np.int16(7)),
            ("np.zeros((20, 1 << 20), np.int16)", np.zeros((20, 1 << 20), np.int16)),
            ("values.__iadd__(1)", values + 1),
        ):
            made = call(process, "give", values, what=what)
            assert made.dtype == np.int16
            assert made.shape == np.shape(expected)
            assert np.array_equal(made, expected)
        with pytest.raises(WrongOutputError, match="not an array of numbers"):
            call(process, "give", values, what="np.broadcast_to(values, (1 << 26, 12))")


def test_the_same_sample_has_the_same_draws_in_any_process() -> None:
    draws = []
    for _ in range(2):
        with confined() as process:
            draws.append([call(process, "drawn", key=key).tolist() for key in (1, 2, 1)])
    assert draws[0] == draws[1]
    assert draws[0][0] == draws[0][2] != draws[0][1]


def test_torch_can_be_used_and_draws_the_same_for_the_same_sample() -> None:
    source = b"""
import os, subprocess, tempfile
import torch
from meshsdk.userops import BYTES, BadSample, array, op

@op(input=BYTES, output=array("float32", (4,)))
def noisy(data):
    layer = torch.nn.Conv1d(1, 1, 3, padding=1)
    with torch.inference_mode():
        return torch.fft.ifft(torch.fft.fft(layer(torch.randn(1, 1, 4))[0, 0])).real.numpy()

@op(input=BYTES, output=BYTES)
def write(data):
    with open(os.devnull, "w") as null, open(os.devnull, "r+b") as also:
        null.write("nothing")
    try:
        open(tempfile.gettempdir() + "/userops-was-here", "w")
    except PermissionError:
        return b"refused"
"""
    with confined(SandboxPolicy(sealed=True), source) as process:
        first, other, again = (call(process, "noisy", key=key).tolist() for key in (1, 2, 1))
        assert first == again != other
        assert call(process, "write") == b"refused"


def test_a_library_that_looks_for_others_as_it_is_imported() -> None:
    """As torch does if it is built with CUDA. `find_library` would run programs, and raise where there is no
    folder for their output."""
    source = b"""
import ctypes.util
from meshsdk.userops import BYTES, op

FOUND = ctypes.util.find_library("dl")

@op(input=BYTES, output=BYTES)
def found(data):
    return repr((FOUND, ctypes.util.find_library("cuda"))).encode()
"""
    for sealed in (False, True):
        with confined(SandboxPolicy(sealed=sealed), source) as process:
            assert call(process, "found") == b"(None, None)"


def wheel(init: str = "from .deep.parts import double\n") -> bytes:
    """A wheel of pure Python with a package in a package, a file beside it, and metadata."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("gear/__init__.py", init)
        archive.writestr(
            "gear/deep/parts.py", "import colorsys\nfrom .. import deep\ndouble = lambda x: x * 2\n"
        )
        archive.writestr("gear/data.txt", "seven")
        archive.writestr("gear-2.5.dist-info/METADATA", "Metadata-Version: 2.1\nName: gear\nVersion: 2.5\n")
    return out.getvalue()


GEARED = b"""
import importlib.metadata, importlib.resources, pkgutil
import gear
from meshsdk.userops import BYTES, op

@op(input=BYTES, output=BYTES)
def told(data):
    file = importlib.resources.files("gear").joinpath("data.txt").read_text()
    return repr((gear.double(data), file, pkgutil.get_data("gear", "data.txt"),
                 importlib.metadata.version("gear"))).encode()
"""


@BOTH
def test_wheels_are_imported_from_memory_without_rights(confinement: SandboxPolicy) -> None:
    def start(content: bytes) -> SandboxProcess:
        return SandboxProcess("mine", GEARED, 256 * MIB, confinement, {"gear-2.5-py3-none-any.whl": content})

    process = start(wheel())
    try:
        assert call(process, "told", b"ab") == repr((b"abab", "seven", b"seven", "2.5")).encode()
    finally:
        process.close()
    for content, reason in (
        (b"no zip", "gear-2.5-py3-none-any.whl is not a wheel"),
        (wheel("open('/etc/passwd')"), "PermissionError"),
        (wheel("1 / 0"), "ZeroDivisionError"),
    ):
        with pytest.raises(UnusableModuleError, match=reason):
            start(content)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"import numpy", "must declare 1…64 ops"),
        (b"def broken(:", "SyntaxError"),
        (b"import os\nos.listdir('/')", "PermissionError"),
        (b"import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        (b"import meshd.config", "user ops cannot import 'meshd.config'$"),
        (b"x = 1 / 0", "line 1"),
        (b"raise SystemExit", "SystemExit"),
    ],
)
def test_a_module_that_cannot_be_used_says_why(source: bytes, reason: str) -> None:
    with pytest.raises((UnusableModuleError, SandboxDiedError), match=reason):
        SandboxProcess("mine", source, 256 * MIB, SandboxPolicy())


def test_where_something_hidden_lies_below_the_libraries_no_file_is_opened() -> None:
    hidden = os.path.join(os.path.dirname(np.__file__), "data")
    with confined(SandboxPolicy(hidden=(hidden,))) as process:
        assert process.held == ("seccomp", "no files")


def test_other_machines_are_refused_and_known_ones_have_a_filter() -> None:
    for machine in ("x86_64", "aarch64"):
        for files in (True, False):
            assert len(seccomp.build_filter(1, files=files, last=True, machine=machine)) % 8 == 0
    with pytest.raises(seccomp.SeccompUnavailableError):
        seccomp.build_filter(1, files=True, last=True, machine="riscv64")


def module(source: bytes = SOURCE) -> UserModule:
    with confined(source=source) as process:
        return parse_module("mine", encode_module(source.decode(), process.declared))


def test_a_module_is_its_document() -> None:
    found = module()
    assert found.version.startswith("sha256:")
    assert found.source == SOURCE
    assert isinstance(found.ops["planes"], OpDeclaration)
    assert parse_declarations([found.ops["planes"].document()])["planes"] == found.ops["planes"]


def test_a_death_costs_one_retry_and_then_the_sample() -> None:
    found, processes = module(), SandboxProcessPool(SandboxPolicy(seconds=20))
    try:
        declared = found.ops["do"]
        leak = {"what": "kept.append(bytearray(70 << 20))"}
        for _ in range(40):  # every few samples the memory is full: a new process, and the sample goes on
            assert processes.run_op(found, declared, leak, 0, b"") == b"done"
        with pytest.raises(BadSampleError, match=r"its process ended \(SIGABRT\).*, twice"):
            processes.run_op(found, declared, {"what": "os.abort()"}, 0, b"")
        assert processes.run_op(found, declared, {"what": "pass"}, 0, b"") == b"done"
    finally:
        processes.close()

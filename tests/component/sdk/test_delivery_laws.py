"""The laws of delivery: nothing grows over ten thousand steps, nothing is copied after the socket, and
whatever ends a loop leaves no process, thread, socket or shared memory."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.client.http_connection import Connection
from meshsdk.loader_stats import Meter
from tests.component.sdk import test_sdk_scripted
from tests.component.sdk.test_sdk_scripted import ORDER, SAMPLES, labels, loader, sockets, threads
from tests.support.bounded_wait import await_end, await_true
from tests.support.shared_memory import await_no_more, segments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.component.sdk.test_sdk_scripted import ScriptedMesh

# Fixtures.
scripted_server = test_sdk_scripted.scripted_server
undisturbed = test_sdk_scripted.undisturbed

STEPS, EPOCHS, BATCH = 2_000, 5, 4


class CannedMesh:
    """One frame for every question, as fast as Python goes; plans and snapshots are a scripted server's."""

    def __init__(self, scripted: ScriptedMesh) -> None:
        self.scripted = scripted
        rows = np.arange(BATCH)
        self.frame = _answer(scripted.render(rows, rows, np.zeros(BATCH), {"version": "1"}))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.serving: list[threading.Thread] = []
        self.thread = threading.Thread(target=self.accept)
        self.thread.start()

    def accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.answered(connection):
                self.serving.append(threading.Thread(target=self.serve, args=(connection,)))
                self.serving[-1].start()
            else:
                connection.close()
                return

    def serve(self, connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):  # a client may leave in the middle
            while self.answered(connection):
                pass

    def answered(self, connection: socket.socket) -> bool:
        """One question; False when nobody asks any more."""
        head, _, body = connection.recv(8192).partition(b"\r\n\r\n")
        if head.startswith(b"GET"):
            connection.sendall(self.frame)
        elif head.startswith(b"POST /-/plans"):
            connection.sendall(_answer(json.dumps(self.scripted.register(json.loads(body))).encode()))
        elif head.startswith(b"POST") and b"/order " in head.partition(b"\r\n")[0]:
            connection.sendall(_answer(json.dumps(ORDER).encode()))
        elif head.startswith(b"POST"):
            connection.sendall(_answer(json.dumps(self.scripted.summary()).encode()))
        else:
            return False
        return True

    def settle(self) -> None:
        """Until all connections are closed from the other side, too."""
        while self.serving:
            self.serving.pop().join(60)

    def close(self) -> None:
        socket.create_connection(("127.0.0.1", self.port)).close()  # says nothing: the end
        await_end(self.thread)
        self.listener.close()


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@pytest.fixture
def canned(server: ScriptedMesh, side: int) -> Iterator[CannedMesh]:
    server.samples, server.side = STEPS * BATCH, side
    made = CannedMesh(server)
    yield made
    made.close()
    server.samples, server.side = test_sdk_scripted.SAMPLES, test_sdk_scripted.SIDE


@pytest.fixture
def side() -> int:
    """Of its images."""
    return test_sdk_scripted.SIDE


def canned_loader(canned: CannedMesh, **more: Any) -> mesh.Loader:
    client = mesh.connect(f"http://127.0.0.1:{canned.port}", access_key="user", secret_key="secret")
    ds = mesh.open("s3://photos/train", fields={"image": "jpg", "label": "@class"}, client=client)
    return mesh.Loader(ds.map(ops.decode("image")), BATCH, **more)


def held() -> tuple[int, int, int, int]:
    """Resident bytes, descriptors, threads and Python's objects of this process."""
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds(), threading.active_count(), len(gc.get_objects())


def _at_most(now: tuple[int, ...], then: tuple[int, ...]) -> bool:
    return all(one <= other for one, other in zip(now, then, strict=True))


def test_nothing_grows_over_ten_thousand_steps(canned: CannedMesh) -> None:
    with canned_loader(canned, output="torch", prefetch_bytes=1 << 16) as one:
        found, steps = list[tuple[int, int, int, int]](), 0
        for _ in range(EPOCHS):
            for batch in one:
                steps += batch.rows == BATCH
            del batch
            canned.settle()
            if len(found) > 2:  # threads that end take their time on a busy machine
                await_true(lambda: _at_most(held()[1:3], found[2][1:3]))
            found.append(held())
        arena = one._arena
        assert steps == EPOCHS * STEPS
        arena.collect()
        assert (one.stats().overflows, arena.leased, len(arena._out)) == (0, 0, 0)
        assert arena.allocated <= 1 << 16
    memory, descriptors, running, objects = zip(*found[2:], strict=True)  # all is warm by then
    assert max(memory) - memory[0] < 2 << 20
    assert max(descriptors) == descriptors[0]
    assert max(running) == running[0]
    assert max(objects) - objects[0] < 100


class Received(Connection):
    """Notes where bodies were received to, and how many bytes of them were copied on the way."""

    places: list[tuple[int, int]] = []  # noqa: RUF012 - of all connections
    copied = 0

    def read_exact(self, view: memoryview) -> None:
        Received.places.append((np.frombuffer(view, np.uint8).ctypes.data, len(view)))
        Received.copied += min(len(view), self._end - self._start)
        super().read_exact(view)


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_nothing_copies_a_batch_after_the_socket(
    server: ScriptedMesh, monkeypatch: pytest.MonkeyPatch, output: Any
) -> None:
    """The tensors handed over lie where the body was received."""
    monkeypatch.setattr("meshsdk.client.connection_pool.Connection", Received)
    server.side = 64
    Received.places.clear()
    Received.copied = 0
    try:
        with loader(server, output=output) as one:
            asked = len(Received.places)  # answers of other kinds
            for batch in one:
                for tensor in (batch["image"], batch["label"]):
                    address = tensor.data_ptr() if output == "torch" else tensor.ctypes.data
                    assert any(0 <= address - at < size for at, size in Received.places[asked:])
            frames = Received.places[asked:]
    finally:
        server.side = test_sdk_scripted.SIDE
    assert len(frames) == len(one)  # each frame was received once, whole
    assert sum(size for _, size in frames) > 1 << 20
    assert Received.copied < 17 << 10 << 3  # what came in one segment with a head, at most 16 KiB a frame


@pytest.mark.parametrize("side", [256])
def test_no_memory_beside_the_slot_is_made_for_a_frame(canned: CannedMesh) -> None:
    """Of all that Python and numpy allocate while batches come, nothing is near a frame's size. (Slots are
    mapped, and are not counted.)"""
    with canned_loader(canned, output="numpy", prefetch_bytes=4 << 20) as one:
        iterator = iter(one)
        size = next(iterator)["image"].nbytes
        tracemalloc.start()
        try:
            for _ in range(20):
                assert next(iterator)["image"].nbytes == size
            made, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert size > 700_000
    assert max(made, peak) < size // 3


# --- endings --------------------------------------------------------------------------------------------


def test_a_forked_child_leaves_its_parent_alone(server: ScriptedMesh) -> None:
    """In the middle of a pass: the child can neither go on with it nor end it, has a loader of its own, and
    leaves by the front door."""
    with loader(server) as one:
        iterator = iter(one)
        before = [next(iterator) for _ in range(2)]
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                fresh = list(loader(server))
                assert labels(fresh)
                assert threads() == []
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        rest = list(iterator)
        assert [batch.step for batch in before + rest] == list(range(len(one)))
        assert labels(before + rest) == labels(loader(server))


PROGRAM = """
import gc, json, os, sys, threading
import psutil
import meshsdk as mesh
from contextlib import suppress
from meshsdk import ops

ds = mesh.open("s3://photos/train", fields={"image": "jpg", "label": "@class"})
ds = ds.map(ops.decode("image"), ops.to_chw("image"))
loader = mesh.Loader(ds, 16, output="numpy")

def left():
    gc.collect()
    for each in threading.enumerate():
        if each.name == "QueueFeederThread":  # of a queue that torch closed without waiting for its end
            each.join(30)
    process = psutil.Process()
    links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if
             os.path.exists(f"/proc/self/fd/{name}") or os.path.islink(f"/proc/self/fd/{name}")]
    return {
        "threads": [each.name for each in threading.enumerate() if each.name != "MainThread"],
        "sockets": [link for link in links if link.startswith(("socket:", "anon_inode:[eventfd]"))],
        "memory": [link for link in links if "memfd" in link or "/dev/shm" in link],
        "children": [child.pid for child in process.children()],
    }

def train():
    ENDING

try:
    train()
except (ZeroDivisionError, KeyboardInterrupt) as error:
    ended = type(error).__name__
    del error
else:
    ended = ""
ds.client.close()
print(json.dumps({"ended": ended} | left()), flush=True)
"""
ENDINGS = {
    "last step": "for batch in loader: pass",
    "break": "for batch in loader: break",
    "exception": "for batch in loader: 1 / 0",
    "with": "with loader: next(iter(loader))",
    "Ctrl-C": "for batch in loader: print('now', flush=True); sys.stdin.readline()",
    "workers": "from torch.utils.data import DataLoader\n"
    "    given = DataLoader(loader.as_iterable(), num_workers=1)\n"
    "    list(given)\n"
    "    for batch in given: break",
}


def program(server: ScriptedMesh, source: str) -> subprocess.Popen[str]:
    env = os.environ | {
        "MESH_ENDPOINT": server.endpoint,
        "AWS_ACCESS_KEY_ID": "user",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    command = [sys.executable, "-W", "error", "-c", source]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("ending", ENDINGS)
def test_whatever_ends_a_loop_leaves_nothing(server: ScriptedMesh, ending: str) -> None:
    shared = segments()
    with program(server, PROGRAM.replace("ENDING", ENDINGS[ending])) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if line == "now\n":
            process.send_signal(signal.SIGINT)
            line = process.stdout.readline()
        _, errors = process.communicate("\n", timeout=60)
    assert errors == ""
    expected = {"exception": "ZeroDivisionError", "Ctrl-C": "KeyboardInterrupt"}.get(ending, "")
    nothing: dict[str, Any] = {"threads": [], "sockets": [], "memory": [], "children": []}
    assert json.loads(line) == {"ended": expected} | nothing
    assert process.returncode == 0
    await_no_more(shared)


def test_the_interpreter_ends_with_an_iterator_open(server: ScriptedMesh) -> None:
    """Of a loader and of a DataLoader with a worker: no error, and the worker goes, too."""
    shared = segments()
    source = PROGRAM.partition("def left")[0] + (
        "from torch.utils.data import DataLoader\n"
        "workers = iter(DataLoader(loader.as_iterable(), num_workers=1))\n"
        "next(workers)\n"
        "iterator = iter(loader)\n"
        "next(iterator)\n"
        "print(*(child.pid for child in psutil.Process().children()), flush=True)\n"
    )
    with program(server, source) as process:
        out, errors = process.communicate(timeout=60)
    assert (errors, process.returncode) == ("", 0)
    assert [psutil.pid_exists(int(pid)) for pid in out.split()] == [False]
    await_no_more(shared)
    assert sockets(server) == 0


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_while_the_prefetch_thread_starts_ends_it(
    server: ScriptedMesh, monkeypatch: pytest.MonkeyPatch, *, begun: bool
) -> None:
    start = threading.Thread.start
    readers = []

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "mesh-reader":
            start(thread)
            return
        readers.append(thread)
        if begun:
            start(thread)
        raise KeyboardInterrupt

    with loader(server) as one:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(one))
        monkeypatch.undo()
        assert [thread for thread in readers if thread.is_alive()] == []
        assert len(labels(one)) == SAMPLES


def test_an_interrupt_before_the_first_batch_ends_the_prefetch_thread(
    server: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Meter) -> None:
        raise KeyboardInterrupt

    with loader(server) as one:
        monkeypatch.setattr(Meter, "start", interrupted)
        with pytest.raises(KeyboardInterrupt) as held:  # its traceback refers to the iterator
            next(iter(one))
        assert threads() == []
        del held
        monkeypatch.undo()
        assert len(labels(one)) == SAMPLES

"""What another thread changes while the SDK chooses a node, and what an interrupt or a fork leaves."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from meshsdk.client.routing import ClusterDirectory
from meshsdk.client.settings import parse_endpoint
from meshsdk.errors import ClosedError
from meshsdk.loader import prefetcher
from meshsdk.loader.stats_page import describe, open_page

if TYPE_CHECKING:
    from pathlib import Path


def test_a_node_of_an_earlier_map_has_an_endpoint() -> None:
    """Another thread takes over the next map between the choice of nodes and the look at their endpoints."""
    endpoints = tuple(parse_endpoint(f"http://127.0.0.1:{port}") for port in (1, 2))
    directory = ClusterDirectory(endpoints, lambda _: b"")
    gone: Any = SimpleNamespace(node_id="gone", endpoint="http://127.0.0.1:3", state="up")
    earlier: Any = SimpleNamespace(nodes=(gone,))
    directory._map = earlier
    assert directory.endpoint(gone) == parse_endpoint("http://127.0.0.1:3")
    assert directory.state(parse_endpoint("http://127.0.0.1:3")) == "up"
    assert parse_endpoint("http://127.0.0.1:3") in directory._everybody()


def test_an_interrupted_close_tells_the_consumer() -> None:
    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

    told: list[object] = []
    quiet = SimpleNamespace(wake=lambda: None, close=lambda: told.append("closed"), abort=lambda: None)
    out = SimpleNamespace(put=told.append)
    reader: Any = SimpleNamespace(closing=False, waker=quiet, flights=quiet, out=out)
    with pytest.raises(KeyboardInterrupt):
        prefetcher._shut(reader, Interrupted(), os.getpid())
    assert told[0] == "closed"
    assert isinstance(told[1], ClosedError)


def test_an_interrupt_where_an_iteration_is_collected_comes_a_moment_later() -> None:
    """What a callback of the collector raises is printed and ignored: Ctrl-C would be lost."""

    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

    told: list[object] = []
    quiet = SimpleNamespace(wake=lambda: None, close=lambda: told.append("closed"), abort=lambda: None)
    reader: Any = SimpleNamespace(closing=False, waker=quiet, flights=quiet, out=SimpleNamespace(put=id))

    def program() -> None:
        prefetcher._collected(reader, Interrupted(), os.getpid())
        told.append("returned")
        threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        program()
    assert told == ["closed", "returned"]


_FORK = """
import os, signal, threading
from meshsdk.client import gather
from meshsdk.client.arena import Waker
from meshsdk.client.routing import ClusterDirectory
from meshsdk.client.settings import parse_endpoint

def ask(endpoint):
    asked.append(endpoint)
    raise ValueError

asked, waker = [], Waker()
directory = ClusterDirectory((parse_endpoint("http://127.0.0.1:1"),), ask)
held, done = threading.Event(), threading.Event()

def hold():
    for lock in gather._rooms._lock, waker._lock, directory._lock:
        lock.acquire()
    held.set()
    done.wait(60)

threading.Thread(target=hold, daemon=True).start()
held.wait(60)
child = os.fork()
if not child:
    signal.alarm(20)  # which ends what waits for ever
    gather._rooms.take(1)
    waker.close()
    directory.refresh()
    os._exit(0 if asked else 1)
done.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_has_no_lock_that_another_thread_held() -> None:
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK], capture_output=True, text=True, timeout=120, check=True
    )
    assert told.stdout.strip() == "0"


def test_multiprocessing_forgets_the_pages_of_loaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_RUNTIME_DIR", str(tmp_path))
    util: Any = importlib.import_module("multiprocessing.util")
    before = len(util._finalizer_registry)
    for _ in range(20):
        page = open_page(describe(0, 1, "s3://b", "p", 4, ""), 10)
        assert page is not None
        page.close()
        del page
    gc.collect()
    assert len(util._finalizer_registry) == before

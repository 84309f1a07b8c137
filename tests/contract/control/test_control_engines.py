"""Every control engine against the shipped suite."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from typing import TYPE_CHECKING

import pytest

from meshd.control import embedded
from meshd.control.embedded import EmbeddedControl, FileChanges
from tests.support.control_suite import ControlSuite, closing
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from meshd.control.control_api import ControlStore
    from meshd.util.clock import Clock


class TestMemory(ControlSuite):
    def open_control(self, clock: Clock) -> AbstractAsyncContextManager[ControlStore]:
        return closing(MemoryControl(clock))


class TestEmbedded(ControlSuite):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.place = tmp_path

    def open_control(self, clock: Clock) -> AbstractAsyncContextManager[ControlStore]:
        return closing(EmbeddedControl(self.place / "control", clock, poll=0.01))


def test_embedded_state_survives_closing(tmp_path: Path) -> None:
    async def write() -> int:
        control = EmbeddedControl(tmp_path, ManualClock())
        version = await control.put("topic/a", b"kept")
        control.close()
        return version

    version = asyncio.run(write())
    control = EmbeddedControl(tmp_path, ManualClock())
    assert control.cached_entries("topic")["topic/a"].value == b"kept"
    assert control.revision("topic") == version
    control.close()


@pytest.mark.parametrize("told", [True, False], ids=["kernel", "poll"])
def test_embedded_sees_and_watches_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, told: bool
) -> None:
    """A child writes; this process's lookups and its watch notice: told by the kernel, or where it cannot."""
    if told:
        monkeypatch.setattr(embedded, "_LAST_LOOK", 3600.0)
    else:
        missing = tmp_path / "missing"
        monkeypatch.setattr(embedded, "FileChanges", lambda _, changed: FileChanges(missing, changed))
    go, gone = os.pipe()

    async def other() -> None:
        os.read(go, 1)
        control = EmbeddedControl(tmp_path, ManualClock())
        await control.put("topic/a", b"from the child")
        control.close()

    child = os.fork()
    if child == 0:
        asyncio.run(other())
        os._exit(0)

    async def main() -> None:
        control = EmbeddedControl(tmp_path, ManualClock(), poll=0.01)
        watch = control.watch("topic")
        first = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        os.write(gone, b"!")
        async with asyncio.timeout(20):
            change = await first
        assert change.entry is not None
        assert change.entry.value == b"from the child"
        assert "topic/a" in control.cached_entries("topic")
        await watch.aclose()
        control.close()

    asyncio.run(main())
    assert os.waitpid(child, 0)[1] == 0


def test_embedded_sees_a_write_of_which_it_was_told_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of the bytes; the number that makes them visible follows a moment later."""
    told: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def early(_: Path, changed: Callable[[], None]) -> Iterator[None]:
        told.append(changed)
        yield

    monkeypatch.setattr(embedded, "FileChanges", early)
    monkeypatch.setattr(embedded, "_LAST_LOOK", 3600.0)

    async def main() -> None:
        control = EmbeddedControl(tmp_path, ManualClock(), poll=0.01)
        look, looks = control.revision, itertools.count(1)

        def revision(topic: str) -> int:
            found = look(topic)
            if next(looks) == 2:
                control._commit(lambda txn: control._put(txn, "topic/a", b"1", None))
            return found

        monkeypatch.setattr(control, "revision", revision)
        watch = control.watch("topic")
        first = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        told[0]()
        async with asyncio.timeout(20):
            change = await first
        assert change.entry is not None
        assert change.entry.value == b"1"
        await watch.aclose()
        control.close()

    asyncio.run(main())


def test_embedded_survives_a_writer_killed_inside_a_transaction(tmp_path: Path) -> None:
    ready, wake = os.pipe()
    child = os.fork()
    if child == 0:
        control = EmbeddedControl(tmp_path, ManualClock())
        with control._env.begin(write=True) as txn:  # the lock is held when the process dies
            txn.put(b"half", b"done")
            os.write(wake, b"x")
            os.kill(os.getpid(), 9)
    os.read(ready, 1)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(wake)

    async def main() -> None:
        control = EmbeddedControl(tmp_path, ManualClock())
        assert await control.put("topic/a", b"after") > 0
        control.close()

    asyncio.run(main())


def test_a_watch_is_cancelled_though_something_is_written_at_that_moment(tmp_path: Path) -> None:
    """A node that stops writes and cancels its watchers in one breath."""

    async def scenario() -> None:
        control = EmbeddedControl(tmp_path, ManualClock())
        began = asyncio.Event()

        async def watch() -> None:
            async with contextlib.aclosing(control.watch("topic")) as changes:
                async for _ in changes:
                    began.set()

        await control.put("topic/a", b"1")
        watcher = asyncio.create_task(watch())
        await began.wait()
        await asyncio.sleep(0)  # it has seen everything, and waits
        control._wake()
        watcher.cancel()
        done, _ = await asyncio.wait([watcher], timeout=60)
        control.close()
        assert done, "the cancel was lost"
        assert watcher.cancelled()

    asyncio.run(scenario())

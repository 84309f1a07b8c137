"""Windows of copies: which objects a node is asked to load, and when they are copied."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from meshsdk.cli.copy_task import Copy
from meshsdk.cli.copy_windows import loaded_windows
from meshsdk.cli.path_arguments import Local, Remote
from tests.support.bounded_wait import WAIT_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.client.s3_client import Client

ROOT = Path(__file__).resolve().parents[3]
CLIENT: Any = SimpleNamespace(transport=None)


class Node:
    """Loads `fits` objects of each request."""

    def __init__(self, fits: int) -> None:
        self.fits, self.asked = fits, list[tuple[str, list[str]]]()

    def load(self, _: Any, bucket: str, keys: Sequence[str]) -> int:
        self.asked.append((bucket, list(keys)))
        return min(self.fits, len(keys))


def downloads(count: int, size: int = 1000, bucket: str = "b") -> list[Copy]:
    return [Copy(Remote(bucket, f"{n:04d}"), Local(Path(f"{n:04d}")), size) for n in range(count)]


def windows(copies: list[Copy], node: Node) -> list[Sequence[Copy]]:
    client: Client = CLIENT
    found = list(loaded_windows(client, copies, node.load))
    assert [copy for window in found for copy in window] == copies
    return found


def test_a_window_is_what_a_node_has_loaded() -> None:
    node = Node(fits=40)
    found = windows(downloads(100), node)
    assert [len(window) for window in found] == [40, 40, 20]
    assert [keys[0] for _, keys in node.asked] == ["0000", "0040", "0080"]


def test_an_interrupted_copy_does_not_wait_for_the_request_of_a_window() -> None:
    script = (
        "import threading\n"
        "from tests.unit.sdk.test_copy_windows import CLIENT, downloads, loaded_windows\n"
        "def load(*_):\n"
        "    print('asked', flush=True)\n"
        "    threading.Event().wait()\n"
        "list(loaded_windows(CLIENT, downloads(100), load))\n"
    )
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "asked\n"
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=WAIT_TIMEOUT)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in told


def test_a_node_that_loads_nothing_is_asked_once() -> None:
    node = Node(fits=0)
    assert len(windows(downloads(100), node)) == 1
    assert len(node.asked) == 1


def test_few_or_large_objects_and_uploads_are_not_loaded() -> None:
    node = Node(fits=1000)
    uploads = [Copy(Local(Path(str(n))), Remote("b", str(n)), 10) for n in range(100)]
    for copies in (downloads(31), downloads(100, size=2 << 20), downloads(100, size=0), uploads, []):
        assert len(windows(copies, node)) == (1 if copies else 0)
    assert not node.asked


def test_large_objects_are_copied_with_the_small_ones_around_them() -> None:
    node = Node(fits=30)
    copies = [copy for n, copy in enumerate(downloads(90)) for copy in (copy, *downloads(n % 2, 2 << 20))]
    found = windows(copies, node)
    assert [sum(copy.size == 1000 for copy in window) for window in found] == [30, 30, 30]


def test_a_window_has_one_bucket() -> None:
    node = Node(fits=1000)
    found = windows([*downloads(50), *downloads(50, bucket="c")], node)
    assert [len(window) for window in found] == [50, 50]
    assert [bucket for bucket, _ in node.asked] == ["b", "c"]

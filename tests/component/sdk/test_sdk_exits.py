"""A program that ends with loaders at work: it says nothing but what it has to say, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.component.sdk import test_sdk_scripted
from tests.component.sdk.test_sdk_scripted import wait_for
from tests.support.shared_memory import await_no_more, segments

if TYPE_CHECKING:
    from pathlib import Path

    from tests.component.sdk.test_sdk_scripted import ScriptedMesh

# Fixtures.
scripted_server = test_sdk_scripted.scripted_server
undisturbed = test_sdk_scripted.undisturbed

HEAD = """
import ctypes, os, sys, threading
import numpy
import meshsdk as mesh
from meshsdk import ops

ds = mesh.open("s3://photos/train", fields={"image": "jpg", "label": "@class"})
ds = ds.map(ops.decode("image"), ops.to_chw("image"))
loader = mesh.Loader(ds, 16, seed=7, output="numpy")
begun = threading.Event()
numpy.modules = [*sys.modules.values()]
ctypes.pythonapi.Py_IncRef(ctypes.py_object(numpy))
"""
# As torch does, HEAD keeps modules for good: they are emptied one after the other, and numpy, one of the
# first that were loaded, after those of ours. What hangs on it is collected then.
PROGRAMS = {
    "an iterator of the main module": "it = iter(loader); next(it)",
    "an iterator of another module": "numpy.held = iter(loader); next(numpy.held)",
    "one that was never asked": "numpy.held = iter(loader)",
    "one of tuples": "numpy.held = iter(loader.as_tuples('image', 'label')); next(numpy.held)",
    "every second batch": "numpy.held = loader.part(0, 0, 2); next(numpy.held)",
    "batches and their loader": "numpy.held = (loader, list(loader), iter(loader)); next(numpy.held[2])",
    "two loaders": """
other = mesh.Loader(ds, 16, seed=8, output="numpy")
numpy.held = [iter(loader), iter(other)]
for each in numpy.held:
    next(each)
""",
    "a daemon thread in its loop": """
def run():
    while True:
        for batch in loader:
            begun.set()

threading.Thread(target=run, daemon=True).start()
begun.wait()
""",
    "a daemon thread that waits for others": """
def run():
    for batch in loader:
        begun.set()
        threading.Event().wait()

threading.Thread(target=run, daemon=True).start()
begun.wait()
""",
    "a thread that the program waits for": """
def run():
    numpy.held = iter(loader)
    next(numpy.held)

threading.Thread(target=run).start()
""",
    "a forked child": """
numpy.held = iter(loader); next(numpy.held)
if os.fork() == 0:
    numpy.another = iter(loader); next(numpy.another)
else:
    assert os.wait()[1] == 0
""",
    "torch's loader": """
from torch.utils.data import DataLoader
numpy.held = iter(DataLoader(loader.as_iterable())); next(numpy.held)
""",
    "torch's loader and a worker": """
from torch.utils.data import DataLoader
numpy.held = iter(DataLoader(loader.as_iterable(), num_workers=1)); next(numpy.held)
""",
}


def run(server: ScriptedMesh, program: str, before: str = "") -> tuple[int, str]:
    """How it ended, and what it wrote to stderr; nothing that it has started is left."""
    env = os.environ | {
        "MESH_ENDPOINT": server.endpoint,
        "AWS_ACCESS_KEY_ID": "user",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    shared = segments()
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", before + HEAD + program]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    _, told = process.communicate(timeout=120)
    wait_for(lambda: not _lives(process.pid))
    assert not _lives(process.pid)
    await_no_more(shared)
    return process.returncode, told


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_end_is_silent(server: ScriptedMesh, name: str) -> None:
    assert run(server, PROGRAMS[name]) == (0, "")


@pytest.mark.parametrize("held", ["it", "numpy.held"])
@pytest.mark.parametrize(
    ("ending", "code", "word"),
    [("sys.exit(3)", 3, ""), ("sys.exit('enough')", 1, "enough\n"), ("1 / 0", 1, "ZeroDivisionError")],
)
def test_an_end_within_the_loop_tells_of_itself_alone(
    server: ScriptedMesh, held: str, ending: str, code: int, word: str
) -> None:
    ended, told = run(server, f"{held} = iter(loader)\nfor batch in {held}:\n    {ending}")
    assert ended == code
    assert word in told
    assert told.count("Traceback") == (ending == "1 / 0")
    assert "meshsdk" not in told


def test_a_daemon_thread_that_waits_for_a_node_ends_at_once(server: ScriptedMesh) -> None:
    server.gate.clear()
    program = """
def run():
    for batch in loader:
        pass

thread = threading.Thread(target=run, daemon=True)
thread.start()
while thread.is_alive() and "running" not in repr(loader):
    pass
"""
    ended = run(server, program)
    server.gate.set()
    assert ended == (0, "")


def test_a_loader_that_is_asked_later_still_says_so(server: ScriptedMesh) -> None:
    """By what the program has the interpreter call last."""
    before = """
import atexit, sys

@atexit.register
def late():
    try:
        next(iter(loader))
    except mesh.errors.ClosedError as error:
        print(error, file=sys.stderr)
"""
    assert run(server, "", before) == (0, "the interpreter is exiting: no more batches are loaded\n")


def test_a_trace_is_complete_at_the_end(server: ScriptedMesh, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program = f"loader.trace({str(path)!r}); numpy.held = iter(loader); next(numpy.held)"
    assert run(server, program) == (0, "")
    assert any(event["name"] == "wait" for event in json.loads(path.read_text()))

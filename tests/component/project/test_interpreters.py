"""Interpreters that are forked from a process with everything loaded are as executed ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.bounded_wait import await_true
from tests.support.fork_server import ForkedProcess
from tests.support.interpreters import PLACE, InterpreterServer, launch_python, path, program, python

if TYPE_CHECKING:
    from collections.abc import Iterator

TOLD = "import os, sys; print(sys.argv, os.environ.get('OWN'), os.getcwd(), __name__, sys.stdin.read())"


@pytest.fixture(scope="module")
def server() -> Iterator[InterpreterServer]:
    """One that has loaded only this file's modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(PLACE, raising=False)
        server = InterpreterServer([__file__])
        yield server
        server.close()


@pytest.fixture(autouse=True)
def _no_process_left() -> None:
    """The server lives as long as the module."""


def outcome(words: list[str], folder: Path, **env: str) -> tuple[int, str, str]:
    done = subprocess.run(
        words,
        input="in",
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    "words",
    [
        ["-c", TOLD, "one", "two words"],
        ["-u", "-c", "raise SystemExit(7)"],
        ["-c", "import sys; sys.exit('told')"],
        ["-c", "raise ValueError('told')"],
        ["-m", "it", "one"],
        ["it.py", "one"],
        ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
        [
            "-c",
            "import multiprocessing as m; p = m.get_context('spawn').Process(); p.start(); p.join()",
        ],
        ["-c", "import atexit; atexit.register(print, 'last')"],
        ["--version"],
    ],
)
def test_a_program_does_what_it_does_when_it_is_executed(
    server: InterpreterServer, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "it.py").write_text(TOLD)
    forked = outcome([python(), *words], tmp_path, OWN="own")
    assert forked == outcome([sys.executable, *words], tmp_path, OWN="own")


def test_it_has_loaded_what_the_tests_load(server: InterpreterServer, tmp_path: Path) -> None:
    asked = "import sys; print('tests.support.bounded_wait' in sys.modules, 'pytest' in sys.modules)"
    assert outcome([python(), "-c", asked], tmp_path)[1] == "True True\n"
    assert outcome(["bash", "-c", "command -v mesh"], tmp_path, PATH=path())[1].strip() == program("mesh")
    assert outcome([program("mesh"), "--help"], tmp_path) == outcome(
        [sys.executable, str(Path(sys.executable).with_name("mesh")), "--help"], tmp_path
    )


@pytest.mark.parametrize("words", [["admin", "user", "--help"], ["admin", "nothing"], ["serve", "--nothing"]])
def test_meshd_is_forked_to_administer_and_executed_for_the_rest(
    server: InterpreterServer, tmp_path: Path, words: list[str]
) -> None:
    executed = [sys.executable, str(Path(sys.executable).with_name("meshd")), *words]
    assert outcome([program("meshd"), *words], tmp_path) == outcome(executed, tmp_path)


def test_signals_reach_it_and_it_ends_with_whoever_asked(server: InterpreterServer, tmp_path: Path) -> None:
    program = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))\n"
        "child = subprocess.Popen(['sleep', '99'])\n"
        "print(child.pid, flush=True)\n"
        "while True: signal.pause()\n"
    )
    with subprocess.Popen([python(), "-c", program], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        child = int(asking.stdout.readline())
        asking.send_signal(signal.SIGTERM)
        assert asking.stdout.readline() == "term\n"
        asking.kill()
    await_true(lambda: not Path(f"/proc/{child}/cwd").exists() or _zombie(child))


@pytest.mark.parametrize("forked", [True, False])
def test_a_launched_one_has_its_files_and_ends_by_any_signal(
    server: InterpreterServer, tmp_path: Path, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not forked:
        monkeypatch.delenv(PLACE)
    env = os.environ | {"OWN": "own"}
    with (tmp_path / "log").open("w+b") as log:
        process = launch_python(["-c", TOLD, "one"], env, log, tmp_path)
        assert isinstance(process, ForkedProcess) is forked
        assert process.wait(60) == 0
        log.seek(0)
        assert log.read().decode() == f"{['-c', 'one']} own {tmp_path} __main__ \n"
        process = launch_python(["-c", "import time; time.sleep(99)"], env, log, tmp_path)
        os.kill(process.pid, signal.SIGSTOP)
        await_true(lambda: _state(process.pid) == "T")
        assert process.poll() is None
        process.kill()
        assert process.wait(60) == -signal.SIGKILL


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _zombie(pid: int) -> bool:
    try:
        return _state(pid) == "Z"
    except FileNotFoundError:
        return True


def test_an_interrupted_one_ends_as_a_shell_expects(server: InterpreterServer) -> None:
    program = "import time; print('ready', flush=True); time.sleep(99)"
    line = [python(), "-c", program]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        asking.stdout.readline()
        asking.send_signal(signal.SIGINT)
        assert asking.wait(60) == -signal.SIGINT


def test_without_a_server_programs_are_executed(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(PLACE, raising=False)
        server = InterpreterServer([__file__])
        words = [python(), "-c", TOLD, "one"]
        server.process.kill()
        server.process.wait(60)
        assert outcome(words, tmp_path) == outcome([sys.executable, *words[1:]], tmp_path)
        server.close()
        assert python() == sys.executable

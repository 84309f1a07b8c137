"""Main of the process that interpreters are forked from: it has collected the tests, and loaded what they do.

Law: one thread of Python's, and no test is run here. What is forked has its own environment, arguments,
folder and files, and a `__main__` of its own; it ends when whoever asked for it has ended.

    python -m tests.support.interpreter_server REQUESTS LIFE TEST…   # numbers of two sockets
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import importlib.util
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
import weakref
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, NoReturn

import pytest

from tests.support import huge_pages
from tests.support.cpu_report import write_own
from tests.support.fork_server_main import NodeForker, renew_shared_memory

if TYPE_CHECKING:
    from tests.support.fork_server_main import Request

_LATER: Final = {"torch": ("torch._dynamo",)}
"""What programs that have loaded a library load when they first use it: torch's optimizers do.

Not the AWS CLI: when it is loaded, it takes the folder of its cache of credentials from HOME, and each page
of the docs has its own.
"""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: who asks decides
    requests, life = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    pytest.main(["--collect-only", "-qqq", "-p", "no:cacheprovider", *sys.argv[3:]])
    for name in [name for library, names in _LATER.items() if library in sys.modules for name in names]:
        importlib.import_module(name)
    for made in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        made.atexit = False  # no program's to end; torch has made some, which take it a tenth of a second
    gc.collect()
    gc.freeze()
    huge_pages.collapse()
    request = NodeForker(requests, life, kept=False).run()
    if request is not None:
        run(request)


def run(request: Request) -> NoReturn:
    """Be the program, from start to end."""
    for number, file in enumerate((request.stdin, request.stdout, request.stderr)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=2)  # SIGABRT once was all that a rank of torchrun left
    renew_shared_memory()
    added = [each for each in request.environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:0] = [each for each in added if each not in sys.path]
    code = 1
    try:
        _execute(*request.arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        _flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    # As an interpreter ends, but its modules are not taken apart: that would first copy all their memory.
    # Threads are awaited as `multiprocessing` does in what it forks; there is no public name for that.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    write_own()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os._exit(120)  # as Python does


def _execute(name: str, *words: str) -> None:
    if name == "torchrun":
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous

        dynamic_rendezvous.get_method_name = _name_of_caller
    if name == "aws":
        importlib.reload(importlib.import_module("awscli"))  # it names its data in the environment
    if name != "python":
        sys.argv = [str(Path(sys.executable).with_name(name)), *words]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    what, rest = words[0], words[1:]
    if what == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    elif what == "-m":
        sys.argv = list(rest)
        sys.path.insert(0, os.getcwd())
        found = importlib.util.find_spec(rest[0])
        package = found is not None and found.submodule_search_locations is not None
        sys.modules.pop(f"{rest[0]}.__main__" if package else rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(what).absolute().parent))
        runpy.run_path(what, run_name="__main__")


def _name_of_caller(depth: int = 2) -> str:
    """As torch's, which for the name of an event looks up the source lines of its whole stack, twice, each in
    all modules that are loaded: here these are thousands."""
    return sys._getframe(depth).f_code.co_name


if __name__ == "__main__":
    main()

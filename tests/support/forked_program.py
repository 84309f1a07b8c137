"""Main of a program that asks for a forked interpreter, gives it its files, and ends as it ends.

Copied to a folder under the name of what it runs (interpreters.py). It loads as little as it can: it is
started hundreds of times.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main() -> None:
    place, name = os.path.split(os.path.abspath(sys.argv[0]))
    words = sys.argv[1:]
    while name == "python" and words[:1] in (["-u"], ["-B"]):
        del words[0]
    if name == "python" and not (words and (words[0] in ("-c", "-m") or words[0][:1] != "-")):
        execute(place, name)
    if name == "meshd" and words[:1] != ["admin"]:
        execute(place, name)
    # One that comes before its process id does waits: whoever saw its first line may be as fast as that.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    mine, theirs = socket.socketpair()
    asked = {"arguments": [name, *words], "environment": dict(os.environ), "folder": os.getcwd()}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
            requests.connect(os.path.join(place, "requests"))
            socket.send_fds(requests, [json.dumps(asked).encode()], [1, 2, theirs.fileno(), 0])
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        execute(place, name)
    theirs.close()
    pid = number(mine)
    if pid is None:  # nobody is there any more
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        execute(place, name)
    else:
        for each in FORWARDED:  # also SIGINT, which a shell ignores for what runs in the background
            signal.signal(each, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = number(mine)
        end(255 if code is None else code)


def number(told: socket.socket) -> int | None:
    line = b""
    while not line.endswith(b"\n"):
        got = told.recv(1)
        if not got:
            return None
        line += got
    return int(line)


def end(code: int) -> None:
    """As `Popen.returncode` has it."""
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def execute(place: str, name: str) -> None:
    file = [] if name == "python" else [os.path.join(os.path.dirname(sys.executable), name)]
    os.execv(sys.executable, [sys.executable, *file, *sys.argv[1:]])


if __name__ == "__main__":
    main()

"""Main of a program that asks for a forked interpreter, gives it its files, and ends as it ends.

Copied to a folder under the name of what it runs (interpreters.py). It loads as little as it can: it is
started hundreds of times, and `json`, `signal` and `socket` would be half of what it costs.
"""

from __future__ import annotations

import _socket as socket
import os
import sys
from _json import encode_basestring_ascii as quoted

signal = __import__("_signal")  # which has no types
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
    files = b"".join(file.to_bytes(4, sys.byteorder) for file in (1, 2, theirs.fileno(), 0))
    try:
        requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        requests.connect(os.path.join(place, "requests"))
        requests.sendmsg([asked(name, *words).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        execute(place, name)
    requests.close()
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


def asked(*arguments: str) -> str:
    """What a fork server reads, as JSON."""
    words = ", ".join(map(quoted, arguments))
    variables = ", ".join(f"{quoted(name)}: {quoted(value)}" for name, value in os.environ.items())
    return f'{{"arguments": [{words}], "environment": {{{variables}}}, "folder": {quoted(os.getcwd())}}}'


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

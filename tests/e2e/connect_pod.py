"""Runs in a pod until it is deleted. With arguments it connects to each HOST:PORT instead, and prints a line
of JSON: whether something accepted the connection. It fails if DNS does not know a name."""

from __future__ import annotations

import json
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

PATIENCE = 3.0


def accepts(target: str) -> bool:
    host, _, port = target.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    try:
        socket.create_connection((str(found[0][4][0]), int(port)), timeout=PATIENCE).close()
    except OSError:  # refused, or not answered: plug-ins do the one or the other
        return False
    return True


def main(targets: list[str]) -> None:
    if not targets:
        time.sleep(24 * 3600)
    with ThreadPoolExecutor(len(targets)) as threads:
        print(json.dumps(dict(zip(targets, threads.map(accepts, targets), strict=True))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

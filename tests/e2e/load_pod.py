"""Runs in a pod: writes and reads objects through the Service until the pod is deleted. Each second it prints
what happened in that second, as a line of JSON."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path

import meshsdk as mesh

OBJECTS, SIZE = 200, 10 * 1024


def body(number: int) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(SIZE)


class Tally:
    """What all threads did since the last line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._seconds: dict[str, list[float]] = {"read": [], "written": []}
        self._failed: list[str] = []

    def add(self, kind: str, seconds: float, failure: str = "") -> None:
        with self._lock:
            self._seconds[kind].append(round(seconds, 4))
            if failure:
                self._failed.append(failure)

    def line(self) -> str:
        with self._lock:
            found = {"seconds": self._seconds, "failed": self._failed}
            self._clear()
            return json.dumps(found)


def work(tally: Tally, client: mesh.Client, kind: str, start: int) -> None:
    number = start
    while True:
        number += 1
        began, failure = time.monotonic(), ""
        try:
            if kind == "written":
                client.put("load", f"new/{number:09}", body(number))
            elif client.get("load", f"old/{number % OBJECTS}") != body(number % OBJECTS):
                failure = "wrong bytes"
        except Exception as error:  # whatever a user would see is a failure
            failure = f"{kind} {time.strftime('%T')}: {error!r}"[:500]
        tally.add(kind, time.monotonic() - began, failure)
        time.sleep(0.01)


def main() -> None:
    tally = Tally()
    if authority := os.environ.get("E2E_AUTHORITY"):
        Path("/tmp/authority.pem").write_text(authority)
        os.environ["MESH_CA_BUNDLE"] = "/tmp/authority.pem"
    with mesh.connect(os.environ["MESH_ENDPOINT"]) as client:
        client.create_bucket("load")
        for number in range(OBJECTS):
            client.put("load", f"old/{number}", body(number))
        for at, kind in enumerate(("read", "read", "written")):
            threading.Thread(target=work, args=(tally, client, kind, at * 10**6), daemon=True).start()
        while True:
            print(tally.line(), flush=True)
            time.sleep(1)


if __name__ == "__main__":
    main()

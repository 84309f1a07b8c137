"""Runs in a pod: writes and reads objects through the Service until the pod is deleted. Each second it prints
what happened so far, as a line of JSON."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time

import meshsdk as mesh

OBJECTS, SIZE = 200, 10 * 1024


def body(number: int) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(SIZE)


class Tally:
    """What all threads did."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.done = {"read": 0, "written": 0}
        self.failed: list[str] = []
        self.longest = {"read": 0.0, "written": 0.0}

    def add(self, kind: str, seconds: float, failure: str = "") -> None:
        with self._lock:
            self.done[kind] += 1
            self.longest[kind] = max(self.longest[kind], seconds)
            if failure:
                self.failed.append(failure)

    def line(self) -> str:
        with self._lock:
            longest = {kind: round(seconds, 2) for kind, seconds in self.longest.items()}
            found = {"done": self.done, "failed": self.failed[:5], "failures": len(self.failed)}
            return json.dumps(found | {"longest": longest})


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

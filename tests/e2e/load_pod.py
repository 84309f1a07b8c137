"""Runs in a pod: writes and reads objects through the Service until the pod is deleted, with the SDK and, if
the image has it, boto3. Each second it prints what happened in that second, as a line of JSON.

With an argument, a list of [FIRST, LAST] as JSON, it reads those objects of `new/` instead, prints how many
there are and which are not what was written, and ends."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import meshsdk as mesh

if TYPE_CHECKING:
    from collections.abc import Iterable

OBJECTS, SIZE = 200, 10 * 1024


def body(number: int) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(SIZE)


class Tally:
    """What all threads did since the last line."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._lock, self._kinds = threading.Lock(), tuple(kinds)
        self._written: dict[str, int] = {}
        self._clear()

    def _clear(self) -> None:
        self._seconds: dict[str, list[float]] = {kind: [] for kind in self._kinds}
        self._failed: list[str] = []

    def add(self, kind: str, seconds: float, failure: str = "") -> None:
        with self._lock:
            self._seconds[kind].append(round(seconds, 4))
            if failure:
                self._failed.append(failure)

    def acknowledge(self, kind: str, number: int) -> None:
        with self._lock:
            self._written[kind] = number

    def line(self) -> str:
        with self._lock:
            found = {"seconds": self._seconds, "failed": self._failed, "written": self._written}
            self._clear()
            return json.dumps(found)


class SdkClient:
    """The SDK, as it is."""

    def __init__(self) -> None:
        self._client = mesh.connect(os.environ["MESH_ENDPOINT"])

    def get(self, key: str) -> bytes:
        return bytes(self._client.get("load", key))

    def put(self, key: str, data: bytes) -> None:
        self._client.put("load", key, data)


class BotoClient:
    """boto3 with its defaults, also its default retries."""

    def __init__(self) -> None:
        import boto3

        self._client = boto3.client("s3", endpoint_url=os.environ["MESH_ENDPOINT"], region_name="us-east-1")

    def get(self, key: str) -> bytes:
        return bytes(self._client.get_object(Bucket="load", Key=key)["Body"].read())

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket="load", Key=key, Body=data)


def work(tally: Tally, client: SdkClient | BotoClient, kind: str, start: int) -> None:
    number = start
    while True:
        number += 1
        began, failure = time.monotonic(), ""
        try:
            if kind.endswith("writes"):
                client.put(f"new/{number:09}", body(number))
                tally.acknowledge(kind, number)
            elif client.get(f"old/{number % OBJECTS}") != body(number % OBJECTS):
                failure = "wrong bytes"
        except Exception as error:  # whatever a user would see is a failure
            failure = f"{kind} {time.strftime('%T')}: {error!r}"[:500]
        tally.add(kind, time.monotonic() - began, failure)
        time.sleep(0.01)


def read_again(ranges: list[list[int]]) -> dict[str, object]:
    """Read what was written; return how many objects, and the first that are lost or other bytes."""
    client = SdkClient()

    def problem(number: int) -> str:
        try:
            return "" if client.get(f"new/{number:09}") == body(number) else f"{number}: wrong bytes"
        except Exception as error:  # whatever a user would see is a loss
            return f"{number}: {error!r}"[:500]

    numbers = [number for first, last in ranges for number in range(first, last + 1)]
    with ThreadPoolExecutor(4) as threads:
        problems = [each for each in threads.map(problem, numbers) if each]
    return {"objects": len(numbers), "problems": len(problems), "first": problems[:5]}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(read_again(json.loads(sys.argv[1]))), flush=True)
        return
    if authority := os.environ.get("E2E_AUTHORITY"):
        Path("/tmp/authority.pem").write_text(authority)
        os.environ["MESH_CA_BUNDLE"] = os.environ["AWS_CA_BUNDLE"] = "/tmp/authority.pem"
    clients: dict[str, SdkClient | BotoClient] = {"": SdkClient()}
    if importlib.util.find_spec("boto3"):
        clients["boto3 "] = BotoClient()
    with mesh.connect(os.environ["MESH_ENDPOINT"]) as client:
        client.create_bucket("load")
        for number in range(OBJECTS):
            client.put("load", f"old/{number}", body(number))
    tally = Tally(name + kind for name in clients for kind in ("reads", "writes"))
    threads = [(name, kind) for name in clients for kind in ("reads", "reads", "writes")]
    for at, (name, kind) in enumerate(threads):
        arguments = (tally, clients[name], name + kind, at * 10**6)
        threading.Thread(target=work, args=arguments, daemon=True).start()
    while True:
        print(tally.line(), flush=True)
        time.sleep(1)


if __name__ == "__main__":
    main()

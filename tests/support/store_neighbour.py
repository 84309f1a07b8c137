"""Another process on the same store: does what one JSON command a line says, and answers with one line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from meshd.config import StoreSettings
from meshd.store.errors import ConditionFailedError, StoreError
from meshd.store.store import Store
from meshd.util import failpoints
from meshwire.http_values.conditional_requests import Conditions
from tests.support.bounded_wait import WAIT_TIMEOUT
from tests.support.interpreters import python
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import put_object

ROOT = Path(__file__).parents[2]


def settings_at(place: Path) -> StoreSettings:
    return StoreSettings.at(
        place, small_object_bytes=64 << 10, segment_bytes=100_000, index_map_bytes=1 << 28
    )


async def increment(store: Store, key: str, times: int) -> int:
    """Adds one to a counter so many times by compare-and-swap; how often it had to try again."""
    lost = 0
    for _ in range(times):
        while True:
            found = store.get("b", key)
            number = int(store.read_range(found, 0, 20)) if found else 0
            same = Conditions(if_match=(found.etag,)) if found else Conditions(if_none_match=("*",))
            try:
                await put_object(store, key, b"%d" % (number + 1), conditions=same)
            except ConditionFailedError:
                lost += 1
                continue
            break
    return lost


async def create_versions(store: Store, keys: list[str]) -> int:
    """Makes the first version of each key unless another was quicker; how many were made."""
    made = 0
    for key in keys:
        try:
            await put_object(
                store, key, b"x", conditions=Conditions(if_none_match=("*",)), versioning="Enabled"
            )
        except ConditionFailedError:
            continue
        made += 1
    return made


def _pass(store: Store, seconds: float) -> None:
    clock = store._committer._clock
    assert isinstance(clock, ManualClock)
    clock.advance(seconds)


async def obey(store: Store, command: dict[str, Any]) -> Any:
    if command["do"] == "increment":
        return await increment(store, command["key"], command["times"])
    if command["do"] == "put":
        return (await put_object(store, command["key"], command["data"].encode())).stamp
    if command["do"] == "put and delete":
        await put_object(store, command["key"], b"gone")
        return (await store.delete("b", command["key"])).record is not None
    if command["do"] == "delete twice":
        failpoints.set_callback("store.delete.placed", lambda: _pass(store, command["seconds"]))
        return [
            removed.record is not None
            for removed in await asyncio.gather(*[store.delete("b", command["key"]) for _ in range(2)])
        ]
    if command["do"] == "delete many":
        keys = [f"many{number}" for number in range(command["count"])]
        await asyncio.gather(*[put_object(store, key) for key in keys])
        return sum(removed.record is not None for removed in (await store.delete_many("b", keys)).values())
    if command["do"] == "amend":
        return (await store.amend("b", command["key"], None, tags=command["tags"])).tags
    if command["do"] == "create versions":
        return await create_versions(store, command["keys"])
    if command["do"] == "compact":
        return [await store.compactor.compact(file) for file in store.compactor.candidates(0.0)]
    raise ValueError(command)


def main() -> None:
    place, writer, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    clock = ManualClock()
    clock.advance(seconds)
    with (
        closing(Store.open(settings_at(place), writer=writer, clock=clock)) as store,
        asyncio.Runner() as runner,
    ):
        print("ready", flush=True)
        for line in sys.stdin:
            try:
                answer = runner.run(obey(store, json.loads(line)))
            except StoreError as error:
                answer = repr(error)
            print(json.dumps(answer), flush=True)


class Neighbour:
    """Starts and commands such a process; a context manager."""

    def __init__(self, place: Path, writer: str, *, clock_ahead: float = 0.0) -> None:
        self._process = subprocess.Popen(
            [python(), "-m", "tests.support.store_neighbour", str(place), writer, str(clock_ahead)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        assert self._out.readline() == "ready\n"

    def tell(self, **command: Any) -> None:
        self._in.write(json.dumps(command) + "\n")
        self._in.flush()

    def answer(self) -> Any:
        return json.loads(self._out.readline())

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate(timeout=WAIT_TIMEOUT)


if __name__ == "__main__":
    main()

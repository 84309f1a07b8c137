"""Windows of copies: small objects are copied after nodes have read many of them in the order of their disks.

Law: every copy is in exactly one window, in order. Where no node loads anything, all copies are one window.
Invariant: at most two windows are in the memory of the nodes, the one that is copied and the next. An
interrupted command does not wait for the request of a window.
"""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from meshsdk.cli.path_arguments import Remote
from meshsdk.client.read_ahead_request import MAX_KEYS, SMALL_BYTES, load_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from meshsdk.cli.copy_task import Copy
    from meshsdk.client.s3_client import Client

_LEAST: Final = 32
"""Small objects from which on a request for a window pays."""


def loaded_windows(
    client: Client, copies: Sequence[Copy], load: Callable[[Any, str, Sequence[str]], int] = load_objects
) -> Iterator[Sequence[Copy]]:
    """Yield the copies in windows, each when its small objects are loaded."""
    small = sum(_small_source(copy) is not None for copy in copies)
    start, end = 0, len(copies)
    if small >= _LEAST:
        loading = _request_window(client, copies, 0, load)
        while (loaded := loading.result()) > start:
            if loaded < end:
                loading = _request_window(client, copies, loaded, load)
            yield copies[start:loaded]
            start = loaded
            if start == end:
                return
    if start < end:
        yield copies[start:]


def _request_window(
    client: Client, copies: Sequence[Copy], start: int, load: Callable[[Any, str, Sequence[str]], int]
) -> Future[int]:
    """Run `_load_window` in a thread for which the interpreter does not wait when it ends."""
    future = Future[int]()

    def run() -> None:
        try:
            future.set_result(_load_window(client, copies, start, load))
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, name="mesh-read-ahead", daemon=True).start()
    return future


def _load_window(
    client: Client, copies: Sequence[Copy], start: int, load: Callable[[Any, str, Sequence[str]], int]
) -> int:
    """Return the number of the first copy behind the window that begins at `start`; `start` if nothing is
    loaded."""
    bucket, keys, places = "", list[str](), list[int]()
    end = start
    for end in range(start, len(copies)):
        source = _small_source(copies[end])
        if source is None:
            continue
        if len(keys) == MAX_KEYS or (keys and source.bucket != bucket):
            break
        bucket = source.bucket
        keys.append(source.key)
        places.append(end)
    else:
        end = len(copies)
    count = load(client.transport, bucket, keys) if keys else 0
    if count == len(keys):
        return end
    return places[count] if count else start


def _small_source(copy: Copy) -> Remote | None:
    source = copy.source
    return source if isinstance(source, Remote) and 0 < (copy.size or 0) <= SMALL_BYTES else None

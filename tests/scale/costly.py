"""Requests that cost a node most of what anybody may ask for, and a crowd that sends them.

The crowd runs in processes of its own and parses nothing, so that what is measured beside it is the node.
"""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import multiprocessing
import os
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, sign
from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.support.daemons import Daemon

PHOTOGRAPHS = 64
ROWS = 64
_CLIENTS = 50
"""Clients of one process."""
_REFUSED = 60.0
"""Seconds after which clients end even if none of them was served."""
_SILENCE = 600.0
"""Seconds a client waits for an answer."""
_OPS = [
    {"op": "decode", "field": "image", "args": {}},
    {"op": "random_resized_crop", "field": "image", "args": {"size": 1024}},
    {"op": "to_chw", "field": "image", "args": {}},
]


@dataclass(frozen=True, slots=True)
class Costly:
    """A request; `{n}` in its target is another number each time."""

    method: str
    target: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def costly_requests(daemon: Daemon, bucket: str) -> Mapping[str, Costly]:
    """Of a bucket that `costly_data.fill` filled. Answers may refuse (503 and the like), but must come."""
    photographs = {"source": f"s3://{bucket}/photographs/", "fields": {"image": {"ext": ["jpg"]}}}
    plan = _plan(daemon, photographs, _OPS, 16)
    arrays = {"source": f"s3://{bucket}/arrays/", "kind": "zarr", "fields": {"x": {"array": "x"}}}
    metadata = {"metadata": f"s3://{bucket}/arrays/x/zarr.json"}
    windows = _plan(daemon, arrays, [{"op": "zarr", "field": "x", "args": metadata}], ROWS)
    tables = {"source": f"s3://{bucket}/tables/", "kind": "parquet", "fields": {"x": {"column": "x"}}}
    rows = _plan(
        daemon,
        tables,
        [{"op": "frombuffer", "field": "x", "args": {"dtype": "float32", "shape": [1024]}}],
        ROWS,
    )
    view = {"kind": "shards", "prefix": "photographs/", "count": 16, "shuffle": 7}
    _post(daemon, "/-/views", {"bucket": bucket, "name": "packed", "view": view})
    items = [{"bucket": bucket, "key": f"photographs/{number:04d}.jpg"} for number in range(PHOTOGRAPHS)]
    gather = json.dumps({"credit": 32 << 20, "enough": 1 << 20, "names": False, "items": 4 * items})
    names = "".join(f"<Object><Key>gone/{number}</Key></Object>" for number in range(1000))
    sweep = f"<Delete>{names}</Delete>".encode()
    summed = {"x-amz-checksum-algorithm": "SHA1", "x-amz-copy-source": f"/{bucket}/large"}
    return {
        "a new batch of 16 photographs of 1,600²": Costly("GET", f"/-/plans/{plan}/{{n}}/0?batch=16"),
        "PUT 8 MiB": Costly("PUT", f"/{bucket}/large-{{n}}", os.urandom(8 << 20)),
        "listing of 1,000": Costly("GET", f"/{bucket}?list-type=2&prefix=many/"),
        "DeleteObjects of 1,000": Costly("POST", f"/{bucket}?delete", sweep),
        "copy of 8 MiB with a new checksum": Costly("PUT", f"/{bucket}/copy-{{n}}", headers=summed),
        "shard of a view": Costly("GET", f"/{bucket}--packed/shard-000000.tar"),
        "page of 1,000 members of 10,000": Costly("GET", f"/{bucket}/members.tar?members&max-keys=1000"),
        "gather of 256 photographs": Costly(
            "POST", "/-/gather", gather.encode(), {"content-type": "application/json"}
        ),
        f"a new batch of {ROWS} Zarr rows": Costly("GET", f"/-/plans/{windows}/{{n}}/0?batch={ROWS}"),
        f"a new batch of {ROWS} Parquet rows": Costly("GET", f"/-/plans/{rows}/{{n}}/0?batch={ROWS}"),
    }


def _plan(daemon: Daemon, source: Mapping[str, Any], ops: list[dict[str, Any]], batch: int) -> str:
    snapshot = _post(daemon, "/-/snapshots", source)["snapshot"]
    document = {"snapshot": snapshot, "spec": {"seed": 7, "ops": ops}, "batch": batch}
    plan: str = _post(daemon, "/-/plans", document)["plan"]
    return plan


def _post(daemon: Daemon, target: str, document: Mapping[str, Any]) -> Any:
    answer = daemon.request("POST", target, json.dumps(document).encode())
    assert answer.status in (200, 201), answer.body
    return json.loads(answer.body)


@contextmanager
def crowd(daemon: Daemon, costly: Costly, clients: int) -> Iterator[dict[int, int]]:
    """Meanwhile so many clients send a request again and again, once at least, each on a connection of its
    own; where all are refused, on a busy machine, they go on for a while. Filled at the end: status → how
    many answers; 0 for a connection that broke."""
    spawn, answers = multiprocessing.get_context("spawn"), dict[int, int]()
    stop, results = spawn.Event(), spawn.Queue()
    processes = max(1, clients // _CLIENTS)
    each = clients // processes
    where = (daemon.endpoint, daemon.access_key, daemon.secret_key)
    workers = [
        spawn.Process(target=_work, args=(where, costly, each, number, stop, results))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    for _ in workers:
        results.get(timeout=240)  # it is there
    try:
        yield answers
    finally:
        stop.set()
        for _ in workers:
            for status, count in results.get(timeout=600).items():
                answers[status] = answers.get(status, 0) + count
        await_end(*workers)


def _work(
    where: tuple[str, str, str], costly: Costly, clients: int, number: int, stop: Any, results: Any
) -> None:
    numbers, answers, lock = itertools.count(number * 1_000_000), dict[int, int](), threading.Lock()
    results.put({})
    end = time.monotonic() + _REFUSED

    def ask() -> None:
        while True:
            status = _ask(where, costly, next(numbers))
            with lock:
                answers[status] = answers.get(status, 0) + 1
            if stop.is_set() and (200 in answers or time.monotonic() > end):
                return

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    await_end(*threads, patience=2 * _SILENCE)
    results.put(answers)


def _ask(where: tuple[str, str, str], costly: Costly, number: int) -> int:
    endpoint, access_key, secret_key = where
    address = urlsplit(endpoint).netloc
    target = costly.target.replace("{n}", str(number))
    path, _, query = target.partition("?")
    digest = hashlib.sha256(costly.body).hexdigest()
    headers = {"host": address, **costly.headers}
    headers |= sign(
        RequestHead(costly.method, path, query, headers),
        Credential(access_key, secret_key),
        region="us-east-1",
        timestamp=int(time.time()),
        payload_hash=digest,
    )
    with closing(http.client.HTTPConnection(address, timeout=_SILENCE)) as connection:
        try:
            connection.request(costly.method, target, costly.body, headers)
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            return 0
        return answer.status

"""The store side: fills the servers, then reads each in turn, round by round.

Invariant: contenders take turns (`bench.interleave`).
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from bench import fill_and_check
from bench.bulk_fill import stock
from bench.interleave import turns
from bench.load_generator import Load, run
from bench.presigned_requests import Request
from bench.processes import cpu_seconds
from bench.results import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from bench.rows import Row, Scale
    from bench.servers import Server

LIST_PAGES = 100


def keys_of(row: Row) -> list[str]:
    """The row's keys: eight digits under the row's name."""
    return [f"{row.name}/{number:08d}" for number in range(row.keys)]


def bucket_of(row: Row) -> str:
    """Listed keys lie in a bucket of their own: the row is about how many it has."""
    return f"listed-{row.keys}" if row.verb == "LIST" else fill_and_check.BUCKET


def _get_requests(row: Row) -> tuple[Request, ...]:
    return tuple(Request("GET", fill_and_check.path_of(key)) for key in keys_of(row))


def _put_requests(row: Row, body: bytes) -> tuple[Request, ...]:
    sample = fill_and_check.put_request("x", body, signed_body=not row.by_bytes)
    paths = (fill_and_check.path_of(key) for key in keys_of(row))
    return tuple(Request("PUT", path, length=row.size, payload_hash=sample.payload_hash) for path in paths)


def _list_requests(row: Row) -> tuple[Request, ...]:
    """Pages of 1,000 that begin at many places of the bucket."""
    step = max(1, row.keys // LIST_PAGES)
    query = (("list-type", "2"), ("max-keys", "1000"))
    starts = range(0, max(1, row.keys - 1000), step)
    # the canonical query is sorted by name, and so is this one
    return tuple(
        Request("GET", f"/{bucket_of(row)}", (*query, ("start-after", key_before(start)))) for start in starts
    )


def key_of(number: int) -> str:
    """A listed key."""
    return f"photos/{number:08d}.jpg"


def key_before(number: int) -> str:
    """What sorts just before the listed key of that number."""
    return f"{key_of(number)[:-4]}."


def requests_of(row: Row, body: bytes) -> tuple[Request, ...]:
    """What the generator replays for the row."""
    if row.verb == "LIST":
        return _list_requests(row)
    return _put_requests(row, body) if row.verb == "PUT" else _get_requests(row)


def prepare(row: Row, server: Server, body: bytes, say: Callable[[str], None]) -> None:
    """Fill and look: raises AnswerError when the server does not do what the row times."""
    fill_and_check.make_bucket(server, bucket_of(row))
    if row.verb == "LIST":
        _prepare_listed(row, server, say)
        return
    if row.verb == "PUT":
        fill_and_check.check_put(server, f"{row.name}/00000000", body, signed_body=not row.by_bytes)
        return
    fill_and_check.fill(server, keys_of(row), body)
    fill_and_check.check_get(server, keys_of(row)[-1], body)
    fill_and_check.check_refusal(server, keys_of(row)[-1])


def _prepare_listed(row: Row, server: Server, say: Callable[[str], None]) -> None:
    """Fill the bucket unless an earlier run did; the first and the last page must be as they should."""
    requests = _list_requests(row)
    whole = min(1000, row.keys)
    answer = fill_and_check.ask(server, Request("GET", f"/{bucket_of(row)}", _last_page(row)))
    if answer.body.count(b"<Contents>") != whole:
        paths = [f"/{bucket_of(row)}/{key_of(number)}" for number in range(row.keys)]
        stock(server, paths, lambda done: say(f"{row.name}: {done:,} keys put into {server.name}"))
    for request in (requests[0], Request("GET", f"/{bucket_of(row)}", _last_page(row))):
        answer = fill_and_check.ask(server, request)
        count = answer.body.count(b"<Contents>")
        if answer.status != 200 or count != whole:
            raise fill_and_check.AnswerError(f"{server.name}: LIST gave {answer.status}, {count} keys")


def _last_page(row: Row) -> tuple[tuple[str, str], ...]:
    before = key_before(max(0, row.keys - 1000))
    return (("list-type", "2"), ("max-keys", "1000"), ("start-after", before))


def take(row: Row, server: Server, load: Load, scratch: Path, number: int) -> Figure:
    """One reading; errors and short answers make it invalid. `cpu_us`: microseconds of all processes of the
    server for a request, those of the load generator not among them."""
    before = cpu_seconds(server.child.process.pid)
    reading = run(load, server.host, server.account, scratch)
    used = cpu_seconds(server.child.process.pid) - before
    problem = ""
    if reading.errors:
        problem = f"{reading.errors} of {reading.requests} requests failed"
    elif not reading.requests:
        problem = "no request was answered"
    elif row.verb == "GET" and reading.bytes < reading.requests * row.size:
        problem = "answers shorter than the objects"
    metrics = {
        **asdict(reading),
        "rate": reading.rate,
        "gigabytes": reading.rate * row.size / 1e9,
        "cpu_us": 1e6 * used / max(1, reading.requests),
    }
    return Figure(server.name, number, metrics, problem)


def measure(
    row: Row, servers: Mapping[str, Server], scale: Scale, scratch: Path, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Fill, warm up and read the row on all its servers; one that cannot be filled keeps a Figure saying
    why.
    """
    body = fill_and_check.pattern(row.size)
    file = scratch / "body.bin"
    file.write_bytes(body)
    ready: dict[str, Server] = {}
    for name in (name for name in row.servers if name in servers):
        say(f"{row.name}: filling {name}")
        try:
            prepare(row, servers[name], body, say)
        except (OSError, fill_and_check.AnswerError) as error:
            yield Figure(name, 0, {}, str(error))
        else:
            ready[name] = servers[name]
    load = Load(requests_of(row, body), row.connections, scale.seconds, file if row.verb == "PUT" else None)
    for server in ready.values():
        run(replace(load, seconds=1), server.host, server.account, scratch)
    for number, name in turns(row.name, ready, scale.rounds, say):
        yield take(row, ready[name], load, scratch, number)

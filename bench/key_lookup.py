"""Whether the time of a refusal tells which access keys exist: `python -m bench.key_lookup`.

Law: one connection, one request at a time, the kinds of request shuffled in every round, so that whatever
else the machine does falls on all of them alike. Each request is signed beforehand, with a wrong secret.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from bench.interleave import random_order
from meshwire.s3.request_head import RequestHead
from meshwire.sigv4 import Credential, sign
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KNOWN, DISABLED, UNKNOWN, AGAIN = "known", "disabled", "unknown", "unknown, another"
_CODES: Final = {KNOWN: b"SignatureDoesNotMatch"}
_RESAMPLES: Final = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5000)
    rounds = parser.parse_args().rounds
    with Daemon.start() as daemon:
        took = _measure(daemon, _keys(daemon), rounds)
    for name, times in took.items():
        low, middle, high = statistics.quantiles(times, n=4)
        print(f"{name:18} median {middle:7.1f} us   quartiles {low:7.1f} to {high:7.1f} us")
    for name in (DISABLED, UNKNOWN, AGAIN):
        least, most = _difference(took[name], took[UNKNOWN if name == AGAIN else KNOWN])
        other = UNKNOWN if name == AGAIN else KNOWN
        print(f"{name} - {other}: {least:+.1f} to {most:+.1f} us (95 % of {_RESAMPLES} resamples)")


def _keys(daemon: Daemon) -> dict[str, str]:
    """An access key of each kind; they are equally long."""
    found = {KNOWN: "K" * 20, DISABLED: "D" * 20, UNKNOWN: "U" * 20, AGAIN: "V" * 20}
    daemon.request("POST", "/-/admin/users", b'{"user_id": "ann"}')
    for name in (KNOWN, DISABLED):
        wanted = {"user_id": "ann", "access_key": found[name], "secret_key": "a-secret-of-anns"}
        assert daemon.request("POST", "/-/admin/keys", json.dumps(wanted).encode()).status == 201
    answer = daemon.request("PATCH", f"/-/admin/keys/{found[DISABLED]}", b'{"enabled": false}')
    assert answer.status == 200, answer
    return found


def _measure(daemon: Daemon, keys: Mapping[str, str], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each request, by kind."""
    took: dict[str, list[float]] = {name: [] for name in keys}
    where = urlsplit(daemon.endpoint)
    with socket.create_connection((str(where.hostname), where.port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(rounds):
            requests = [(name, _request(where.netloc, keys[name])) for name in random_order(keys)]
            for name, request in requests:
                begun = time.perf_counter_ns()
                answer = _exchange(sock, request)
                elapsed = (time.perf_counter_ns() - begun) / 1000
                assert _CODES.get(name, b"InvalidAccessKeyId") in answer, answer
                if number >= rounds // 20:
                    took[name].append(elapsed)
    return took


def _request(host: str, access_key: str) -> bytes:
    head = RequestHead("GET", "/bucket/key", "", {"host": host})
    wrong = Credential(access_key, f"{random.random()}", None)
    added = sign(head, wrong, region="us-east-1", timestamp=int(time.time()), payload_hash="UNSIGNED-PAYLOAD")
    lines = [f"{name}: {value}" for name, value in {**head.headers, **added}.items()]
    return "\r\n".join(["GET /bucket/key HTTP/1.1", *lines, "", ""]).encode()


def _exchange(sock: socket.socket, request: bytes) -> bytes:
    sock.sendall(request)
    answer = b""
    while not answer.endswith(b"</Error>"):
        answer += sock.recv(1 << 16)
    return answer


def _difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Between which bounds the difference of the medians lies, by resampling."""
    found = sorted(
        statistics.median(random.choices(first, k=len(first)))
        - statistics.median(random.choices(second, k=len(second)))
        for _ in range(_RESAMPLES)
    )
    return found[_RESAMPLES // 40], found[-_RESAMPLES // 40]


if __name__ == "__main__":
    main()

"""Ordinary S3 clients that work on a mesh and write down what they saw.

Law: boto3 as anybody sets it up, standard retries; a list of endpoints stands for the load balancer that
people put before a mesh: who is refused a connection asks the next one. What must not be sent twice
(If-Match, If-None-Match) is not retried. Invariant: bytes are made of a value's name alone, so that every
byte read is checked.
"""

from __future__ import annotations

import random
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ResponseStreamingError,
)

from meshd.util.clock import SystemClock
from tests.faults.history import ABSENT, History, Listing, Read, Write
from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.faults.history import Outcome

T = TypeVar("T")

BUCKET: Final = "proof"
SIZES: Final = (0, 9, 700, 9_000, 120_000, 1_300_000)
PART: Final = 5 << 20
LONGEST: Final = 150.0
"""Seconds an operation may take that met with a fault: a silent answer is waited for, and asked for again."""
_AT_ONCE: Final = 48  # threads that share a client
_BODIES: Final = 5  # reads of one body
_PAUSE: Final = 0.1  # between two operations: what nodes do about a fault needs the machine, too
CONDITIONAL: Final = ("chains", "firsts")
_clock = SystemClock()


def now() -> float:
    """Seconds that only rise, alike in all threads."""
    return _clock.monotonic()


def content(value: str) -> bytes:
    """The bytes a value's name stands for: the name, then noise made of it; `-multi` has two parts, `-small`
    less than a kilobyte."""
    chance = random.Random(value)
    size = PART + 70_000 if value.endswith("-multi") else chance.choice(SIZES)
    if value.endswith("-small"):
        size = chance.randrange(900)
    return value.encode() + b"\n" + chance.randbytes(size)


def named(data: bytes) -> str:
    """The value these bytes are; if they are nobody's, a sentence."""
    name = data.partition(b"\n")[0].decode(errors="replace")
    if data == content(name):
        return name
    return f"{len(data)} bytes that begin as {name[:60]!r} and are not that value's"


class Client:
    """One client. `errors` has every error that an ordinary program would have seen; `tag` begins the names
    that it shares with others."""

    def __init__(
        self, name: str, endpoints: Sequence[str], keys: tuple[str, str], seed: int, tag: str = ""
    ) -> None:
        self.name, self._tag, self.history, self.errors = name, tag, History(), list[str]()
        self._chance, self._turn, self._serial = random.Random(seed), 0, 0
        self._plain = [connect(endpoint, keys, attempts=6) for endpoint in endpoints]
        self._once = [connect(endpoint, keys, attempts=1) for endpoint in endpoints]
        self._generation: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Client {self.name} {self.history.counts()}>"

    def work(self, stop: threading.Event) -> None:
        """One operation after the other until told to stop."""
        kinds = [self.put] * 6 + [self.read] * 6 + [self.delete, self.listing, self.chain, self.first]
        while not stop.wait(_PAUSE):
            self._chance.choice(kinds)()

    # operations

    def put(self) -> None:
        """Puts a new value under a key of this client's."""
        key, value = self._own_key(), self._value()
        if self._chance.random() < 0.04:
            self._write(key, f"{value}-multi", lambda s3: _multipart(s3, key, f"{value}-multi"))
            return
        self._write(key, value, lambda s3: s3.put_object(Bucket=BUCKET, Key=key, Body=content(value)))

    def delete(self) -> None:
        """Deletes a key of this client's."""
        key = self._own_key()
        self._write(key, ABSENT, lambda s3: s3.delete_object(Bucket=BUCKET, Key=key))

    def read(self) -> None:
        """Reads a key, mostly of this client's."""
        key, began = self._own_key(), now()
        value = self._ask(self._plain, lambda s3: read_value(s3, key))
        if value is not None:
            self.history.reads.append(Read(key, value, began, now()))

    def listing(self) -> None:
        """Lists all that this client has written."""
        prefix, began = f"{self.name}/", now()
        keys = self._ask(self._plain, lambda s3: list_keys(s3, prefix))
        if keys is not None:
            self.history.listings.append(Listing(prefix, frozenset(keys), began, now()))

    def chain(self) -> None:
        """Appends to a value that all clients append to, if it is still what was read."""
        key, name = f"chains/{self._tag}{self._chance.randrange(3)}", self._value()
        found = self._ask(self._plain, lambda s3: _read_chain(s3, key))
        if found is None:
            return
        present, etag = found
        condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
        body = ",".join(filter(None, [present, name])).encode()
        began = now()
        outcome = attempted(
            self._once[self._next()], lambda s3: s3.put_object(Bucket=BUCKET, Key=key, Body=body, **condition)
        )
        self.history.chains.append(Write(key, name, began, now(), outcome))

    def first(self) -> None:
        """Makes a key that others make at the same time."""
        key, value = f"firsts/{self._tag}{self._chance.randrange(400)}", self._value()
        began = now()
        outcome = attempted(
            self._once[self._next()],
            lambda s3: s3.put_object(Bucket=BUCKET, Key=key, Body=content(value), IfNoneMatch="*"),
        )
        self.history.firsts.append(Write(key, value, began, now(), outcome))

    # how

    def _own_key(self) -> str:
        number = self._chance.randrange(12)
        return f"{self.name}/{number}-{self._generation.get(number, 0)}"

    def _value(self) -> str:
        self._serial += 1
        return f"{self.name}-{self._serial}"

    def _next(self) -> int:
        self._turn += 1
        return self._turn % len(self._plain)

    def _write(self, key: str, value: str, call: Callable[[Any], Any]) -> None:
        began = now()
        answer = self._ask(self._plain, call)
        outcome: Outcome = "unknown" if answer is None else "done"
        self.history.writes.append(Write(key, value, began, now(), outcome))
        # Never written again: see tests.faults.history. A try that got no answer may take place after the
        # one that did.
        if answer is None or answer["ResponseMetadata"]["RetryAttempts"]:
            number = int(key.partition("/")[2].partition("-")[0])
            self._generation[number] = self._generation.get(number, 0) + 1

    def _ask(self, connections: Sequence[Any], call: Callable[[Any], T]) -> T | None:
        """The answer of the first endpoint that takes the connection; None, noted, after an error."""
        start, began = self._next(), now()
        for step in range(len(connections)):
            try:
                return call(connections[(start + step) % len(connections)])
            except (EndpointConnectionError, ConnectTimeoutError) as error:
                refused: Exception = error
            except (BotoCoreError, ClientError) as error:
                refused = error
                break
        when = f"{self.name} from {began:.1f} to {now():.1f}"
        self.errors.append(f"{when}: {type(refused).__name__}: {refused}"[:400])
        return None


def attempted(s3: Any, call: Callable[[Any], Any]) -> Outcome:
    """What became of a write that is sent once."""
    try:
        call(s3)
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        return "refused" if status < 500 else "unknown"
    except (EndpointConnectionError, ConnectTimeoutError):
        return "refused"
    except BotoCoreError:
        return "unknown"
    return "done"


def read_value(s3: Any, key: str) -> str:
    """The name of what is there. A body that breaks off is read again, as boto3's own transfers do."""
    for left in reversed(range(_BODIES)):
        try:
            return named(s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        except ResponseStreamingError:
            if not left:
                raise
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return ABSENT
            raise
    raise AssertionError(key)


def list_keys(s3: Any, prefix: str) -> list[str]:
    """Every key of a prefix, by small pages."""
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket=BUCKET, Prefix=prefix, PaginationConfig={"PageSize": 7}
    )
    return [entry["Key"] for page in pages for entry in page.get("Contents", ())]


def _read_chain(s3: Any, key: str) -> tuple[str, str]:
    try:
        answer = s3.get_object(Bucket=BUCKET, Key=key)
    except ClientError as error:
        if error.response["Error"]["Code"] == "NoSuchKey":
            return "", ""
        raise
    return answer["Body"].read().decode(), answer["ETag"]


def _multipart(s3: Any, key: str, value: str) -> dict[str, Any]:
    data = content(value)
    upload = s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    parts = []
    for number, start in enumerate(range(0, len(data), PART), 1):
        answer = s3.upload_part(
            Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=number, Body=data[start : start + PART]
        )
        parts.append({"PartNumber": number, "ETag": answer["ETag"]})
    try:
        done: dict[str, Any] = s3.complete_multipart_upload(
            Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
        )
    except ClientError as error:  # completed by an attempt whose answer was lost
        if error.response["Error"]["Code"] != "NoSuchUpload" or read_value(s3, key) != value:
            raise
        done = dict(error.response)
    return done


@cache
def connect(endpoint: str, keys: tuple[str, str], attempts: int, patience: float = 40) -> Any:
    """A boto3 client that waits `patience` seconds for an answer, and asks so often. Clients of the same kind
    share one, for making one takes longer than a hundred requests."""
    config = Config(
        retries={"mode": "standard", "total_max_attempts": attempts},
        connect_timeout=min(3, patience),
        read_timeout=patience,
        max_pool_connections=_AT_ONCE,
        s3={"addressing_style": "path"},
    )
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=keys[0],
        aws_secret_access_key=keys[1],
        region_name="us-east-1",
        config=config,
    )


class Crowd:
    """Clients at work in threads, between `start` and `stop`."""

    def __init__(self, endpoints: Sequence[str], keys: tuple[str, str], seed: int, size: int = 4) -> None:
        names = [f"c{seed}.{n}" for n in range(size)]
        self.clients = [
            Client(name, endpoints, keys, seed * 1000 + n, f"{seed}.") for n, name in enumerate(names)
        ]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=c.work, args=(self._stop,)) for c in self.clients]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> History:
        """Everybody's history, once everybody's last operation has ended."""
        self._stop.set()
        for thread in self._threads:
            await_end(thread, patience=LONGEST)
        history = History()
        for client in self.clients:
            history.merge(client.history)
        return history

    def done(self, kind: str) -> int:
        """How many writes of a kind (a list of History's) were acknowledged till now."""
        histories = [client.history for client in self.clients]
        return sum(write.outcome == "done" for one in histories for write in list(getattr(one, kind)))

    @property
    def errors(self) -> list[str]:
        return [error for client in self.clients for error in client.errors]


def final_values(endpoint: str, keys: tuple[str, str], history: History) -> dict[str, str]:
    """What every key of a history is, by this endpoint."""
    s3 = connect(endpoint, keys, attempts=8)
    plain = {write.key for write in history.writes} | {write.key for write in history.firsts}
    values = {key: _or_error(lambda key=key: read_value(s3, key)) for key in sorted(plain)}  # type: ignore[misc]  # called at once
    chains = sorted({write.key for write in history.chains})
    return values | {key: _or_error(lambda key=key: _read_chain(s3, key)[0]) for key in chains}  # type: ignore[misc]  # called at once


def _or_error(read: Callable[[], str]) -> str:
    """What cannot be read at the end is no value that anybody wrote."""
    try:
        return read()
    except (BotoCoreError, ClientError) as error:
        return f"{type(error).__name__}: {error}"

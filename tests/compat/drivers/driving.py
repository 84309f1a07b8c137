"""What every driver of the compatibility suite is: a program that does one thing a line.

Law: standard library only, as drivers run in environments of their own. A line in is
`{"do": verb, "with": {…}}`; a line out is `{"gave": …}`, `{"cannot": why}` (the client has no such call) or
`{"failed": text}`. Bytes travel in files, named by path. A driver is a subclass of `Driver` with the verbs
its client has; which there are, and what they take and give, is written here once.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

MIB = 1 << 20
PART = 5 * MIB


class CannotError(Exception):
    """The client has no call for what was asked. The message says what is in the way."""


class FailedError(Exception):
    """A command-line client ended with an error."""


@dataclass(frozen=True)
class Endpoint:
    """Where the server is. `ca` is the PEM file to trust, empty over plain HTTP; `scratch` is empty."""

    url: str
    access_key: str
    secret_key: str
    region: str
    ca: str
    scratch: str

    @property
    def host(self) -> str:
        """Host and port."""
        return self.url.partition("://")[2]

    @property
    def secure(self) -> bool:
        return self.url.startswith("https:")

    def environment(self) -> dict[str, str]:
        """For a command: the names that most S3 programs read, and nothing of this process's."""
        given = {
            "PATH": os.environ["PATH"],
            "HOME": self.scratch,
            "LANG": "C.UTF-8",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        given |= {name: os.environ[name] for name in ("GOGC", "GOMAXPROCS") if name in os.environ}
        return given | ({"SSL_CERT_FILE": self.ca, "AWS_CA_BUNDLE": self.ca} if self.ca else {})


class Driver:
    """The verbs. One that is not overridden is a call that the client does not have.

    `path` is a file to read, or to write for `get` and `read_range`; `end` of a range is exclusive.
    `checksums` is what `put` takes as `checksum`. `missing` says why a verb is not there, where there is
    more to say.
    """

    name = ""
    checksums: tuple[str, ...] = ()
    missing: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def _no(self, verb: str) -> NoReturn:
        raise CannotError(self.missing.get(verb, "the client has no call for it"))

    def only_bytes(self, *more: object) -> None:
        """For a `put` that takes nothing but bytes."""
        if any(more):
            raise CannotError("it stores bytes, with nothing beside them")

    def version(self) -> str:
        raise NotImplementedError

    def make_bucket(self, bucket: str) -> None:
        self._no("make_bucket")

    def remove_bucket(self, bucket: str) -> None:
        self._no("remove_bucket")

    def list_buckets(self) -> list[str]:
        self._no("list_buckets")

    def put(
        self,
        bucket: str,
        key: str,
        path: str,
        metadata: dict[str, str] | None = None,
        content_type: str | None = None,
        checksum: str | None = None,
    ) -> None:
        self._no("put")

    def put_large(self, bucket: str, key: str, path: str) -> None:
        """A file above 16 MiB, in parts."""
        self._no("put_large")

    def put_stream(self, bucket: str, key: str, path: str) -> None:
        """The file's bytes, from something that neither seeks nor knows its length."""
        self._no("put_stream")

    def get(self, bucket: str, key: str, path: str) -> None:
        self._no("get")

    def read_range(self, bucket: str, key: str, start: int, end: int, path: str) -> None:
        self._no("read_range")

    def head(self, bucket: str, key: str) -> dict[str, Any]:
        """Of `size`, `metadata`, `content_type`, `etag` (without quotes) what the client shows."""
        self._no("head")

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        """`keys` and `prefixes`, of all pages."""
        self._no("listing")

    def copy(self, bucket: str, key: str, target: str) -> None:
        self._no("copy")

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        self._no("delete_many")

    def presign_get(self, bucket: str, key: str) -> str:
        self._no("presign_get")

    def presign_put(self, bucket: str, key: str) -> str:
        self._no("presign_put")

    def presign_part(self, bucket: str, key: str, upload: str, number: int) -> str:
        self._no("presign_part")

    def put_if_absent(self, bucket: str, key: str, path: str) -> bool:
        """Whether it was written."""
        self._no("put_if_absent")

    def put_if_match(self, bucket: str, key: str, path: str, etag: str) -> bool:
        self._no("put_if_match")

    def sync_up(self, folder: str, bucket: str, prefix: str) -> int | None:
        """How many files were sent, where the client tells."""
        self._no("sync_up")

    def sync_down(self, bucket: str, prefix: str, folder: str) -> None:
        self._no("sync_down")

    def own_work(self, bucket: str, prefix: str) -> str:
        """What the client is there for, written, read back and compared by the driver; says what that was."""
        self._no("own_work")

    def run(
        self,
        *command: str,
        environment: dict[str, str] | None = None,
        stdin: bytes | None = None,
        stdout: str | None = None,
    ) -> str:
        """Runs a command-line client, its output to the file `stdout` or returned. Raises FailedError."""
        with Path(stdout or os.devnull).open("wb") as out:
            done = subprocess.run(
                command,
                env=self.endpoint.environment() | (environment or {}),
                cwd=self.endpoint.scratch,
                input=b"" if stdin is None else stdin,
                stdout=out if stdout else subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=100,
                check=False,
            )
        if done.returncode:
            raise FailedError(f"{command[0]} {done.returncode}: {done.stderr.decode(errors='replace')}")
        return "" if stdout else done.stdout.decode()

    def beside_python(self, name: str) -> str:
        """The path of a command installed in this environment."""
        return str(Path(sys.executable).with_name(name))


class OneWay(io.RawIOBase):
    """A file that cannot seek and does not know its length, as a pipe."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(memoryview(buffer)[:70_001]) or 0

    def close(self) -> None:
        self._file.close()
        super().close()


def serve(kind: type[Driver]) -> None:
    """Answers the lines of standard input until it ends. What the client prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    driver: Driver | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if driver is None:
            driver = kind(Endpoint(**asked["with"]))
            answer: dict[str, Any] = {"gave": {"version": driver.version(), "checksums": driver.checksums}}
        else:
            answer = _answer(driver, asked)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(driver: Driver, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"gave": getattr(driver, asked["do"])(**asked["with"])}
    except CannotError as error:
        return {"cannot": str(error)}
    except BaseException as error:
        return {"failed": f"{type(error).__name__}: {error}"[-4000:]}

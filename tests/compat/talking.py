"""A client under test: its driver as a process, asked one thing at a time.

Law: knows no S3 and no client; ends the process it started. Invariant: that a client failed is raised with
the client's own words.
"""

from __future__ import annotations

import json
import select
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

DRIVERS = Path(__file__).with_name("drivers")
PATIENCE_S = 110.0


class ClientFailedError(AssertionError):
    """The client could not do what it was asked. Carries its message."""


class CannotError(Exception):
    """The client has no call for what was asked. Carries the reason."""


class Conversation:
    """`with Conversation(command, where) as client: client.ask("put", bucket=…)`."""

    def __init__(
        self, command: Sequence[str], where: Mapping[str, str], environment: Mapping[str, str], log: Path
    ) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=where["scratch"],
                env=dict(environment),
            )
        try:
            opened = self._exchange({"do": "open", "with": where})
        except BaseException:
            self.close()
            raise
        self.version = str(opened["version"])
        self.checksums = tuple(opened["checksums"])

    def __repr__(self) -> str:
        return f"<Conversation pid={self._process.pid}>"

    def ask(self, verb: str, **arguments: Any) -> Any:
        """What the client gives back. Raises ClientFailedError, CannotError."""
        return self._exchange({"do": verb, "with": arguments})

    def _exchange(self, asked: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
            raise ClientFailedError(f"{asked['do']}: no answer within {PATIENCE_S:.0f} s\n{self._said()}")
        line = self._process.stdout.readline()
        if not line:
            raise ClientFailedError(f"{asked['do']}: the driver ended\n{self._said()}")
        answer = json.loads(line)
        if "cannot" in answer:
            raise CannotError(answer["cannot"])
        if "failed" in answer:
            raise ClientFailedError(f"{asked['do']}: {answer['failed']}\n{self._said()}")
        return answer["gave"]

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End the driver; a client that does not end by itself is killed."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

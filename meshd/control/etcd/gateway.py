"""Client of etcd's JSON gateway over HTTP/1.1, with failover between members.

Law: a call that was not sent, or that is safe to repeat, goes to the next member until the deadline. A
call that may have been executed raises EtcdAmbiguousError and is never retried implicitly. Blocking:
for threads.

Source: etcd's documentation, "gRPC gateway" (v3.5): keys and values in base64, 64-bit numbers as text.
"""

from __future__ import annotations

import http.client
import json
import threading
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from meshd.control.control_api import ControlError
from meshd.control.http_connections import HttpConnections, NoAnswerError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Mapping

    from meshd.util.clock import Clock

_MOST_BYTES: Final = 64 << 20  # limit of one response
_ALARMS_SECONDS: Final = 5.0  # seconds for which a member's alarm state is cached
_UNAVAILABLE: Final = (
    "no leader",
    "leader changed",
    "not leader",
    "Unavailable",
    "connection refused",
    "stopped",
)


class EtcdError(ControlError):
    """etcd rejects a call, or no member answers in time."""


class EtcdAmbiguousError(EtcdError):
    """The call may or may not have been executed: no response arrived."""


class EtcdMember(NamedTuple):
    """Client address of a member of the etcd cluster."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Gateway:
    """Calls to the members of one etcd cluster; `close` ends its connections and open streams."""

    def __init__(
        self,
        members: tuple[EtcdMember, ...],
        clock: Clock,
        *,
        deadline: float = 5.0,
        tls: ssl.SSLContext | None = None,
        login: tuple[str, str] | None = None,
    ) -> None:
        if not members:
            raise ControlError("no etcd member is given; use etcd://HOST:PORT")
        self._members, self._clock, self._deadline = members, clock, deadline
        self._login, self._token = login, ""
        self._first = 0  # the member that answered last
        self._connections = [
            HttpConnections(host, port, timeout=deadline, max_bytes=_MOST_BYTES, tls=tls)
            for host, port in members
        ]
        self._alarms, self._asked = "", -_ALARMS_SECONDS

    def __repr__(self) -> str:
        return f"<Gateway of {', '.join(map(str, self._members))}>"

    def call(self, path: str, body: Mapping[str, Any], *, repeatable: bool) -> dict[str, Any]:
        """Returns the response to `POST /v3/PATH`. `repeatable`: executing it twice is the same as once.

        Raises EtcdError, EtcdAmbiguousError.
        """
        began, pause, last = self._clock.monotonic(), threading.Event(), ""
        while True:
            for turn in range(len(self._members)):
                number = (self._first + turn) % len(self._members)
                try:
                    answer = self._call_authorized(number, path, body)
                except NoAnswerError as error:
                    last = f"{self._members[number]}: {error.why}"
                    if error.sent and not repeatable:
                        raise EtcdAmbiguousError(
                            f"etcd did not confirm whether it executed the call ({last}); check the state "
                            "before repeating it"
                        ) from None
                    continue
                self._first = number
                return answer
            if self._clock.monotonic() - began >= self._deadline:
                raise EtcdError(f"no etcd member answers ({last}); is etcd running and reachable from here?")
            pause.wait(0.1)

    def stream(self, path: str, body: Mapping[str, Any], idle: float) -> Iterator[dict[str, Any]]:
        """Yields the messages of a streaming call until a member ends it or is silent for `idle` seconds;
        then the last message is empty. Raises EtcdError if it cannot start."""
        for turn in range(len(self._members)):
            number = (self._first + turn) % len(self._members)
            connections = self._connections[number]
            try:
                with connections.stream(
                    "POST", f"/v3/{path}", json.dumps(body).encode(), self._headers(), idle
                ) as response:
                    if response is None:
                        return
                    if response.status == 200:
                        self._first = number
                        yield from _messages(response)
                        return
            except (OSError, http.client.HTTPException, NoAnswerError):
                continue
        raise EtcdError("no etcd member answers")

    def check_alarms(self) -> None:
        """Raises EtcdError while an alarm (such as a full database) makes etcd reject every write, although
        it still serves reads and extends leases. Asks a member every few seconds."""
        now = self._clock.monotonic()
        if now - self._asked >= _ALARMS_SECONDS:
            errors = self.call("maintenance/status", {}, repeatable=True).get("errors") or []
            found = {word for each in errors for word in str(each).split() if word.startswith("alarm:")}
            self._alarms, self._asked = ", ".join(sorted(found)), now
        if self._alarms:
            raise EtcdError(
                f"etcd rejects writes ({self._alarms}): free space in it (compact, defragment), then run "
                "`etcdctl alarm disarm`"
            )

    def close(self) -> None:
        """Closes the connections. Idempotent. A stream that another thread reads ends soon."""
        for connections in self._connections:
            connections.close()

    def _call_authorized(self, number: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._login is not None and not self._token:
            self._token = self._log_in(number)
        try:
            return self._call_member(number, path, body)
        except EtcdError as error:
            if self._login is None or "invalid auth token" not in str(error):
                raise
            self._token = self._log_in(number)
            return self._call_member(number, path, body)

    def _log_in(self, number: int) -> str:
        assert self._login is not None
        name, password = self._login
        try:
            answer = self._call_member(number, "auth/authenticate", {"name": name, "password": password})
        except EtcdError:
            raise EtcdError(f"etcd rejects the user {name!r}; check the name and the password") from None
        return str(answer.get("token", ""))

    def _call_member(self, number: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        connections, document = self._connections[number], json.dumps(body).encode()
        return _answer(*connections.request("POST", f"/v3/{path}", document, self._headers()))

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Grpc-Metadata-Hasleader": "true"}
        return headers | ({"Authorization": self._token} if self._token else {})


def _answer(status: int, data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        raise NoAnswerError(f"answered {status} without valid JSON", sent=True) from None
    if not isinstance(document, dict):
        raise NoAnswerError(f"answered {status} without a JSON object", sent=True)
    if status == 200:
        return document
    message = str(document.get("message") or document.get("error") or f"status {status}")
    if any(word in message for word in _UNAVAILABLE):
        raise NoAnswerError(message, sent="changed" in message)
    if "timed out" in message or "deadline" in message:
        raise NoAnswerError(message, sent=True)
    raise EtcdError(f"etcd rejects the call: {message}")


def _messages(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yields one message per line. Ends silently when the connection ends; the last message is empty after a
    timeout."""
    while True:
        try:
            line = response.readline()
        except TimeoutError:
            yield {}
            return
        except (OSError, http.client.HTTPException, ValueError):
            return
        if not line.strip():
            if not line:
                return
            continue
        try:
            message = json.loads(line)
        except ValueError:
            return
        if not isinstance(message, dict) or "result" not in message:
            return
        yield message["result"]


def encoded(data: bytes) -> str:
    """Encodes bytes as the gateway expects them."""
    return b64encode(data).decode()


def decoded(text: str | None) -> bytes:
    """Decodes bytes from the gateway; an omitted field stands for no bytes."""
    return b64decode(text) if text else b""


def number(value: str | int | None) -> int:
    """Decodes a 64-bit number from the gateway."""
    return int(value) if value else 0

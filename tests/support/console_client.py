"""A browser's requests to the console, by hand: a cookie, the page's token, and headers of a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from tests.support.daemons import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.daemons import Daemon

PREFIX = "/-/console"


class ConsoleClient:
    """`client.sign_in()` and then `client.api("GET", "/bucket/key")`. `cookie` and `csrf` may be changed."""

    def __init__(self, endpoint: str, access_key: str, secret_key: str) -> None:
        self._where, self._pair = urlsplit(endpoint), (access_key, secret_key)
        self.cookie = self.csrf = ""

    @classmethod
    def of(cls, daemon: Daemon) -> Self:
        """A client that signs in with the root keys of a daemon."""
        return cls(daemon.endpoint, daemon.access_key, daemon.secret_key)

    def connect(self) -> http.client.HTTPConnection:
        """A connection to the node, not yet open."""
        return http.client.HTTPConnection(str(self._where.hostname), self._where.port, timeout=60)

    def send(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request with the cookie, if there is one."""
        told = {"Cookie": self.cookie} if self.cookie else {}
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, target, body or None, told | dict(headers or {}))
            found = connection.getresponse()
            return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())

    def sign_in(self, access_key: str = "", secret_key: str = "", token: str = "") -> Answer:
        """Sign in with the client's keys, or with others."""
        wanted = {
            "access_key": access_key or self._pair[0],
            "secret_key": secret_key or self._pair[1],
            "session_token": token,
        }
        kind = {"Content-Type": "application/json"}
        answer = self.send("POST", f"{PREFIX}/session", json.dumps(wanted).encode(), kind)
        if answer.status == 200:
            self.cookie = answer.headers["set-cookie"].partition(";")[0]
            self.csrf = json.loads(answer.body)["csrf"]
        return answer

    def api(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """A request of the page, with its token."""
        told = {"x-mesh-console": self.csrf, **(headers or {})}
        return self.send(method, f"{PREFIX}/api{target}", body, told)

    def json(self, method: str, target: str, document: Any = None) -> Any:
        """A request to a native API that must succeed; its document."""
        body = b"" if document is None else json.dumps(document).encode()
        answer = self.api(method, target, body)
        assert answer.status < 300, answer.body
        return json.loads(answer.body)


def message_of(answer: Answer) -> str:
    """The sentence of a native API's error."""
    found: str = json.loads(answer.body)["error"]["message"]
    return found

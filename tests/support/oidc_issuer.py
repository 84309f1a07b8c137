"""An OpenID Connect issuer on loopback, and tokens that it signs, or that somebody forged.

`documents` may be replaced path by path: by another document, or by a function that writes what it wants.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qsl, urlencode

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from ssl import SSLContext

    Responder = Callable[[BaseHTTPRequestHandler], None]

DISCOVERY, KEYS = "/.well-known/openid-configuration", "/keys"
AUDIENCE = "shardmesh.io"


class SigningKey:
    """A private key with its id and algorithm."""

    def __init__(self, key_id: str, algorithm: str = "RS256", *, bits: int = 2048) -> None:
        self.key_id, self.algorithm = key_id, algorithm
        curves = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1}
        self.private: Any = (
            ec.generate_private_key(curves[algorithm]())
            if algorithm in curves
            else rsa.generate_private_key(public_exponent=65537, key_size=bits)
        )

    def public_document(self, **more: Any) -> dict[str, Any]:
        """Its JWK, as an issuer publishes it."""
        algorithm = jwt.get_algorithm_by_name(self.algorithm)
        found: dict[str, Any] = json.loads(algorithm.to_jwk(self.private.public_key()))
        return {**found, "kid": self.key_id, "use": "sig", "alg": self.algorithm, **more}

    def sign(self, claims: Mapping[str, Any], **headers: Any) -> str:
        """A token with these claims; a header that is None is left out."""
        head = {"alg": self.algorithm, "typ": "JWT", "kid": self.key_id, **headers}
        return self.sign_text(
            json.dumps({n: v for n, v in head.items() if v is not None}), json.dumps(claims)
        )

    def sign_text(self, header: str, payload: str) -> str:
        """A token with this header and payload, byte for byte."""
        signed = f"{encoded(header.encode())}.{encoded(payload.encode())}"
        signature = jwt.get_algorithm_by_name(self.algorithm).sign(signed.encode(), self.private)
        return f"{signed}.{encoded(signature)}"


def encoded(data: bytes) -> str:
    """base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def key_set(*keys: SigningKey) -> str:
    """A JWKS document."""
    return json.dumps({"keys": [key.public_document() for key in keys]})


def claims(issuer: str, subject: str = "ann", *, lifetime: float = 600, **more: Any) -> dict[str, Any]:
    """Claims of a token that is valid now; one that is None is left out."""
    now = time.time()
    found = {
        "iss": issuer,
        "sub": subject,
        "aud": AUDIENCE,
        "iat": int(now),
        "exp": int(now + lifetime),
        **more,
    }
    return {name: value for name, value in found.items() if value is not None}


class OidcIssuer:
    """`with OidcIssuer() as issuer: issuer.token("ann")`. `asked`: the paths so far."""

    def __init__(self, tls: SSLContext | None = None) -> None:
        self.keys = [SigningKey("first")]
        self.documents: dict[str, Responder] = {}
        self.person = "ann"
        self.begun: dict[str, dict[str, str]] = {}
        self.asked: list[str] = []
        self.stopping = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.asked.append(self.path)
                with suppress(OSError):
                    owner.documents.get(self.path, owner.respond)(self)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                with suppress(OSError):
                    owner.exchange_code(self, dict(parse_qsl(body)))

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that does not trust it, or went away."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        await_end(self._thread)
        self._server.server_close()

    def token(self, subject: str = "ann", **more: Any) -> str:
        """A valid token, signed with the newest key."""
        return self.keys[-1].sign(claims(self.url, subject, **more))

    def authorize(self, handler: BaseHTTPRequestHandler, asked: dict[str, str]) -> None:
        """Sign `person` in at once, and send the browser back with a code."""
        code = secrets.token_urlsafe(8)
        self.begun[code] = asked
        back = f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"
        send(handler, "", status=302, headers={"Location": back})

    def exchange_code(self, handler: BaseHTTPRequestHandler, asked: dict[str, str]) -> None:
        """Answer an ID token for a code, once, to whom has the verifier."""
        begun = self.begun.pop(asked.get("code", ""), {})
        digest = hashlib.sha256(asked.get("code_verifier", "").encode()).digest()
        same = ("client_id", "redirect_uri")
        if begun.get("code_challenge") != encoded(digest) or any(begun[name] != asked[name] for name in same):
            send(handler, json.dumps({"error": "invalid_grant"}), status=400)
            return
        token = self.token(self.person, aud=begun["client_id"], nonce=begun["nonce"])
        send(handler, json.dumps({"id_token": token, "token_type": "Bearer"}))

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        """What an honest issuer answers."""
        if handler.path == DISCOVERY:
            document = {"issuer": self.url, "jwks_uri": self.url + KEYS}
            document |= {
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
            }
            send(handler, json.dumps(document))
        elif handler.path.startswith("/authorize?"):
            self.authorize(handler, dict(parse_qsl(handler.path.partition("?")[2])))
        elif handler.path == KEYS:
            send(handler, key_set(*self.keys))
        else:
            send(handler, "{}", status=404)


def send(
    handler: BaseHTTPRequestHandler, text: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """Answer with a document."""
    body = text.encode()
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)

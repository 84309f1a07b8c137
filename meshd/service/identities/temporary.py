"""Temporary credentials: made for whoever signs, recognised again by their token alone.

Law: they never have more than what they were made with, nor live longer: the parent key's policies and the
session's must each allow, and when the parent key goes, is disabled or changes, so do they; and when an
administrator ends them (`revoking`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshd.control.keypairs import new_access_key
from meshd.service.authorization.access import Identity, Session
from meshd.service.identities.errors import AdminError
from meshd.service.identities.grants import check_policy
from meshd.service.identities.tokens import Claims, TokenError, TokenSeal
from meshwire.policies import PolicyError, parse_policy
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from meshd.control.identities import IdentityTable, Signer
    from meshd.control.keyuse import KeyUse
    from meshd.control.nodesecret import NodeSecret
    from meshd.kit.clock import Clock
    from meshwire.policies import Policy

DEFAULT_SECONDS, MIN_SECONDS, MAX_SECONDS = 3600, 900, 36 * 3600
_MAX_POLICY_BYTES = 4 << 10
_NAME = re.compile(r"[\w+=,.@-]{0,64}", re.ASCII)
_KEPT = 256
_ENDED = (
    "The key these temporary credentials were made with is not valid, or they were revoked: ask for new ones."
)


class SessionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /-/sts`. `policy` is a policy document, as JSON or as text that holds it."""

    duration_seconds: int = DEFAULT_SECONDS
    policy: msgspec.Raw = msgspec.Raw()
    name: str = ""


class SessionDocument(msgspec.Struct, frozen=True, rename="pascal"):
    """The answer: what botocore expects of a `credential_process`."""

    access_key_id: str
    secret_access_key: str
    session_token: str
    expiration: str
    version: int = 1

    def __repr__(self) -> str:
        return f"SessionDocument(access_key_id={self.access_key_id!r}, expiration={self.expiration!r})"


class Known(NamedTuple):
    """Who an access key (with its token) stands for, and the secret that must have signed."""

    identity: Identity
    secret_key: str

    def __repr__(self) -> str:
        return f"Known({self.identity!r})"


@dataclass(frozen=True, slots=True)
class _Opened:
    claims: Claims
    secret_key: str
    policies: tuple[Policy, ...]


class Sessions:
    """Makes and recognises temporary credentials, and knows the permanent ones. One a process."""

    def __init__(self, table: IdentityTable, secret: NodeSecret, use: KeyUse, clock: Clock) -> None:
        self._table, self._use, self._clock, self._seal = table, use, clock, TokenSeal(secret)
        self._open = lru_cache(_KEPT)(self._read)  # a training pod shows the same one a million times
        self._known: dict[str, tuple[Signer, Known]] = {}

    def __repr__(self) -> str:
        return "<Sessions>"

    @property
    def tables(self) -> object:
        """The state of users, keys and policies: another object after each change."""
        return self._table.state

    def find(self, access_key: str, token: str | None) -> Known:
        """Who signs with `access_key`, and `token` if there is one. Raises S3Error InvalidAccessKeyId,
        InvalidToken, ExpiredToken.
        """
        if token is not None:
            return self._temporary(access_key, token)
        signer = self._table.find(access_key)
        if signer is None:
            raise S3Error("InvalidAccessKeyId", extra={"AWSAccessKeyId": access_key[:128]})
        kept = self._known.get(access_key)
        if kept is not None and kept[0] is signer:
            return kept[1]
        if len(self._known) >= _KEPT:
            self._known.clear()
        known = Known(Identity.of(signer), signer.key.secret_key)
        self._known[access_key] = signer, known
        return known

    def proved(self, identity: Identity) -> None:
        """The signature held: the key, or the one the temporary credentials were made with, was used."""
        self._use.note(identity.session.parent if identity.session else identity.access_key)

    def make(self, identity: Identity, wanted: SessionRequest) -> SessionDocument:
        """Temporary credentials of `identity`. One that is temporary itself gives what it has: its policies
        stay, and the end of its life. Raises AdminError BadRequest, InvalidPolicy, AccessDenied.
        """
        session = identity.session
        parent = self._table.find(session.parent if session else identity.access_key)
        if parent is None:
            raise AdminError("AccessDenied", "the key that signed this is no longer valid")
        now = self._clock.now_ms() // 1000
        issued = max(
            now, parent.sessions_from
        )  # by a clock that is behind the one of who revoked earlier ones
        expires = now + _duration(wanted.duration_seconds)
        policies = (*(session.policies if session else ()), *_policy_texts(bytes(wanted.policy)))
        if not _NAME.fullmatch(wanted.name):
            raise AdminError("BadRequest", "name has at most 64 letters, digits or _+=,.@-")
        claims = Claims(
            access_key=new_access_key("MSTS"),
            user_id=identity.user_id,
            parent=parent.key.access_key,
            mark=self._mark(parent),
            issued=issued,
            expires=min(expires, session.expires) if session else expires,
            name=wanted.name or (session.name if session else ""),
            policies=policies,
        )
        return self._document(claims)

    def _document(self, claims: Claims) -> SessionDocument:
        try:
            token = self._seal.write(claims)
        except TokenError as error:
            raise AdminError("InvalidPolicy", str(error), help="give a shorter policy") from None
        expiration = datetime.fromtimestamp(claims.expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return SessionDocument(claims.access_key, self._seal.secret_key(token), token, expiration)

    def _temporary(self, access_key: str, token: str) -> Known:
        opened = self._open(token)
        claims = opened.claims
        if claims.access_key != access_key:
            raise S3Error("InvalidToken", "The session token belongs to another access key.")
        if self._clock.now_ms() // 1000 >= claims.expires:
            raise S3Error("ExpiredToken")
        parent = self._table.find(claims.parent)
        if parent is None or parent.user.user_id != claims.user_id or self._mark(parent) != claims.mark:
            raise S3Error("InvalidToken", _ENDED)
        if claims.issued < parent.sessions_from:
            raise S3Error("InvalidToken", _ENDED)
        session = Session(
            claims.parent, claims.expires, claims.name, claims.policies, claims.issued, parent.rounds
        )
        identity = Identity.of(parent).during(session, access_key, opened.policies)
        return Known(identity, opened.secret_key)

    def _read(self, token: str) -> _Opened:
        try:
            claims = self._seal.read(token)
            policies = tuple(parse_policy(text, kind="identity") for text in claims.policies)
        except (TokenError, PolicyError):
            raise S3Error("InvalidToken") from None
        return _Opened(claims, self._seal.secret_key(token), policies)

    def _mark(self, parent: Signer) -> bytes:
        return self._seal.fingerprint(parent.key.access_key, parent.key.secret_key, parent.rounds)


def _duration(seconds: int) -> int:
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise AdminError(
            "BadRequest",
            f"duration_seconds is from {MIN_SECONDS} (15 minutes) to {MAX_SECONDS} (36 hours), not {seconds}",
        )
    return seconds


def _policy_texts(policy: bytes) -> tuple[str, ...]:
    """The policy, if there is one, without blanks: it travels in every request."""
    if policy in (b"", b"null"):
        return ()
    text = msgspec.json.decode(policy, type=str).encode() if policy.startswith(b'"') else policy
    return (msgspec.json.format(check_policy(text, _MAX_POLICY_BYTES), indent=-1),)

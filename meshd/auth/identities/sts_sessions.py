"""Temporary credentials: issue, verify and revoke STS sessions and their sealed tokens.

A session never has more permissions than the key that created it and never outlives it; that of a role (see
`meshd.auth.web_identity`) never has more than the role. The node stores nothing about issued sessions: the
token carries the claims under an HMAC, and the secret key is derived from the token. A token is parsed only
after its HMAC matches, and each token has one spelling. Revocation is recorded with the user or key and is
permanent; sessions issued afterwards work at once.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from meshd.auth.identities.admin_errors import (
    AdminError,
    iso_time,
    no_such_key,
    no_such_role,
    no_such_user,
)
from meshd.auth.identities.named_policies import check_policy
from meshd.auth.identity import Identity, Session
from meshd.control.identities import Key, User, new_access_key
from meshd.control.roles import ROLE_PREFIX, Revocation, Role
from meshwire.errors import S3Error
from meshwire.iam import PolicyError, parse_policy

if TYPE_CHECKING:
    from meshd.control.cluster_secret import ClusterSecret
    from meshd.control.identities import IdentityTable, KeyLastUsed, Signer
    from meshd.util.clock import Clock
    from meshwire.iam import Policy


_TOKEN_PREFIX = "mesht1."
_CODE_BYTES = 32
MAX_TOKEN = 12_000


class TokenError(ValueError):
    """The text is not a token of this mesh."""


class TokenClaims(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of a token. Times are in seconds since 1970. `parent` is the key that created it, or
    `role/NAME`; `mark` is its fingerprint at the time. Each of `policies` must allow an action, as must the
    parent's. `subject`: of a role's session, the subject of the token that was exchanged."""

    access_key: str
    user_id: str
    parent: str
    mark: bytes
    issued: int
    expires: int
    name: str = ""
    policies: tuple[str, ...] = ()
    subject: str = ""

    def encode(self) -> bytes:
        """Return the payload of a token. Without a subject it has the form that earlier releases read."""
        return msgspec.msgpack.encode(self if self.subject else msgspec.structs.astuple(self)[:-1])


class TokenSeal:
    """Writes and verifies session tokens."""

    def __init__(self, secret: ClusterSecret) -> None:
        self._secret = secret

    def seal(self, claims: TokenClaims) -> str:
        """Return the token for `claims`. Raises TokenError if it is longer than a header may be."""
        payload = claims.encode()
        token = _TOKEN_PREFIX + base64.urlsafe_b64encode(self._code(payload) + payload).rstrip(b"=").decode()
        if len(token) > MAX_TOKEN:
            raise TokenError(f"the token would have {len(token):,} characters; {MAX_TOKEN:,} are allowed")
        return token

    def unseal(self, token: str) -> TokenClaims:
        """Return the claims of a token. Raises TokenError for every text that `seal` did not write."""
        sealed = _token_bytes(token)
        code, payload = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(payload)):
            raise TokenError("the token is not from this mesh")
        try:
            return msgspec.msgpack.decode(payload, type=TokenClaims)
        except msgspec.DecodeError as error:
            raise TokenError("the token is from another version") from error

    def secret_key(self, token: str) -> str:
        """Return the secret key that belongs to a token."""
        derived = hmac.digest(self._secret.derive_key("session secret"), token.encode(), "sha256")
        return "mss-" + base64.urlsafe_b64encode(derived)[:40].decode()

    def fingerprint(self, access_key: str, secret_key: str, rounds: tuple[int, int] = (0, 0)) -> bytes:
        """Return a mark that differs for another key pair with the same access key, and that changes when the
        sessions of the key or of its user are revoked (`rounds` of the user and of the key)."""
        suffix = f"\0{rounds[0]}\0{rounds[1]}" if any(rounds) else ""
        text = f"{access_key}\0{secret_key}{suffix}".encode()
        return hmac.digest(self._secret.derive_key("session parent"), text, "sha256")[:16]

    def _code(self, payload: bytes) -> bytes:
        return hmac.digest(
            self._secret.derive_key("session token"), _TOKEN_PREFIX.encode() + payload, "sha256"
        )


def _token_bytes(token: str) -> bytes:
    """Decode a token's text. Raises TokenError unless it is the canonical spelling."""
    text = token.removeprefix(_TOKEN_PREFIX)
    if len(token) > MAX_TOKEN or not token.startswith(_TOKEN_PREFIX) or not text.isascii():
        raise TokenError("the text does not have the form of a token")
    try:
        sealed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise TokenError("the text does not have the form of a token") from error
    if base64.urlsafe_b64encode(sealed).rstrip(b"=").decode() != text:
        raise TokenError("the text does not have the form of a token")
    return sealed


DEFAULT_SECONDS, MIN_SECONDS, MAX_SECONDS = 3600, 900, 36 * 3600
_MAX_POLICY_BYTES = 4 << 10
_NAME = re.compile(r"[\w+=,.@-]{0,64}", re.ASCII)
_CACHE_ENTRIES = 256
_SESSION_REVOKED = (
    "These temporary credentials were revoked, or the key that created them is not valid: request new ones."
)


class SessionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /-/sts`. `policy` is a policy document, as JSON or as text that holds it."""

    duration_seconds: int = DEFAULT_SECONDS
    policy: msgspec.Raw = msgspec.Raw()
    name: str = ""


class SessionDocument(msgspec.Struct, frozen=True, rename="pascal"):
    """Response of `POST /-/sts`: the document that botocore expects of a `credential_process`."""

    access_key_id: str
    secret_access_key: str
    session_token: str
    expiration: str
    version: int = 1

    def __repr__(self) -> str:
        return f"SessionDocument(access_key_id={self.access_key_id!r}, expiration={self.expiration!r})"


class ResolvedCredential(NamedTuple):
    """The identity of an access key (with its token), and the secret key that must have signed."""

    identity: Identity
    secret_key: str

    def __repr__(self) -> str:
        return f"Known({self.identity!r})"


class _Opened(msgspec.Struct, frozen=True):
    claims: TokenClaims
    secret_key: str
    policies: tuple[Policy, ...]


class CredentialService:
    """Issues and verifies temporary credentials, and resolves permanent keys. One instance per process."""

    def __init__(self, table: IdentityTable, secret: ClusterSecret, use: KeyLastUsed, clock: Clock) -> None:
        self._table, self._use, self._clock, self._seal = table, use, clock, TokenSeal(secret)
        # A training pod shows the same one a million times.
        self._open = lru_cache(_CACHE_ENTRIES)(self._read)
        self._known: dict[str, tuple[Signer, ResolvedCredential]] = {}

    @property
    def table_state(self) -> object:
        """A token of the state of users, keys and policies: another object after each change."""
        return self._table.state_token

    def resolve(self, access_key: str, token: str | None) -> ResolvedCredential:
        """Return the identity that signs with `access_key`, and with `token` if there is one. Raises S3Error
        InvalidAccessKeyId, InvalidToken, ExpiredToken.
        """
        if token is not None:
            return self._temporary(access_key, token)
        signer = self._table.find_signer(access_key)
        if signer is None:
            raise S3Error("InvalidAccessKeyId", extra={"AWSAccessKeyId": access_key[:128]})
        kept = self._known.get(access_key)
        if kept is not None and kept[0] is signer:
            return kept[1]
        if len(self._known) >= _CACHE_ENTRIES:
            self._known.clear()
        known = ResolvedCredential(Identity.from_signer(signer), signer.key.secret_key)
        self._known[access_key] = signer, known
        return known

    def record_use(self, identity: Identity) -> None:
        """Record that a verified request used the key, or the key that created the temporary credentials."""
        self._use.record_use(identity.session.parent if identity.session else identity.access_key)

    def key_mark(self, access_key: str) -> bytes:
        """Return a fingerprint of a permanent key: another one after the key was replaced, and after its
        sessions, or those of its user, were revoked. Empty if the key cannot be used."""
        principal = self._table.find_principal(access_key)
        return b"" if principal is None else self._mark(principal) + principal.sessions_from.to_bytes(8)

    def issue(self, identity: Identity, wanted: SessionRequest) -> SessionDocument:
        """Issue temporary credentials for `identity`. A temporary identity passes on its own limits: its
        policies, its expiry and the time at which it was issued stay, so that whatever revokes it revokes
        them, and one that was revoked since it was verified makes none. Raises AdminError BadRequest,
        InvalidPolicy, AccessDenied.
        """
        session = identity.session
        parent = self._table.find_principal(session.parent if session else identity.access_key)
        if parent is None or parent.user.user_id != identity.user_id:
            raise AdminError("AccessDenied", "the key that signed the request is no longer valid")
        if session is not None and not session.is_current(parent.rounds, parent.sessions_from):
            # Its signature was verified before its body was read, which may take as long as the client likes.
            raise AdminError("AccessDenied", "the credentials that signed the request were revoked meanwhile")
        duration = _duration(wanted.duration_seconds)
        policies = (*(session.policies if session else ()), *_policy_texts(bytes(wanted.policy)))
        if not _NAME.fullmatch(wanted.name):
            raise AdminError("BadRequest", "name has at most 64 letters, digits or _+=,.@-")
        claims = self._claims(parent, duration, wanted.name, policies)
        if session is not None:
            name = wanted.name or session.name
            expires = min(claims.expires, session.expires)
            claims = replace(
                claims, issued=session.issued, expires=expires, name=name, subject=session.subject
            )
        return self._document(claims)

    def issue_for_role(
        self, role: Role, seconds: int, name: str, subject: str, policy: str = ""
    ) -> tuple[SessionDocument, Identity]:
        """Issue temporary credentials of a role for `seconds`; returns them and their identity. `subject`: of
        the validated token. Raises AdminError InvalidPolicy, AccessDenied (the role is gone)."""
        parent = self._table.find_principal(ROLE_PREFIX + role.name)
        if parent is None:
            raise AdminError("AccessDenied", f"there is no role {role.name} any more")
        claims = self._claims(parent, seconds, name, _policy_texts(policy.encode()), subject)
        document = self._document(claims)
        return document, self.resolve(document.access_key_id, document.session_token).identity

    def _claims(
        self, parent: Signer, seconds: int, name: str, policies: tuple[str, ...], subject: str = ""
    ) -> TokenClaims:
        now = self._clock.now_ms() // 1000
        return TokenClaims(
            access_key=new_access_key("MSTS"),
            user_id=parent.user.user_id,
            parent=parent.key.access_key,
            mark=self._mark(parent),
            # This clock may lag behind that of the node that revoked earlier sessions.
            issued=max(now, parent.sessions_from),
            expires=now + seconds,
            name=name,
            policies=policies,
            subject=subject,
        )

    def _document(self, claims: TokenClaims) -> SessionDocument:
        try:
            token = self._seal.seal(claims)
        except TokenError as error:
            raise AdminError("InvalidPolicy", str(error), help="give a shorter policy") from None
        expiration = datetime.fromtimestamp(claims.expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return SessionDocument(claims.access_key, self._seal.secret_key(token), token, expiration)

    def _temporary(self, access_key: str, token: str) -> ResolvedCredential:
        opened = self._open(token)
        claims = opened.claims
        if claims.access_key != access_key:
            raise S3Error("InvalidToken", "The session token belongs to another access key.")
        if self._clock.now_ms() // 1000 >= claims.expires:
            raise S3Error("ExpiredToken")
        parent = self._table.find_principal(claims.parent)
        if parent is None or parent.user.user_id != claims.user_id or self._mark(parent) != claims.mark:
            raise S3Error("InvalidToken", _SESSION_REVOKED)
        if claims.issued < parent.sessions_from:
            raise S3Error("InvalidToken", _SESSION_REVOKED)
        session = Session(
            claims.parent,
            claims.expires,
            claims.name,
            claims.policies,
            claims.issued,
            parent.rounds,
            claims.subject,
        )
        identity = Identity.from_signer(parent).with_session(session, access_key, opened.policies)
        return ResolvedCredential(identity, opened.secret_key)

    def _read(self, token: str) -> _Opened:
        try:
            claims = self._seal.unseal(token)
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
    """Return the policy, if there is one, without whitespace, since it travels in every request."""
    if policy in (b"", b"null"):
        return ()
    text = msgspec.json.decode(policy, type=str).encode() if policy.startswith(b'"') else policy
    return (msgspec.json.format(check_policy(text, _MAX_POLICY_BYTES), indent=-1),)


_log = logging.getLogger("meshd.admin")


class SessionRevocation:
    """Revokes temporary credentials. One instance per worker; all state is in the control store."""

    def __init__(self, table: IdentityTable, clock: Clock) -> None:
        self._table, self._clock = table, clock

    async def revoke_user(self, user_id: str, before: str) -> dict[str, Any]:
        """Revoke the sessions created with any key of a user. Raises AdminError NoSuchUser, BadRequest."""
        since, ended = self._since(before), list[Revocation]()

        def end(old: User | None) -> User:
            if old is None:
                raise no_such_user(user_id)
            ended[:] = [self._next_revocation(old.ended, since)]
            return replace(old, ended=ended[0])

        await self._table.update_entry(User, user_id, end)
        _log.warning("sessions of a user revoked", extra={"user": user_id, "before": before or "now"})
        return {"user_id": user_id, **revocation_fields(ended[0])}

    async def revoke_key(self, access_key: str, before: str) -> dict[str, Any]:
        """Revoke the sessions created with a key. Raises AdminError NoSuchAccessKey, BadRequest."""
        since, ended = self._since(before), list[Revocation]()

        def end(old: Key | None) -> Key:
            if old is None:
                raise no_such_key(access_key)
            ended[:] = [self._next_revocation(old.ended, since)]
            return replace(old, ended=ended[0])

        await self._table.update_entry(Key, access_key, end)
        _log.warning("sessions of a key revoked", extra={"key": access_key, "before": before or "now"})
        return {"access_key": access_key, **revocation_fields(ended[0])}

    async def revoke_role(self, name: str, before: str) -> dict[str, Any]:
        """Revoke the sessions of a role. Raises AdminError NoSuchRole, BadRequest."""
        since, ended = self._since(before), list[Revocation]()

        def end(old: Role | None) -> Role:
            if old is None:
                raise no_such_role(name)
            ended[:] = [self._next_revocation(old.ended, since)]
            return replace(old, ended=ended[0])

        await self._table.roles.update_entry(Role, name, end)
        _log.warning("sessions of a role revoked", extra={"role": name, "before": before or "now"})
        return {"role": name, **revocation_fields(ended[0])}

    def _next_revocation(self, old: Revocation, since: int) -> Revocation:
        now = self._clock.now_ms()
        if not since:
            return replace(old, round=old.round + 1, at_ms=now)
        return replace(old, before=max(old.before, since), at_ms=now)

    def _since(self, before: str) -> int:
        """Parse `before` into seconds since 1970; 0 if it is empty. Raises AdminError BadRequest."""
        if not before:
            return 0
        try:
            when = datetime.fromisoformat(before)
        except ValueError:
            raise AdminError(
                "BadRequest", f"before must be a time such as 2026-11-22T03:00:00Z, not {before[:60]!r}"
            ) from None
        seconds = int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())
        if not 0 < seconds <= self._clock.now_ms() // 1000:
            raise AdminError(
                "BadRequest",
                f"before must be a time in the past, not {before[:60]}",
                help="leave it out to revoke all sessions issued until now",
            )
        return seconds


def revocation_fields(ended: Revocation) -> dict[str, Any]:
    """Return when sessions were last revoked and, if a time was given, up to which issue time."""
    return {
        "sessions_revoked": iso_time(ended.at_ms) if ended.at_ms else "",
        "sessions_before": iso_time(ended.before * 1000) if ended.before else "",
    }

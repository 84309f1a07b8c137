"""Which access keys there are is not told by how much is worked out before a refusal."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING, Any

import pytest

from meshd.auth.identities.sts_sessions import CredentialService
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.identities import IdentityTable, Key, KeyLastUsed, User
from meshd.server.request import RequestTrace
from meshd.server.s3.request_auth import _NO_SECRET, Authenticator
from meshwire.errors import S3Error
from meshwire.http_values import dates
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, Scope, sign, signer
from meshwire.sigv4.post_object import FormClaim
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = ["KNOWN", "OTHER", "DISABLED", "NOBODYS"]
REFUSALS = {"KNOWN": "SignatureDoesNotMatch", "OTHER": "SignatureDoesNotMatch"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def authenticator(clock: ManualClock) -> Authenticator:
    control = MemoryControl(clock)
    table, secret = IdentityTable(control), ClusterSecret(control)
    entries: list[tuple[str, Any]] = [("ann", User(user_id="ann", display_name="Ann"))]
    for name in KEYS[:3]:
        key = Key(access_key=name, user_id="ann", secret_key=f"of-{name}", enabled=name != "DISABLED")
        entries.append((name, key))

    async def fill() -> None:
        await secret.create_if_missing()
        for name, entry in entries:
            await table.update_entry(type(entry), name, lambda _, entry=entry: entry)  # type: ignore[misc]

    asyncio.run(fill())
    return Authenticator(CredentialService(table, secret, KeyLastUsed(control), clock), clock, sigv2="all")


def new_head(clock: ManualClock, access_key: str) -> RequestHead:
    head = RequestHead("GET", "/bucket/k", "", {"host": "h"})
    wrong = Credential(access_key, "wrong", None)
    now = clock.now_ms() // 1000
    added = sign(head, wrong, region="r", timestamp=now, payload_hash="UNSIGNED-PAYLOAD")
    return RequestHead("GET", "/bucket/k", "", {"host": "h", **added})


def old_head(clock: ManualClock, access_key: str) -> RequestHead:
    date = dates.format_http(clock.now_ms() // 1000)
    headers = {"host": "h", "date": date, "authorization": f"AWS {access_key}:wrong"}
    return RequestHead("GET", "/bucket/k", "", headers)


def digests(monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object]) -> tuple[str, int]:
    """(the code of the refusal, how many HMACs it took)."""
    refusal(ask)  # derives the key of the day
    taken: list[Any] = []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def count(*given: Any) -> Any:
            taken.append(real(*given))
            return taken[-1]

        return count

    with monkeypatch.context() as patched:
        patched.setattr(hmac, "digest", counted(hmac.digest))
        patched.setattr(signer, "_keyed_states", counted(signer._keyed_states))
        return refusal(ask), len(taken)


def refusal(ask: Callable[[], object]) -> str:
    with pytest.raises(S3Error) as caught:
        ask()
    return caught.value.code


@pytest.mark.parametrize("head", [new_head, old_head], ids=["version 4", "version 2"])
def test_an_unknown_key_takes_the_work_of_a_wrong_signature(
    monkeypatch: pytest.MonkeyPatch,
    authenticator: Authenticator,
    clock: ManualClock,
    head: Callable[[ManualClock, str], RequestHead],
) -> None:
    found = {}
    for name in KEYS:
        asked, trace = head(clock, name), RequestTrace(clock, None, None)
        code, found[name] = digests(monkeypatch, lambda: authenticator.authenticate(asked, trace))  # noqa: B023  called at once
        assert code == REFUSALS.get(name, "InvalidAccessKeyId")
    assert len(set(found.values())) == 1, found
    assert found["KNOWN"] > 0


@pytest.mark.parametrize("scope", [None, Scope("20231114", "r", "s3")], ids=["version 2", "version 4"])
def test_and_so_does_that_of_a_form(
    monkeypatch: pytest.MonkeyPatch, authenticator: Authenticator, clock: ManualClock, scope: Scope | None
) -> None:
    found = {}
    for name in KEYS:
        claim, trace = FormClaim(name, "wrong", "policy", scope), RequestTrace(clock, None, None)
        code, found[name] = digests(monkeypatch, lambda: authenticator.authenticate_form(claim, trace))  # noqa: B023  called at once
        assert code == REFUSALS.get(name, "InvalidAccessKeyId")
    assert len(set(found.values())) == 1, found
    assert found["KNOWN"] > 0


def test_what_is_signed_with_the_secret_of_no_key_is_nobodys(
    authenticator: Authenticator, clock: ManualClock
) -> None:
    head = RequestHead("GET", "/bucket/k", "", {"host": "h"})
    right = Credential("NOBODYS", _NO_SECRET, None)
    now = clock.now_ms() // 1000
    added = sign(head, right, region="r", timestamp=now, payload_hash="UNSIGNED-PAYLOAD")
    signed = RequestHead("GET", "/bucket/k", "", {"host": "h", **added})
    with pytest.raises(S3Error, match="does not exist"):
        authenticator.authenticate(signed, RequestTrace(clock, None, None))

"""Session tokens: what was written is read; whatever else is shown is refused, and nothing breaks."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.auth.identities.sts_sessions import (
    MAX_TOKEN,
    CredentialService,
    SessionRequest,
    TokenClaims,
    TokenError,
    TokenSeal,
)
from meshd.auth.identity import Identity
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.identities import IdentityTable, Key, KeyLastUsed, User
from meshwire.errors import S3Error
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from meshd.auth.identities.sts_sessions import SessionDocument

NAMES = st.text(max_size=40)
CLAIMS = st.builds(
    TokenClaims,
    NAMES,
    NAMES,
    NAMES,
    st.binary(max_size=16),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    NAMES,
    st.lists(NAMES, max_size=3).map(tuple),
)


def make_seal() -> TokenSeal:
    secret = ClusterSecret(MemoryControl(ManualClock()))
    asyncio.run(secret.create_if_missing())
    return TokenSeal(secret)


def make_sessions() -> tuple[CredentialService, SessionDocument]:
    clock = ManualClock()
    control = MemoryControl(clock)
    table, secret = IdentityTable(control), ClusterSecret(control)

    async def fill() -> None:
        await secret.create_if_missing()
        await table.update_entry(User, "ann", lambda _: User(user_id="ann", display_name="Ann"))
        await table.update_entry(
            Key, "A1", lambda _: Key(access_key="A1", user_id="ann", secret_key="s" * 20)
        )

    asyncio.run(fill())
    sessions = CredentialService(table, secret, KeyLastUsed(control), clock)
    identity = sessions.resolve("A1", None).identity
    assert identity == Identity("ann", "Ann", "A1")
    return sessions, sessions.issue(identity, SessionRequest(name="pod"))


SEAL, OTHER = make_seal(), make_seal()
SESSIONS, DOCUMENT = make_sessions()
GOOD = DOCUMENT.session_token


@given(CLAIMS)
def test_what_was_written_is_read(claims: TokenClaims) -> None:
    token = SEAL.seal(claims)
    assert SEAL.unseal(token) == claims
    assert len(SEAL.secret_key(token)) == 44
    with pytest.raises(TokenError):
        OTHER.unseal(token)


def refused(token: str) -> bool:
    try:
        SESSIONS.resolve(DOCUMENT.access_key_id, token)
    except S3Error as error:
        return error.code == "InvalidToken"
    return False


def test_the_good_one_is_good() -> None:
    assert SESSIONS.resolve(DOCUMENT.access_key_id, GOOD).secret_key == DOCUMENT.secret_access_key


@given(st.integers(0, len(GOOD) * 7 - 1))
def test_any_flipped_bit_of_the_text_is_refused(bit: int) -> None:
    place, mask = bit // 7, 1 << bit % 7
    assert refused(GOOD[:place] + chr(ord(GOOD[place]) ^ mask) + GOOD[place + 1 :])


def test_every_flipped_bit_of_what_the_text_stands_for_is_refused() -> None:
    text = GOOD.removeprefix("mesht1.")
    sealed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    for bit in range(len(sealed) * 8):
        other = bytearray(sealed)
        other[bit // 8] ^= 1 << bit % 8
        assert refused("mesht1." + base64.urlsafe_b64encode(other).rstrip(b"=").decode())


@given(
    st.one_of(st.text(), st.text().map("mesht1.".__add__), st.binary().map(lambda raw: raw.decode("latin-1")))
)
def test_any_text_is_refused(text: str) -> None:
    assert refused(text)


@given(st.binary())
def test_any_bytes_in_the_form_of_a_token_are_refused(sealed: bytes) -> None:
    assert refused("mesht1." + base64.urlsafe_b64encode(sealed).rstrip(b"=").decode())


@given(st.data())
def test_pieces_and_repetitions_are_refused(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(GOOD)))
    end = data.draw(st.integers(start, len(GOOD)))
    if (start, end) != (0, len(GOOD)):
        assert refused(GOOD[start:end])
    assert refused(GOOD + GOOD[start:end] + "=")


def test_a_token_that_no_header_could_hold_is_not_written() -> None:
    with pytest.raises(TokenError, match="12,000 are allowed"):
        SEAL.seal(TokenClaims("a", "b", "c", b"", 0, 0, policies=("x" * MAX_TOKEN,)))
    assert refused("mesht1." + "A" * MAX_TOKEN)

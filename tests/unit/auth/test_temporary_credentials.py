"""Temporary credentials: never more and never longer than what they were made with."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import replace

from meshd.auth.identities.admin_errors import AdminError, iso_time
from meshd.auth.identities.sts_sessions import CredentialService, SessionRequest, SessionRevocation
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.identities import Account, IdentityTable, Key, KeyLastUsed, NamedPolicy, User
from meshd.control.roles import Revocation
from meshwire.errors import S3Error
from meshwire.iam import AccessRequest, evaluate
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from meshd.auth.identities.sts_sessions import SessionDocument


def document(action: str, resource: str) -> str:
    statement = {"Effect": "Allow", "Action": action, "Resource": resource}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


READ_A = document("s3:GetObject", "arn:aws:s3:::b/a/*")
READ_ALL = document("s3:GetObject", "*")


@dataclass
class Node:
    table: IdentityTable
    sessions: CredentialService
    use: KeyLastUsed
    clock: ManualClock

    def change(self, kind: type[Any], name: str, **changes: Any) -> None:
        asyncio.run(self.table.update_entry(kind, name, lambda old: replace(old, **changes) if old else None))

    def remove(self, kind: type[Any], name: str) -> None:
        asyncio.run(self.table.update_entry(kind, name, lambda _: None))

    def make(self, access_key: str, token: str | None = None, **fields: Any) -> SessionDocument:
        wanted = msgspec.json.decode(json.dumps(fields), type=SessionRequest)
        return self.sessions.issue(self.sessions.resolve(access_key, token).identity, wanted)

    def refusal(self, access_key: str, token: str | None) -> str:
        try:
            self.sessions.resolve(access_key, token)
        except S3Error as error:
            return error.code
        return ""

    def may(self, made: SessionDocument, action: str, resource: str) -> bool:
        """Whether every bound allows it."""
        identity = self.sessions.resolve(made.access_key_id, made.session_token).identity
        question = AccessRequest(action, resource, identity.user_id)
        return all(evaluate((bound,), question) == "allow" for bound in identity.bounds)


@pytest.fixture
def node() -> Node:
    clock = ManualClock()
    control = MemoryControl(clock)
    table, secret = IdentityTable(control), ClusterSecret(control)
    entries: list[Any] = [
        User(user_id="ann", display_name="Ann"),
        Key(access_key="A1", user_id="ann", secret_key="secret-of-a1"),
        Key(access_key="A2", user_id="ann", secret_key="secret-of-a2"),
        User(user_id="root", display_name="root", root=True, origin="root"),
        Key(access_key="AKROOT", user_id="root", secret_key="secret-of-root", origin="root"),
        NamedPolicy(name="read-a", text=READ_A),
    ]

    async def fill() -> None:
        await secret.create_if_missing()
        for entry in entries:
            name = next(
                getattr(entry, field) for field in ("access_key", "user_id", "name") if hasattr(entry, field)
            )
            await table.update_entry(type(entry), name, lambda _, entry=entry: entry)  # type: ignore[misc]

    asyncio.run(fill())
    use = KeyLastUsed(control)
    return Node(table, CredentialService(table, secret, use, clock), use, clock)


def test_they_stand_for_the_user_until_they_end(node: Node) -> None:
    made = node.make("A1", duration_seconds=900, name="pod-7")
    known = node.sessions.resolve(made.access_key_id, made.session_token)
    assert known.secret_key == made.secret_access_key
    assert (known.identity.user_id, known.identity.access_key) == ("ann", made.access_key_id)
    assert known.identity.session is not None
    assert (known.identity.session.name, known.identity.session.parent) == ("pod-7", "A1")
    node.clock.advance(899)
    assert node.refusal(made.access_key_id, made.session_token) == ""
    node.clock.advance(1)
    assert node.refusal(made.access_key_id, made.session_token) == "ExpiredToken"


def test_the_answer_is_what_botocore_expects_of_a_process(node: Node) -> None:
    made = json.loads(msgspec.json.encode(node.make("A1")))
    assert set(made) == {"Version", "AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration"}
    assert made["Version"] == 1
    assert made["Expiration"] == "2023-11-14T23:13:20Z"


def test_a_token_goes_with_its_own_key_only(node: Node) -> None:
    first, second = node.make("A1"), node.make("A1")
    assert first.access_key_id != second.access_key_id
    assert first.secret_access_key != second.secret_access_key
    for access_key in (second.access_key_id, "A1", "AKROOT", ""):
        assert node.refusal(access_key, first.session_token) == "InvalidToken"
    assert node.refusal(first.access_key_id, None) == "InvalidAccessKeyId"
    assert node.refusal(first.access_key_id, "") == "InvalidToken"


def test_they_end_with_their_key_and_their_user(node: Node) -> None:
    made = node.make("A1")
    node.change(Key, "A1", enabled=False)
    assert node.refusal(made.access_key_id, made.session_token) == "InvalidToken"
    node.change(Key, "A1", enabled=True)
    assert node.refusal(made.access_key_id, made.session_token) == ""
    node.change(Key, "A1", secret_key="another-secret")  # a new key under the old name
    assert node.refusal(made.access_key_id, made.session_token) == "InvalidToken"
    other = node.make("A2")
    node.remove(User, "ann")
    assert node.refusal(other.access_key_id, other.session_token) == "InvalidToken"


def test_a_key_given_to_another_user_takes_its_sessions_with_it_to_nobody(node: Node) -> None:
    made = node.make("A1")
    node.change(Key, "A1", user_id="root")
    assert node.refusal(made.access_key_id, made.session_token) == "InvalidToken"


def test_a_policy_narrows(node: Node) -> None:
    made = node.make("A1", policy=json.loads(READ_A))
    assert node.may(made, "s3:GetObject", "arn:aws:s3:::b/a/1")
    assert not node.may(made, "s3:GetObject", "arn:aws:s3:::b/c")
    assert not node.may(made, "s3:PutObject", "arn:aws:s3:::b/a/1")
    assert node.may(node.make("A1", policy=READ_A), "s3:GetObject", "arn:aws:s3:::b/a/1")  # as text, too


def test_the_bounds_of_the_key_hold_on_and_are_those_of_now(node: Node) -> None:
    made = node.make("A1", policy=json.loads(READ_ALL))
    assert node.may(made, "s3:GetObject", "arn:aws:s3:::b/c")
    node.change(Key, "A1", policies=("read-a",))
    assert node.may(made, "s3:GetObject", "arn:aws:s3:::b/a/1")
    assert not node.may(made, "s3:GetObject", "arn:aws:s3:::b/c")
    node.remove(NamedPolicy, "read-a")
    assert not node.may(made, "s3:GetObject", "arn:aws:s3:::b/a/1")


def test_temporary_ones_make_no_wider_and_no_longer_ones(node: Node) -> None:
    first = node.make("A1", policy=json.loads(READ_A), duration_seconds=1000)
    node.clock.advance(600)
    second = node.make(first.access_key_id, first.session_token, policy=json.loads(READ_ALL))
    assert second.expiration == first.expiration
    assert node.may(second, "s3:GetObject", "arn:aws:s3:::b/a/1")
    assert not node.may(second, "s3:GetObject", "arn:aws:s3:::b/c")
    third = node.make(second.access_key_id, second.session_token)
    assert not node.may(third, "s3:GetObject", "arn:aws:s3:::b/c")
    node.clock.advance(400)
    for made in (first, second, third):
        assert node.refusal(made.access_key_id, made.session_token) == "ExpiredToken"


def test_root_within_a_policy_is_root_no_more(node: Node) -> None:
    free = node.make("AKROOT")
    assert node.sessions.resolve(free.access_key_id, free.session_token).identity.root
    bound = node.make("AKROOT", policy=json.loads(READ_A))
    identity = node.sessions.resolve(bound.access_key_id, bound.session_token).identity
    assert not identity.root
    assert evaluate(identity.policies, AccessRequest("s3:GetObject", "arn:aws:s3:::b/a/1")) == "allow"
    assert not node.may(bound, "s3:GetObject", "arn:aws:s3:::b/c")


@pytest.mark.parametrize(
    ("fields", "code", "complaint"),
    [
        ({"duration_seconds": 899}, "BadRequest", "from 900"),
        ({"duration_seconds": 36 * 3600 + 1}, "BadRequest", "to 129600"),
        ({"duration_seconds": -1}, "BadRequest", "duration_seconds"),
        ({"name": "a b"}, "BadRequest", "name has"),
        ({"name": "x" * 65}, "BadRequest", "name has"),
        ({"policy": {}}, "InvalidPolicy", "Statement"),
        ({"policy": "no json"}, "InvalidPolicy", "JSON"),
        ({"policy": ""}, "InvalidPolicy", "JSON"),
        ({"policy": 7}, "InvalidPolicy", "object"),
        ({"policy": "x" * 5000}, "InvalidPolicy", "4,096 are allowed"),
    ],
)
def test_refusals(node: Node, fields: dict[str, Any], code: str, complaint: str) -> None:
    with pytest.raises(AdminError, match=complaint) as refusal:
        node.make("A1", **fields)
    assert refusal.value.code == code


def test_a_chain_of_policies_ends_where_headers_end(node: Node) -> None:
    long = document("s3:GetObject", "arn:aws:s3:::b/" + "x" * 3900)
    made = node.make("A1", policy=long)
    made = node.make(made.access_key_id, made.session_token, policy=long)
    with pytest.raises(AdminError, match="12,000 are allowed") as refusal:
        node.make(made.access_key_id, made.session_token, policy=long)
    assert refusal.value.code == "InvalidPolicy"


def test_no_secret_in_any_repr(node: Node) -> None:
    made = node.make("A1")
    known = node.sessions.resolve(made.access_key_id, made.session_token)
    shown = repr((made, known, known.identity, node.sessions))
    assert made.secret_access_key not in shown
    assert made.session_token not in shown


def test_their_use_is_that_of_the_key_they_were_made_with(node: Node) -> None:
    made = node.make("A1")
    node.sessions.record_use(node.sessions.resolve(made.access_key_id, made.session_token).identity)
    node.sessions.record_use(node.sessions.resolve("A2", None).identity)
    asyncio.run(node.use.save(node.clock.now_ms(), node.table.keys()))
    assert node.use.last_used_ms("A1") == node.use.last_used_ms("A2") == node.clock.now_ms()
    assert node.use.last_used_ms(made.access_key_id) == node.use.last_used_ms("AKROOT") == 0


def test_a_key_of_roots_that_is_bound_is_root_no_more(node: Node) -> None:
    node.change(Key, "AKROOT", policies=("read-a",))
    identity = node.sessions.resolve("AKROOT", None).identity
    assert not identity.root
    assert evaluate(identity.policies, AccessRequest("s3:GetObject", "arn:aws:s3:::b/a/1")) == "allow"
    assert evaluate(identity.bounds, AccessRequest("s3:GetObject", "arn:aws:s3:::b/c")) == "none"


def revoke(node: Node, *, user: str = "", key: str = "", before: str = "", ahead: int = 0) -> dict[str, Any]:
    """By a node whose clock is so many seconds ahead of the others'."""
    clock = ManualClock()
    clock.advance(node.clock.now_ms() / 1000 - clock.now_ms() / 1000 + ahead)
    revoking = SessionRevocation(node.table, clock)
    return asyncio.run(revoking.revoke_user(user, before) if user else revoking.revoke_key(key, before))


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
def test_all_of_a_user_are_revoked_whatever_the_clocks_say(node: Node, ahead: int) -> None:
    node.clock.advance(7200)
    first, second, root = node.make("A1"), node.make("A2"), node.make("AKROOT")
    again = node.make(first.access_key_id, first.session_token)  # made with temporary ones
    revoke(node, user="ann", ahead=ahead)
    for made in (first, second, again):
        assert node.refusal(made.access_key_id, made.session_token) == "InvalidToken"
    assert node.refusal(root.access_key_id, root.session_token) == ""
    assert node.refusal("A1", None) == ""
    fresh = node.make("A1")  # in the same second
    assert node.refusal(fresh.access_key_id, fresh.session_token) == ""
    revoke(node, user="ann", ahead=ahead)
    assert node.refusal(fresh.access_key_id, fresh.session_token) == "InvalidToken"


def test_those_of_one_key_are_revoked(node: Node) -> None:
    first, second = node.make("A1"), node.make("A2")
    assert revoke(node, key="A1")["sessions_revoked"]
    assert node.refusal(first.access_key_id, first.session_token) == "InvalidToken"
    assert node.refusal(second.access_key_id, second.session_token) == ""


def test_those_issued_before_a_time_are_revoked(node: Node) -> None:
    node.clock.advance(60)
    old = node.make("A1")
    node.clock.advance(60)
    when = iso_time(node.clock.now_ms())
    new = node.make("A1")
    assert revoke(node, user="ann", before=when) == {
        "user_id": "ann",
        "sessions_revoked": when,
        "sessions_before": when,
    }
    assert node.refusal(old.access_key_id, old.session_token) == "InvalidToken"
    assert node.refusal(new.access_key_id, new.session_token) == ""
    revoke(node, user="ann", before="2020-01-01")  # an earlier time takes nothing back
    assert node.refusal(old.access_key_id, old.session_token) == "InvalidToken"


def test_those_made_with_one_that_is_revoked_by_its_time_are_revoked_too(node: Node) -> None:
    """Else whoever has a leaked one could make another, which looks newer than the time of the revocation."""
    node.clock.advance(60)
    leaked = node.make("A1")
    node.clock.advance(60)
    when = iso_time(node.clock.now_ms())
    node.clock.advance(60)
    made = node.make(leaked.access_key_id, leaked.session_token)
    again = node.make(made.access_key_id, made.session_token)
    own = node.make("A1")
    issued = [
        identity.session.issued
        for each in (leaked, made, again)
        if (identity := node.sessions.resolve(each.access_key_id, each.session_token).identity).session
    ]
    assert issued == issued[:1] * 3, "what policies see as aws:TokenIssueTime"
    revoke(node, user="ann", before=when)
    for each in (leaked, made, again):
        assert node.refusal(each.access_key_id, each.session_token) == "InvalidToken"
    assert node.refusal(own.access_key_id, own.session_token) == ""


@pytest.mark.parametrize("before", ["", "now"])
def test_one_that_is_revoked_while_its_request_is_read_makes_no_others(node: Node, before: str) -> None:
    """Its signature was verified with the headers; the body comes as slowly as the client sends it."""
    leaked = node.make("A1")
    identity = node.sessions.resolve(leaked.access_key_id, leaked.session_token).identity
    node.clock.advance(60)
    revoke(node, user="ann", before=before and iso_time(node.clock.now_ms()))
    with pytest.raises(AdminError, match="revoked meanwhile"):
        node.sessions.issue(identity, SessionRequest())


def test_a_key_that_changes_hands_while_a_request_is_read_makes_none(node: Node) -> None:
    made = node.make("A1")
    found = [node.sessions.resolve("A1", None), node.sessions.resolve(made.access_key_id, made.session_token)]
    node.change(Key, "A1", user_id="root")
    for each in found:
        with pytest.raises(AdminError, match="no longer valid"):
            node.sessions.issue(each.identity, SessionRequest())


def test_a_node_whose_clock_is_behind_issues_what_is_good(node: Node) -> None:
    ahead = ManualClock()
    ahead.advance(node.clock.now_ms() / 1000 - ahead.now_ms() / 1000 + 300)
    revoke(node, user="ann", before=iso_time(ahead.now_ms()), ahead=300)
    made = node.make("A1", duration_seconds=900)
    assert node.refusal(made.access_key_id, made.session_token) == ""
    node.clock.advance(900)
    assert node.refusal(made.access_key_id, made.session_token) == "ExpiredToken"


def test_what_cannot_be_revoked_is_told(node: Node) -> None:
    for user, key, before, words in (
        ("bob", "", "", "there is no user"),
        ("", "A9", "", "there is no access key"),
        ("ann", "", "soon", "2026-11-22T03:00:00Z"),
        ("ann", "", "2999-01-01", "a time in the past"),
    ):
        with pytest.raises(AdminError, match=words):
            revoke(node, user=user, key=key, before=before)


def test_the_users_file_read_again_brings_none_back(node: Node) -> None:
    made = node.make("AKROOT")
    revoke(node, user="root")
    revoke(node, key="AKROOT")
    account = Account(node.table.users()["root"], replace(node.table.keys()["AKROOT"], ended=Revocation()))
    asyncio.run(node.table.replace_accounts(frozenset({"root"}), [account], 1))
    assert node.refusal(made.access_key_id, made.session_token) == "InvalidToken"
    assert node.table.keys()["AKROOT"].ended.round == 1

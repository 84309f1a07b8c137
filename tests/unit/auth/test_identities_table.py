"""What a start and a reload do to identities, and what they leave alone; state of earlier versions."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from meshd.control.identities import Account, IdentityTable, Key, NamedPolicy, User, new_secret_key
from meshd.control.migrations import migrate_control_state
from meshd.telemetry import logs
from meshwire.iam import AccessRequest, evaluate
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from meshd.control.identities import Origin
    from meshwire.iam import Policy

BOTH: frozenset[Origin] = frozenset({"root", "file"})


def account(user: str, key: str, origin: Origin = "file", secret: str = "a-secret") -> Account:
    return Account(
        User(user_id=user, display_name=user, origin=origin, root=origin == "root"),
        Key(access_key=key, user_id=user, secret_key=secret, origin=origin),
    )


ROOT = account("root", "AKROOT", "root")


@pytest.fixture
def control() -> MemoryControl:
    return MemoryControl(ManualClock())


@pytest.fixture
def table(control: MemoryControl) -> IdentityTable:
    return IdentityTable(control)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def load(table: IdentityTable, *accounts: Account, now_ms: int = 0) -> int:
    return int(run(table.replace_accounts(BOTH, accounts, now_ms)))


def amend(table: IdentityTable, kind: type[Any], name: str, **changes: Any) -> None:
    run(table.update_entry(kind, name, lambda old: replace(old, **changes) if old else None))


def signing(table: IdentityTable) -> list[str]:
    return [name for name in table.keys() if table.find_signer(name)]  # noqa: SIM118  not a dictionary


def test_a_user_with_two_keys_in_the_file_is_one_user(table: IdentityTable) -> None:
    assert load(table, ROOT, account("ann", "A1"), account("ann", "A2")) == 5
    assert [user.user_id for user in table.list_all()] == ["ann", "root"]
    assert signing(table) == ["A1", "A2", "AKROOT"]
    assert load(table, ROOT, account("ann", "A1"), account("ann", "A2")) == 0


def test_a_reload_keeps_what_an_administrator_set_on_what_stays(table: IdentityTable) -> None:
    load(table, ROOT, account("ann", "A1"), now_ms=5)
    amend(table, Key, "A1", enabled=False, policies=("readers",))
    amend(table, User, "ann", policies=("writers",))
    load(table, ROOT, account("ann", "A1", secret="a-new-secret"), now_ms=9)
    key, user = table.keys()["A1"], table.users()["ann"]
    assert (key.secret_key, key.enabled, key.policies) == ("a-new-secret", False, ("readers",))
    assert (user.policies, user.created_ms) == (("writers",), 5)
    assert signing(table) == ["AKROOT"]


def test_a_reload_leaves_alone_what_the_admin_api_made(table: IdentityTable) -> None:
    made = account("bob", "B1", "admin")
    run(table.update_entry(User, "bob", lambda _: made.user))
    run(table.update_entry(Key, "B1", lambda _: made.key))
    load(table, ROOT, account("bob", "B2"))
    assert signing(table) == ["AKROOT", "B1", "B2"]
    load(table, ROOT)
    assert signing(table) == ["AKROOT", "B1"]
    assert table.users()["bob"] == made.user


def test_keys_of_a_user_who_left_the_file_sign_no_more(table: IdentityTable) -> None:
    load(table, ROOT, account("ann", "A1"))
    run(table.update_entry(Key, "A9", lambda _: account("ann", "A9", "admin").key))
    assert table.find_signer("A9") is not None
    load(table, ROOT)
    assert table.find_signer("A9") is None
    assert table.find_signer("A1") is None


def test_a_key_the_file_gives_to_another_user_loses_what_was_set_on_it(table: IdentityTable) -> None:
    load(table, ROOT, account("ann", "A1"))
    amend(table, Key, "A1", policies=("readers",))
    load(table, ROOT, account("eve", "A1"))
    signer = table.find_signer("A1")
    assert signer is not None
    assert (signer.user.user_id, signer.key.policies) == ("eve", ())


def test_the_root_key_can_neither_be_disabled_nor_bound(table: IdentityTable) -> None:
    load(table, ROOT)
    amend(table, Key, "AKROOT", enabled=False, policies=("readers",))
    load(table, ROOT)
    assert table.keys()["AKROOT"] == ROOT.key


def test_a_new_root_key_replaces_the_old_one(table: IdentityTable) -> None:
    load(table, ROOT)
    load(table, account("root", "AKNEW", "root"))
    assert signing(table) == ["AKNEW"]


@pytest.fixture
def earlier(control: MemoryControl) -> Callable[..., None]:
    def write(**fields: object) -> None:
        document = {"display_name": "Ann Example", "email": "ann@example.org", **fields}
        run(control.put(f"identities/{fields['access_key']}", json.dumps(document).encode()))

    return write


def test_identities_of_an_earlier_version_are_brought_forward(
    control: MemoryControl, table: IdentityTable, earlier: Callable[..., None]
) -> None:
    earlier(user_id="ann", access_key="A1", secret_key="a-secret", root=False, origin="file")
    earlier(user_id="ann", access_key="A2", secret_key="b-secret", root=False, origin="file")
    earlier(user_id="root", access_key="AKROOT", secret_key="r-secret", root=True, origin="root")
    assert run(migrate_control_state(control, 7)) == 3
    assert signing(table) == ["A1", "A2", "AKROOT"]
    ann = table.users()["ann"]
    assert (ann.display_name, ann.email, ann.root, ann.origin) == (
        "Ann Example",
        "ann@example.org",
        False,
        "file",
    )
    assert table.users()["root"].root
    assert table.keys()["A2"].secret_key == "b-secret"
    assert not control.cached_entries("identities")
    assert run(migrate_control_state(control, 8)) == 0


def test_bringing_forward_again_after_an_interruption_changes_nothing(
    control: MemoryControl, table: IdentityTable, earlier: Callable[..., None]
) -> None:
    for _ in range(2):  # the second time, the old document is there again beside its successor
        earlier(user_id="ann", access_key="A1", secret_key="a-secret", root=False, origin="file")
        run(migrate_control_state(control, 7))
        amend(table, User, "ann", policies=("readers",))
    assert table.users()["ann"].policies == ("readers",)
    assert table.users()["ann"].created_ms == 7


READ = (
    '{"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"}}'
)
WRITE = READ.replace("Get", "Put")


def put_policy(table: IdentityTable, name: str, text: str) -> None:
    run(table.update_entry(NamedPolicy, name, lambda _: NamedPolicy(name=name, text=text)))


def allowed(policies: tuple[Policy, ...]) -> set[str]:
    """Which of two actions every policy allows."""
    actions = ("s3:GetObject", "s3:PutObject")
    return {
        action
        for action in actions
        if all(
            evaluate((policy,), AccessRequest(action, "arn:aws:s3:::b/k")) == "allow" for policy in policies
        )
    }


def test_a_key_may_do_what_one_of_its_policies_allows(table: IdentityTable) -> None:
    load(table, account("ann", "A1"))
    put_policy(table, "read", READ)
    put_policy(table, "write", WRITE)
    amend(table, Key, "A1", policies=("read",))
    amend(table, User, "ann", policies=("write", "read"))
    signer = table.find_signer("A1")
    assert signer is not None
    assert allowed(signer.bounds) == {"s3:GetObject"}
    assert [allowed((policy,)) for policy in signer.policies] == [{"s3:PutObject"}, {"s3:GetObject"}]
    amend(table, Key, "A1", policies=("read", "write"))
    signer = table.find_signer("A1")
    assert signer is not None
    assert allowed(signer.bounds) == {"s3:GetObject", "s3:PutObject"}


@pytest.mark.parametrize("text", [None, "{}", "no json"])
def test_a_policy_that_is_missing_or_unreadable_refuses_everything(
    table: IdentityTable, text: str | None
) -> None:
    load(table, account("ann", "A1"))
    put_policy(table, "read", READ)
    if text is not None:
        put_policy(table, "gone", text)
    amend(table, Key, "A1", policies=("read", "gone"))
    amend(table, User, "ann", policies=("read", "gone"))
    signer = table.find_signer("A1")
    assert signer is not None
    assert allowed(signer.bounds) == set()
    assert evaluate(signer.policies, AccessRequest("s3:GetObject", "arn:aws:s3:::b/k")) == "deny"


def test_a_changed_policy_counts_at_once_and_one_that_stays_is_not_read_again(table: IdentityTable) -> None:
    load(table, account("ann", "A1"))
    put_policy(table, "read", READ)
    amend(table, Key, "A1", policies=("read",))
    before = table.find_signer("A1")
    put_policy(table, "other", READ)
    after = table.find_signer("A1")
    assert before is not None
    assert after is not None
    assert after.bounds[0] is before.bounds[0]
    put_policy(table, "read", WRITE)
    changed = table.find_signer("A1")
    assert changed is not None
    assert allowed(changed.bounds) == {"s3:PutObject"}


def test_secrets_of_keys_are_hidden_from_logs_as_soon_as_they_are_known(
    table: IdentityTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "secret_masker", logs.SecretMasker())
    load(table, account("ann", "A1", secret="chosen-by-ann"))
    assert table.find_signer("A1") is not None
    made = new_secret_key()
    assert logs.secret_masker.mask_text(f"chosen-by-ann {made} mesht1.{'x' * 40}") == "*** *** ***"

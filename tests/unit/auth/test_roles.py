"""Roles: what their sessions may do, when they end, and which providers and roles can be stored."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from meshd.auth.authorizer import Authorizer
from meshd.auth.identities.admin_errors import AdminError
from meshd.auth.identities.named_policies import PolicyAdmin
from meshd.auth.identities.roles import NewProvider, NewRole, ProviderChange, RoleAdmin, RoleChange
from meshd.auth.identities.sts_sessions import CredentialService, SessionRequest, SessionRevocation
from meshd.auth.identity import Caller
from meshd.auth.request_facts import RequestFacts
from meshd.auth.required_actions import RequiredAction
from meshd.auth.web_identity.exchange import WebIdentityExchange
from meshd.auth.web_identity.key_cache import KeyCache
from meshd.control.buckets import Bucket, BucketTable
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.identities import IdentityTable, KeyLastUsed
from meshd.control.roles import TrustCondition
from meshd.core.api_errors import BatchError
from meshd.jobs.authorization import capture_principal, resolve_caller
from meshwire.errors import S3Error
from meshwire.s3.operations import CreateBucket, GetObject, PutObject
from meshwire.sts_query import StsError, WebIdentityRequest
from tests.support.access_world import DIGESTS, HEADERS, allow, deny, text, to
from tests.support.certificates import Authority
from tests.support.manual_clock import ManualClock
from tests.support.oidc_issuer import SigningKey, key_set
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from meshd.auth.identity import Identity

ISSUER, KEY = "https://issuer.example", SigningKey("k", "ES256")
READ = GetObject("b", "train/1")


@dataclass
class World:
    """A bucket `b` of ann's, a provider, a role that may read `train/`, and a token of ann's."""

    clock: ManualClock
    table: IdentityTable
    buckets: BucketTable
    sessions: CredentialService
    admin: RoleAdmin
    policies: PolicyAdmin
    exchange: WebIdentityExchange

    @classmethod
    def make(cls) -> World:
        clock = ManualClock()
        control = MemoryControl(clock)
        table, secret, use = IdentityTable(control), ClusterSecret(control), KeyLastUsed(control)
        asyncio.run(secret.create_if_missing())
        sessions = CredentialService(table, secret, use, clock)
        exchange = WebIdentityExchange(table.roles, sessions, KeyCache(clock), clock)
        buckets, admin = BucketTable(control), RoleAdmin(table, use, clock)
        world = cls(clock, table, buckets, sessions, admin, PolicyAdmin(table, clock), exchange)
        asyncio.run(buckets.create(Bucket("b", "ann", 0)))
        read = text(allow("s3:GetObject", "arn:aws:s3:::b/train/*"))
        run(world.policies.put_policy("read", read.encode()))
        run(admin.add_provider(NewProvider("p", ISSUER, ("mesh",), jwks=key_set(KEY))))
        run(admin.add_role(NewRole("trainer", "p", (TrustCondition("sub", ("ann",)),), ("read",))))
        return world

    def token(self, **changes: Any) -> str:
        now = self.clock.now_ms() // 1000
        return KEY.sign({"iss": ISSUER, "sub": "ann", "aud": "mesh", "exp": now + 60, **changes})

    def assume(self, role: str = "trainer", **more: Any) -> Identity:
        wanted = WebIdentityRequest(role, "pod-7", more.pop("token", "") or self.token(), **more)
        found: Identity = run(self.exchange.exchange(wanted)).identity
        return found

    def refusal(self, role: str = "trainer", **more: Any) -> str:
        with pytest.raises(StsError) as refused:
            self.assume(role, **more)
        return refused.value.code

    def issue(self, **more: Any) -> tuple[str, str]:
        wanted = WebIdentityRequest("trainer", "pod-7", self.token(), **more)
        answer = run(self.exchange.exchange(wanted)).answer
        return answer.access_key, answer.session_token

    def code(self, keys: tuple[str, str]) -> str:
        try:
            self.sessions.resolve(*keys)
        except S3Error as error:
            return error.code
        return ""

    def may(self, identity: Identity, operation: Any) -> bool:
        try:
            Authorizer(self.buckets, self.clock).authorize(identity, operation)
        except S3Error as error:
            return {"AccessDenied": False}[error.code]
        return True


def run(work: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await work

    return asyncio.run(wait())


@pytest.fixture
def world() -> World:
    return World.make()


def test_a_session_may_do_what_the_role_s_policies_allow_and_nothing_else(world: World) -> None:
    pod = world.assume()
    assert (pod.user_id, pod.principal, pod.root) == ("role/trainer", "assumed-role/trainer/pod-7", False)
    assert pod.arn == "arn:aws:sts:::assumed-role/trainer/pod-7"
    assert pod.account == "role/trainer"
    assert world.may(pod, READ)
    assert not world.may(pod, GetObject("b", "test/1"))
    assert not world.may(pod, PutObject("b", "train/1", HEADERS, DIGESTS))
    assert not world.may(pod, CreateBucket("mine"))
    run(world.admin.detach_policy("trainer", "read"))
    assert not world.may(world.assume(), READ)
    assert not world.may(world.assume(), CreateBucket("mine"))


def test_a_bucket_s_policy_denies_a_role_and_allows_it_nothing_more(world: World) -> None:
    def policy(document: str) -> None:
        def changed(bucket: Bucket) -> Bucket:
            fields = {name: getattr(bucket, name) for name in bucket.__struct_fields__}
            return Bucket(**(fields | {"policy": document}))

        run(world.buckets.update("b", changed))

    policy(to("arn:aws:iam::1:role/trainer", allow("s3:PutObject", "arn:aws:s3:::b/*")))
    assert world.may(world.assume(), READ)
    assert not world.may(world.assume(), PutObject("b", "train/1", HEADERS, DIGESTS))
    policy(to("arn:aws:iam:::role/trainer", deny("s3:GetObject", "arn:aws:s3:::b/*")))
    assert not world.may(world.assume(), READ)


def test_a_bucket_that_a_role_owns_is_within_its_policies_too(world: World) -> None:
    asyncio.run(world.buckets.create(Bucket("mine", "role/trainer", 0)))
    pod = world.assume()
    assert not world.may(pod, GetObject("mine", "1"))
    run(world.policies.put_policy("read", text(allow("s3:*", "arn:aws:s3:::mine/*")).encode()))
    assert world.may(world.assume(), GetObject("mine", "1"))


def test_policies_see_the_role_and_no_user(world: World) -> None:
    pod = world.assume()
    facts = RequestFacts(
        pod, RequiredAction("s3:GetObject", "b", "k"), None, Caller(pod).context, 0, _no_record
    )
    assert facts["aws:principalarn"] == "arn:aws:iam:::role/trainer"
    assert facts["aws:principaltype"] == "AssumedRole"
    assert facts["aws:userid"] == "role/trainer"
    with pytest.raises(KeyError):
        facts["aws:username"]


def _no_record(bucket: str, key: str, version: str | None) -> None:
    return None


def test_credentials_end_in_time_when_revoked_and_with_their_role(world: World) -> None:
    keys = world.issue(duration_seconds=900)
    world.clock.advance(899)
    assert world.code(keys) == ""
    world.clock.advance(1)
    assert world.code(keys) == "ExpiredToken"
    keys = world.issue()
    run(SessionRevocation(world.table, world.clock).revoke_role("trainer", ""))
    assert world.code(keys) == "InvalidToken"
    keys = world.issue()
    assert world.code(keys) == ""
    run(world.admin.remove_role("trainer"))
    assert world.code(keys) == "InvalidToken"
    run(world.admin.add_role(NewRole("trainer", "p", (TrustCondition("sub", ("ann",)),), ("read",))))
    assert world.code(keys) == "InvalidToken", "another role of the same name"


def test_a_role_signs_nothing_itself(world: World) -> None:
    assert world.code(("role/trainer", "")) == "InvalidToken"
    with pytest.raises(S3Error, match="does not exist"):
        world.sessions.resolve("role/trainer", None)
    keys = world.issue()
    with pytest.raises(S3Error):
        world.sessions.resolve(keys[0], None)


def test_sessions_of_a_session_keep_its_end_its_policies_and_its_subject(world: World) -> None:
    pod = world.assume(duration_seconds=900)
    policy = msgspec.Raw(text(allow("s3:GetObject", "arn:aws:s3:::b/train/1")).encode())
    made = world.sessions.issue(pod, SessionRequest(3600, policy, "inner"))
    inner = world.sessions.resolve(made.access_key_id, made.session_token).identity
    assert inner.session is not None
    assert pod.session is not None
    assert inner.session.expires == pod.session.expires
    assert (inner.session.subject, inner.principal) == ("ann", "assumed-role/trainer/inner")
    assert world.may(inner, READ)
    assert not world.may(inner, GetObject("b", "train/2"))


def test_a_job_of_a_session_runs_until_the_role_is_revoked(world: World) -> None:
    principal = capture_principal(Caller(world.assume()))
    again = resolve_caller(principal, world.table).identity
    assert (again.user_id, again.principal) == ("role/trainer", "assumed-role/trainer/pod-7")
    assert world.may(again, READ)
    assert not world.may(again, GetObject("b", "test/1"))
    run(SessionRevocation(world.table, world.clock).revoke_role("trainer", ""))
    with pytest.raises(BatchError, match="revoked"):
        resolve_caller(principal, world.table)


def test_refusals_tell_nothing_of_roles_to_a_client_without_a_token(world: World) -> None:
    forged = SigningKey("k", "ES256").sign({"iss": ISSUER, "sub": "ann", "aud": "mesh", "exp": 2e9})
    assert world.refusal(token=forged) == world.refusal("nobody", token=forged) == "InvalidIdentityToken"
    eve = world.token(sub="eve")
    assert world.refusal(token=eve) == world.refusal("nobody", token=eve) == "AccessDenied"


def test_the_role_says_which_of_two_issuers_of_one_name_counts(world: World) -> None:
    other = SigningKey("k", "ES256")
    run(world.admin.add_provider(NewProvider("a", ISSUER, ("mesh",), jwks=key_set(other))))
    assert world.assume().user_id == "role/trainer"
    now = world.clock.now_ms() // 1000
    theirs = other.sign({"iss": ISSUER, "sub": "ann", "aud": "mesh", "exp": now + 60})
    assert world.refusal(token=theirs) == "InvalidIdentityToken"
    run(world.admin.add_role(NewRole("others", "a", (TrustCondition("sub", ("ann",)),))))
    assert world.assume("others", token=theirs).user_id == "role/others"
    assert world.refusal("others") == "InvalidIdentityToken"


def test_a_provider_that_was_removed_gives_nothing(world: World) -> None:
    keys = world.issue()
    with pytest.raises(AdminError, match="trust"):
        run(world.admin.remove_provider("p", force=False))
    run(world.admin.remove_provider("p", force=True))
    assert world.refusal() == "InvalidIdentityToken"
    assert world.code(keys) == ""


def test_the_lifetime_is_between_a_quarter_of_an_hour_and_the_role_s(world: World) -> None:
    assert world.refusal(duration_seconds=899) == world.refusal(duration_seconds=3601) == "ValidationError"
    run(world.admin.change_role("trainer", RoleChange(max_seconds=900)))
    session = world.assume().session
    assert session is not None
    assert session.expires - session.issued == 900


def test_a_policy_in_use_by_a_role_is_not_removed(world: World) -> None:
    with pytest.raises(AdminError, match="1 role"):
        run(world.policies.remove_policy("read", force=False))
    run(world.policies.remove_policy("read", force=True))
    assert not world.may(world.assume(), READ)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
        ({"issuer": "http://issuer.example"}, "https"),
        ({"issuer": "ftp://issuer.example"}, "https"),
        ({"issuer": "https://"}, "host"),
        ({"issuer": "https://a b"}, "blank"),
        ({"issuer": "https://user:pw@a"}, "user"),
        ({"issuer": "https://a/?b"}, "query"),
        ({"issuer": "https://a:x"}, "URL"),
        ({"jwks_uri": "file:///etc/passwd"}, "jwks_uri"),
        ({"jwks_uri": "https://a/keys", "jwks": key_set(KEY)}, "not both"),
        ({"audiences": ()}, "audiences"),
        ({"audiences": ("",)}, "audiences"),
        ({"algorithms": ()}, "algorithms"),
        ({"algorithms": ("none",)}, "never"),
        ({"algorithms": ("RS256", "HS256")}, "never"),
        ({"jwks": "{}"}, "jwks"),
        ({"ca": "no certificate"}, "ca"),
        ({"ca": "x" * 70_000}, "ca"),
        ({"description": "a\nb"}, "description"),
    ],
)
def test_a_provider_that_could_not_work_is_refused(world: World, changes: dict[str, Any], told: str) -> None:
    fields: dict[str, Any] = {"name": "q", "issuer": "https://q.example", "audiences": ("mesh",)}
    with pytest.raises(AdminError, match=told):
        run(world.admin.add_provider(NewProvider(**(fields | changes))))
    assert list(world.table.roles.providers()) == ["p"]


def test_a_provider_is_changed_as_a_whole_or_not_at_all(world: World, tmp_path: Path) -> None:
    before = world.table.roles.providers()["p"]
    with pytest.raises(AdminError):
        run(world.admin.change_provider("p", ProviderChange(audiences=("x",), algorithms=("none",))))
    assert world.table.roles.providers()["p"] == before
    ca = Authority(tmp_path).cert.read_text()
    shown = run(world.admin.change_provider("p", ProviderChange(audiences=("x",), ca=ca)))
    assert (shown["audiences"], shown["ca"], shown["keys"]) == (("x",), ca, "a stored document")
    assert world.refusal() == "InvalidIdentityToken"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": "role/x"}, "name"),
        ({"provider": "q"}, "no identity provider"),
        ({"policies": ("q",)}, "no policy"),
        ({"conditions": ()}, "who may assume"),
        ({"conditions": (TrustCondition("aud", ("mesh",)),)}, "who may assume"),
        ({"conditions": (TrustCondition("sub", ()),)}, "sub"),
        ({"conditions": (TrustCondition("", ("a",)),)}, "claim"),
        ({"conditions": (TrustCondition("sub", ("a",)),) * 21}, "at most"),
        ({"max_seconds": 899}, "15 minutes"),
        ({"max_seconds": 43_201}, "12 hours"),
    ],
)
def test_a_role_that_could_not_work_is_refused(world: World, changes: dict[str, Any], told: str) -> None:
    fields: dict[str, Any] = {
        "name": "other",
        "provider": "p",
        "conditions": (TrustCondition("sub", ("ann",)),),
    }
    with pytest.raises(AdminError, match=told):
        run(world.admin.add_role(NewRole(**(fields | changes))))
    assert list(world.table.roles.roles()) == ["trainer"]


def test_no_answer_and_no_repr_shows_a_role_s_secret(world: World) -> None:
    seed = world.table.roles.roles()["trainer"].seed
    shown = [world.admin.get_role("trainer"), world.admin.list_roles("", 10).items]
    assert seed not in json.dumps(shown, default=repr)
    assert seed not in repr(world.table.roles.roles())
    assert seed not in repr(world.table.find_principal("role/trainer"))

"""Keys of a role in the SDK: exchanged at first use, renewed in time with the token of that time."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest

from meshsdk.client import web_identity
from meshsdk.client.settings import load_settings
from meshsdk.client.signer import keys_of
from meshsdk.client.transport import Transport
from meshsdk.client.web_identity import WebIdentityKeys
from meshsdk.errors import AccessError, ConfigurationError, ConnectError
from meshwire.sts_query import (
    AssumedRole,
    StsError,
    parse_assumed_role,
    parse_form,
    parse_sts_error,
    read_role_arn,
    read_web_identity_request,
    render_assumed_role,
    render_sts_error,
    web_identity_form,
)

if TYPE_CHECKING:
    from pathlib import Path

    from meshsdk.client.settings import Endpoint
    from meshsdk.errors import MeshError

NOW = 1_800_000_000.0


class Sts:
    """What the SDK exchanges at, and the clock of both."""

    def __init__(self) -> None:
        self.now, self.lifetime = NOW, 3600.0
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        self.failure: MeshError | None = None
        self.gate = threading.Event()
        self.gate.set()

    def clock(self) -> float:
        return self.now

    def exchange_at(self, endpoint: Endpoint, form: bytes, _: float) -> AssumedRole:
        self.gate.wait(20)
        self.asked.append((str(endpoint), parse_qs(form.decode())))
        if self.failure is not None:
            raise self.failure
        expires = datetime.fromtimestamp(self.now + self.lifetime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return AssumedRole(f"MSTS{len(self.asked)}", "secret", "session", expires)

    @property
    def tokens(self) -> list[str]:
        return [form["WebIdentityToken"][0] for _, form in self.asked]


@pytest.fixture
def sts(monkeypatch: pytest.MonkeyPatch) -> Sts:
    found = Sts()
    monkeypatch.setattr(web_identity, "exchange_at", found.exchange_at)
    return found


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "token").write_text("first\n")
    return {
        "MESH_ENDPOINT": "http://a:9000,http://b:9000",
        "AWS_ROLE_ARN": "arn:aws:iam:::role/trainer",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
    }


def keys(env: dict[str, str], sts: Sts) -> WebIdentityKeys:
    found = keys_of(load_settings(env=env), sts.clock)
    assert isinstance(found, WebIdentityKeys)
    return found


def await_renewal() -> None:
    for thread in threading.enumerate():
        if thread.name == "mesh-keys":
            thread.join(20)


def renewed(found: WebIdentityKeys) -> str:
    """The access key after the renewal that its use has started, if it is due."""
    found.current()
    await_renewal()
    return found.current().access_key


def test_the_environment_names_a_role(env: dict[str, str], sts: Sts) -> None:
    settings = load_settings(env=env)
    assert (settings.access_key, settings.secret_key) == ("", "")
    assert not sts.asked, "no request before the first use"
    assert keys(env | {"AWS_ROLE_SESSION_NAME": "job-7"}, sts).current().access_key == "MSTS1"
    endpoint, form = sts.asked[0]
    assert endpoint == "http://a:9000"
    assert form == {
        "Action": ["AssumeRoleWithWebIdentity"],
        "Version": ["2011-06-15"],
        "RoleArn": ["arn:aws:iam:::role/trainer"],
        "RoleSessionName": ["job-7"],
        "WebIdentityToken": ["first"],
    }


@pytest.mark.parametrize(
    "more",
    [
        {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "S"},
        {"AWS_ROLE_ARN": ""},
        {"AWS_WEB_IDENTITY_TOKEN_FILE": ""},
    ],
)
def test_keys_come_first_and_both_variables_are_needed(env: dict[str, str], more: dict[str, str]) -> None:
    if "AWS_ACCESS_KEY_ID" in more:
        assert load_settings(env=env | more).web_identity is None
    else:
        with pytest.raises(ConfigurationError, match="AWS_WEB_IDENTITY_TOKEN_FILE"):
            load_settings(env=env | more)


def test_the_session_is_named_after_the_host(env: dict[str, str], sts: Sts, monkeypatch: Any) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "pod/7 é" + "x" * 80)
    keys(env, sts).current()
    name = sts.asked[0][1]["RoleSessionName"][0]
    assert name.startswith("meshsdk-pod-7--xx")
    assert len(name) == 64


def test_keys_are_renewed_in_time_with_the_token_of_that_time(
    env: dict[str, str], sts: Sts, tmp_path: Path
) -> None:
    found = keys(env, sts)
    assert found.current() is found.current()
    sts.now += 2900
    assert found.current().access_key == "MSTS1"
    (tmp_path / "token").write_text("second")
    sts.now += 101
    assert renewed(found) == "MSTS2"
    assert sts.tokens == ["first", "second"]
    sts.lifetime = 900.0
    sts.now += 3001
    renewed(found)
    sts.now += 599
    assert found.current().access_key == "MSTS3"
    sts.now += 2
    assert renewed(found) == "MSTS4"


def test_no_thread_waits_for_the_sts_while_the_keys_are_valid(env: dict[str, str], sts: Sts) -> None:
    found = keys(env, sts)
    found.current()
    sts.now += 3100
    sts.gate.clear()
    try:
        for _ in range(3):
            assert found.current().access_key == "MSTS1"
    finally:
        sts.gate.set()
    await_renewal()
    assert found.current().access_key == "MSTS2"
    assert len(sts.asked) == 2


def test_old_keys_are_used_while_renewing_fails(env: dict[str, str], sts: Sts) -> None:
    found = keys(env, sts)
    found.current()
    sts.failure = ConnectError("it is down")
    sts.now += 3100
    assert renewed(found) == "MSTS1"
    asked = len(sts.asked)
    assert asked == 3, "one try at each endpoint"
    assert renewed(found) == "MSTS1"
    assert len(sts.asked) == asked, "not again at once"
    assert "it is down" in found.expiry_hint()
    sts.now += 500
    with pytest.raises(ConnectError):
        found.current()


def test_the_other_endpoints_are_asked_but_not_after_a_refusal(env: dict[str, str], sts: Sts) -> None:
    sts.failure = ConnectError("it is down")
    with pytest.raises(ConnectError):
        keys(env, sts).current()
    assert [endpoint for endpoint, _ in sts.asked] == ["http://a:9000", "http://b:9000"]
    sts.asked.clear()
    sts.failure = AccessError("no", status=403, code="AccessDenied")
    with pytest.raises(AccessError):
        keys(env, sts).current()
    assert len(sts.asked) == 1
    sts.failure = None
    keys(env | {"AWS_ENDPOINT_URL_STS": "https://sts.example"}, sts).current()
    assert sts.asked[-1][0] == "https://sts.example"


def test_refused_keys_are_replaced_once(env: dict[str, str], sts: Sts) -> None:
    found = keys(env, sts)
    first = found.current()
    sts.now += 60
    second = found.replacement(None)
    assert second is not None
    assert second != first
    assert found.replacement(None) == second, "another thread's refusal of the first keys"
    assert found.replacement(second) is None
    sts.now += 60
    sts.failure = AccessError("the role is gone", status=403, code="AccessDenied")
    assert found.replacement(None) is None
    assert "the role is gone" in found.expiry_hint()


@pytest.mark.parametrize("content", [None, "", " \n", "tökén"])
def test_a_file_without_a_token_is_told(
    env: dict[str, str], sts: Sts, tmp_path: Path, content: str | None
) -> None:
    (tmp_path / "token").unlink()
    if content is not None:
        (tmp_path / "token").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError, match="AWS_WEB_IDENTITY_TOKEN_FILE"):
        keys(env, sts).current()
    assert not sts.asked


def test_threads_share_one_exchange(env: dict[str, str], sts: Sts) -> None:
    found = keys(env, sts)
    threads = [threading.Thread(target=found.current) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(sts.asked) == 1


def test_no_repr_shows_a_token_or_a_secret(env: dict[str, str], sts: Sts) -> None:
    settings = load_settings(env=env)
    found = keys(env, sts)
    found.current()
    transport = Transport(settings)
    for each in (found, settings, settings.web_identity, transport.keys):
        assert "secret" not in repr(each).lower().replace("secret_key", "")
        assert "first" not in repr(each)


# --- the protocol -------------------------------------------------------------------------------------------


def test_forms_and_answers_are_read_as_they_are_written() -> None:
    form = web_identity_form("arn:aws:iam::1:role/a", "s & é=+%", "e.y.J", 900)
    wanted = read_web_identity_request(parse_form(form))
    assert (wanted.role, wanted.session_name, wanted.token, wanted.duration_seconds) == (
        "a",
        "s & é=+%",
        "e.y.J",
        900,
    )
    assert "e.y.J" not in repr(wanted)
    answer = AssumedRole("A<", "S&", "T\"'", "2026-01-01T00:00:00Z", subject="é", audience="m", provider="p")
    assert parse_assumed_role(render_assumed_role(answer, "1")) == answer
    error = parse_sts_error(render_sts_error(StsError("AccessDenied", "no <b>"), "1"), 403)
    assert (error.code, error.message, error.status) == ("AccessDenied", "no <b>", 403)


@pytest.mark.parametrize("body", [b"", b"{}", b"<a/>", b"<!DOCTYPE x><ErrorResponse/>", b"\xff" * 9])
def test_what_is_no_answer_is_an_error(body: bytes) -> None:
    assert parse_sts_error(body, 502).code == "InvalidResponse"
    with pytest.raises(StsError):
        parse_assumed_role(body)


@pytest.mark.parametrize(
    "form",
    [
        b"\xff",
        b"Action=a&Action=b",
        b"Action",
        b"a=%ff",
        b"&".join(b"a%d=1" % number for number in range(65)),
        b"RoleArn=arn:aws:iam:::role/a&RoleSessionName=ss",
        b"RoleArn=arn:aws:iam:::role/a&RoleSessionName=ss&WebIdentityToken=",
        b"RoleArn=arn:aws:iam:::role/a&RoleSessionName=ss&WebIdentityToken=t&ProviderId=www.amazon.com",
        b"RoleArn=arn:aws:iam:::role/a&RoleSessionName=ss&WebIdentityToken=t&PolicyArns.member.1.arn=x",
        b"RoleArn=arn:aws:iam:::role/a&RoleSessionName=ss&WebIdentityToken=t&DurationSeconds=1e9",
        b"RoleArn=arn:aws:iam:::role/a&RoleSessionName=ss&WebIdentityToken=t&DurationSeconds=-1",
    ],
)
def test_odd_forms_are_refused(form: bytes) -> None:
    with pytest.raises(StsError) as refused:
        read_web_identity_request(parse_form(form))
    assert refused.value.code == "ValidationError"


@pytest.mark.parametrize(
    "arn",
    ["", "trainer", "arn:aws:iam:::role/", "arn:aws:iam:::user/a", "arn:aws:sts:::role/a", "arn:aws:iam::1"],
)
def test_a_role_is_named_by_its_arn(arn: str) -> None:
    assert read_role_arn("arn:aws:iam::123456789012:role/trainer") == "trainer"
    with pytest.raises(StsError):
        read_role_arn(arn)

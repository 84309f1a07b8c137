"""The console's server part: sessions, what may send a request, and that the key's rights decide."""

from __future__ import annotations

import contextlib
import http.client
import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import pytest

from tests.support.console_client import PREFIX, ConsoleClient, message_of
from tests.support.daemons import Daemon
from tests.support.oidc_issuer import OidcIssuer

if TYPE_CHECKING:
    from collections.abc import Iterator

READ_ONLY = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": "arn:aws:s3:::shown*"}
    ],
}


@pytest.fixture(scope="module")
def issuer() -> Iterator[OidcIssuer]:
    with OidcIssuer() as running:
        yield running


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    oidc = ["--console-oidc-role", "people", "--console-oidc-client", "console"]
    with Daemon.start(args=["--console", "on", *oidc], workers=2) as running:
        client = running.client()
        for name in ("shown", "private"):
            client.create_bucket(Bucket=name)
        client.put_object(Bucket="shown", Key="a b/ü&.txt", Body=b"text", ContentType="text/html")
        client.close()
        yield running
        assert "Traceback" not in running.output()


@pytest.fixture
def page(daemon: Daemon) -> ConsoleClient:
    client = ConsoleClient.of(daemon)
    assert client.sign_in().status == 200
    return client


def new_key(page: ConsoleClient, user: str) -> dict[str, str]:
    """A user with a key that may read one bucket."""
    page.json("PUT", "/-/admin/policies/look", READ_ONLY)
    page.json("POST", "/-/admin/users", {"user_id": user, "policies": ["look"]})
    found: dict[str, str] = page.json("POST", "/-/admin/keys", {"user_id": user})
    return found


def test_a_node_without_the_setting_has_no_console(daemon: Daemon) -> None:
    with Daemon.start() as other:
        client = ConsoleClient.of(other)
        assert client.send("GET", f"{PREFIX}/").status == 404
        assert client.sign_in().status in (404, 405)


def test_the_cookie_is_for_the_console_alone_and_names_no_secret(daemon: Daemon) -> None:
    client = ConsoleClient.of(daemon)
    answer = client.sign_in()
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", f"Path={PREFIX}"} <= set(cookie.split("; "))
    assert daemon.secret_key not in cookie + answer.body.decode()
    assert json.loads(client.send("GET", f"{PREFIX}/session").body)["user_id"] == "root"


@pytest.mark.parametrize(("access_key", "secret_key"), [("nobody", "x" * 20), ("", "wrong")])
def test_a_wrong_pair_is_refused_in_the_same_words(daemon: Daemon, access_key: str, secret_key: str) -> None:
    answer = ConsoleClient.of(daemon).sign_in(access_key, secret_key)
    assert (answer.status, message_of(answer)) == (
        403,
        "The access key does not exist, or the secret key is wrong.",
    )
    assert "set-cookie" not in answer.headers


def test_a_request_needs_the_cookie_and_the_token_of_the_page(page: ConsoleClient) -> None:
    assert page.api("GET", "/shown?list-type=2").status == 200
    token, page.csrf = page.csrf, ""
    assert page.api("GET", "/shown?list-type=2").status == 403
    page.csrf, page.cookie = token, ""
    assert message_of(page.api("GET", "/shown?list-type=2")) == "Sign in first."


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=lambda headers: next(iter(headers.values())),
)
def test_other_origins_are_refused(page: ConsoleClient, headers: dict[str, str]) -> None:
    for answer in (
        page.api("GET", "/shown", headers=headers),
        page.send("GET", f"{PREFIX}/session", headers=headers),
        page.send("GET", f"{PREFIX}/download/shown/x", headers=headers),
        page.send("POST", f"{PREFIX}/session", b"{}", {"Content-Type": "application/json", **headers}),
    ):
        assert (answer.status, message_of(answer)) == (
            403,
            "Requests from other sites are not accepted here.",
        )


@pytest.mark.parametrize("other", ["seen[0]=1", "a,b=c", 'theme={"dark": true}', "é=1", "alone", "=1", ""])
def test_cookies_of_other_programs_on_this_host_do_no_harm(page: ConsoleClient, other: str) -> None:
    own = page.cookie
    for cookie in (f"{other}; {own}", f"{own};{other}"):
        page.cookie = cookie.encode().decode("latin-1")
        assert page.api("GET", "/shown?list-type=2").status == 200, cookie
    page.cookie = other.encode().decode("latin-1")
    assert page.send("GET", f"{PREFIX}/oidc/callback").status == 403
    assert page.api("GET", "/shown?list-type=2").status == 403


def test_a_changed_cookie_is_no_session(page: ConsoleClient) -> None:
    name, _, value = page.cookie.partition("=")
    for forged in (value[:-20] + "BBBB" + value[-16:], value[4:], "", "x"):
        page.cookie = f"{name}={forged}"
        assert page.api("GET", "/shown").status == 403, forged


def test_a_page_can_do_what_its_key_may(daemon: Daemon, page: ConsoleClient) -> None:
    key = new_key(page, "reader")
    reader = ConsoleClient.of(daemon)
    assert reader.sign_in(key["access_key"], key["secret_key"]).status == 200
    assert reader.api("GET", f"/shown/{quote('a b/ü&.txt')}").body == b"text"
    assert reader.api("PUT", "/shown/new", b"x").status == 403
    assert reader.api("GET", "/private?list-type=2").status == 403
    for target in ("/-/admin/users", "/-/cluster"):
        answer = reader.api("GET", target)
        assert (answer.status, message_of(answer)) == (403, "only root may use the admin API")
    assert reader.api("GET", "/-/activity").status == 200
    assert reader.api("GET", f"/-/activity?{'&'.join(f'p{number}=1' for number in range(65))}").status == 200
    page.json("PATCH", f"/-/admin/keys/{key['access_key']}", {"enabled": False})
    answer = reader.api("GET", "/shown?list-type=2")
    assert (answer.status, message_of(answer)) == (403, "The session has ended: sign in again.")


def test_revoked_sessions_end_and_the_key_may_sign_in_again(daemon: Daemon, page: ConsoleClient) -> None:
    key = new_key(page, "revoked")
    reader = ConsoleClient.of(daemon)
    reader.sign_in(key["access_key"], key["secret_key"])
    page.json("DELETE", f"/-/admin/keys/{key['access_key']}/sessions")
    assert reader.api("GET", "/shown?list-type=2").status == 403
    assert reader.sign_in(key["access_key"], key["secret_key"]).status == 200
    assert reader.api("GET", "/shown?list-type=2").status == 200


def test_temporary_credentials_may_sign_in(daemon: Daemon, page: ConsoleClient) -> None:
    made = json.loads(daemon.request("POST", "/-/sts", b"{}").body)
    client = ConsoleClient.of(daemon)
    pair = made["AccessKeyId"], made["SecretAccessKey"]
    assert client.sign_in(*pair, made["SessionToken"]).status == 200
    assert client.api("GET", "/shown?list-type=2").status == 200
    assert client.api("GET", "/-/admin/users").status == 403  # as with any other client


@pytest.mark.parametrize("target", ["/-/sts", "/-/peer/activity", "/-/console/session", "/-/console/api/"])
def test_some_targets_are_out_of_reach(page: ConsoleClient, target: str) -> None:
    answer = page.api("POST", target, b"{}")
    assert (answer.status, message_of(answer)) == (
        403,
        "Pages of the console may not request this. Use another client.",
    )


def test_bodies_of_both_kinds_arrive_whole(page: ConsoleClient) -> None:
    body = bytes(range(256)) * 4096
    assert page.api("PUT", "/shown/large", body).status == 200
    assert page.api("GET", "/shown/large", headers={"Range": "bytes=100-"}).body == body[100:]
    assert page.api("DELETE", "/shown/large").status == 204


def test_a_download_is_an_attachment_whatever_the_object_is(page: ConsoleClient) -> None:
    answer = page.send("GET", f"{PREFIX}/download/shown/{quote('a b/ü&.txt')}")
    assert (answer.status, answer.body) == (200, b"text")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''%C3%BC%26.txt"


def test_stored_pages_are_not_of_the_consoles_origin(daemon: Daemon) -> None:
    """What a browser opens (a public page, a presigned address, an error) has an origin of its own."""
    client = daemon.client()
    signed = client.generate_presigned_url("get_object", {"Bucket": "shown", "Key": "a b/ü&.txt"})
    client.close()
    for target in (signed.removeprefix(daemon.endpoint), "/shown/missing", "/?marker=a"):
        answer = ConsoleClient.of(daemon).send("GET", target, headers={"Accept": "text/html"})
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("sandbox "), target
        assert "allow-same-origin" not in policy
    assert "content-security-policy" not in daemon.request("GET", "/shown").headers


def test_the_address_leads_to_the_page_unless_a_bucket_has_its_name(daemon: Daemon) -> None:
    browser = {"Accept": "text/html,*/*"}
    client = ConsoleClient.of(daemon)
    answer = client.send("GET", "/console", headers=browser)
    assert (answer.status, answer.headers["location"]) == (302, f"{PREFIX}/")
    assert client.send("GET", "/console").status == 404  # S3's answer about a bucket
    daemon.request("PUT", "/console")
    assert client.send("GET", "/console", headers=browser).status == 403
    assert client.send("GET", "/", headers=browser).headers["location"] == f"{PREFIX}/"
    daemon.request("DELETE", "/console")
    for target, headers in (("/", {}), ("/?marker=a", browser)):
        assert client.send("GET", target, headers=headers).status == 403, "S3's answer"
    assert client.send("GET", "/", headers=browser | {"Authorization": "AWS a:b"}).status == 400


def events_of(page: ConsoleClient, query: str, count: int) -> list[tuple[str, dict[str, object]]]:
    """The first events of a stream."""
    found: list[tuple[str, dict[str, object]]] = []
    with contextlib.closing(page.connect()) as connection:
        headers = {"Cookie": page.cookie, "x-mesh-console": page.csrf}
        connection.request("GET", f"{PREFIX}/events?{query}", headers=headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        name = ""
        while len(found) < count and (line := response.readline()):
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                found.append((name, json.loads(line[6:])))
    return found


def test_a_stream_sends_documents_and_then_what_changed(page: ConsoleClient) -> None:
    first, second, *patches = events_of(page, "watch=/-/activity&watch=/-/cluster", 5)
    assert [name for name, _ in (first, second)] == ["document", "document"]
    assert {name for name, _ in patches} == {"patch"}
    assert first[1]["target"] == "/-/activity"
    changes: list[Any] = [told["patch"] for _, told in patches if told["target"] == "/-/activity"]
    assert all("silent" not in change for change in changes)
    # A look takes 8 ms of CPU: how often the node looks is what a page costs.
    times = [node["time"] for change in changes for node in change["nodes"].values()]
    assert len(times) > 1
    assert all(later - earlier > 1900 for earlier, later in pairwise(times))


def test_a_stream_tells_403_as_a_sentence_and_ends_with_its_session(
    daemon: Daemon, page: ConsoleClient
) -> None:
    key = new_key(page, "watcher")
    reader = ConsoleClient.of(daemon)
    reader.sign_in(key["access_key"], key["secret_key"])
    (_, told), *_ = events_of(reader, "watch=/-/cluster", 1)
    document = told["document"]
    assert isinstance(document, dict)
    assert document["error"]["message"] == "only root may use the admin API"
    page.json("PATCH", f"/-/admin/keys/{key['access_key']}", {"enabled": False})
    assert reader.send("GET", f"{PREFIX}/events?watch=/-/cluster").status == 403


@pytest.mark.parametrize(
    "query", ["", "watch=/-/admin/users", "watch=/shown", "&".join(["watch=/-/activity"] * 17)]
)
def test_a_stream_watches_nothing_else(page: ConsoleClient, query: str) -> None:
    answer = page.send("GET", f"{PREFIX}/events?{query}", headers={"x-mesh-console": page.csrf})
    assert answer.status == 400


def test_a_node_stops_although_pages_are_open(page: ConsoleClient) -> None:
    with Daemon.start(args=["--console", "on", "--drain-timeout", "60"]) as other:
        client = ConsoleClient.of(other)
        client.sign_in()
        with contextlib.closing(other.connect()) as connection:
            headers = {"Cookie": client.cookie, "x-mesh-console": client.csrf}
            connection.request("GET", f"{PREFIX}/events?watch=/-/activity", headers=headers)
            assert connection.getresponse().status == 200
            assert other.stop(timeout=30) == 0


@pytest.fixture
def people(page: ConsoleClient, issuer: OidcIssuer) -> None:
    """The role of the sign-in: ann may read one bucket."""
    page.json("PUT", "/-/admin/policies/look", READ_ONLY)
    provider = {"name": "company", "issuer": issuer.url, "audiences": ["console"], "allow_http": True}
    condition = {"claim": "sub", "values": ["ann"]}
    role = {"name": "people", "provider": "company", "policies": ["look"], "conditions": [condition]}
    for kind, document in (("idps", provider), ("roles", role)):
        assert page.api("POST", f"/-/admin/{kind}", json.dumps(document).encode()).status in (201, 409)


def begin(browser: ConsoleClient) -> tuple[str, str]:
    """Where the provider sends the browser back to, and its cookie."""
    answer = browser.send("GET", f"{PREFIX}/oidc/begin")
    assert answer.status == 302, answer.body
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Lax", f"Path={PREFIX}/oidc/"} <= set(cookie.split("; "))
    where = urlsplit(answer.headers["location"])
    with contextlib.closing(
        http.client.HTTPConnection(str(where.hostname), where.port, timeout=30)
    ) as issuer:
        issuer.request("GET", f"{where.path}?{where.query}")
        back = urlsplit(str(issuer.getresponse().getheader("location")))
    return f"{back.path}?{back.query}", cookie.partition(";")[0]


@pytest.mark.usefixtures("people")
def test_people_sign_in_at_their_provider(daemon: Daemon, issuer: OidcIssuer) -> None:
    browser = ConsoleClient.of(daemon)
    assert browser.send("GET", f"{PREFIX}/oidc/").status == 204
    back, browser.cookie = begin(browser)
    answer = browser.send("GET", back)
    assert (answer.status, answer.headers["location"]) == (302, f"{PREFIX}/")
    name, _, value = answer.headers["set-cookie"].partition(";")[0].partition("=")
    browser.cookie = f"{name}={value}"
    session = json.loads(browser.send("GET", f"{PREFIX}/session").body)
    browser.csrf = session["csrf"]
    assert session["root"] is False
    assert browser.api("GET", "/shown?list-type=2").status == 200
    assert browser.api("GET", "/private?list-type=2").status == 403


@pytest.mark.usefixtures("people")
def test_a_sign_in_ends_in_the_browser_in_which_it_began_once(daemon: Daemon, issuer: OidcIssuer) -> None:
    browser = ConsoleClient.of(daemon)
    back, cookie = begin(browser)
    _, other = begin(browser)
    for wrong in ("", other, cookie[:-4] + "AAAA"):
        browser.cookie = wrong
        assert browser.send("GET", back).status == 403
    browser.cookie = cookie
    for wrong in (back.replace("state=", "state=x"), back + "&a=b" * 20):
        assert browser.send("GET", wrong).status == 403
    assert browser.send("GET", back).status == 302
    assert browser.send("GET", back).status == 503  # the code is used


@pytest.mark.usefixtures("people")
@pytest.mark.parametrize("fault", ["another person", "another nonce", "another client"])
def test_a_token_that_is_not_for_this_sign_in_is_refused(
    daemon: Daemon, issuer: OidcIssuer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {"another nonce": {"nonce": "other"}, "another client": {"aud": "other"}}.get(fault, {})
    token = issuer.token
    monkeypatch.setattr(issuer, "token", lambda subject, **more: token(subject, **{**more, **changed}))
    monkeypatch.setattr(issuer, "person", "eve" if fault == "another person" else "ann")
    browser = ConsoleClient.of(daemon)
    back, browser.cookie = begin(browser)
    answer = browser.send("GET", back)
    assert (answer.status, "set-cookie" in answer.headers) == (403, False), answer.body
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"

"""What is stored, and what users call things, is shown by the console and never executed."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.console_browser import require_console
from tests.support.console_data import ATTACKS, BROKEN, DOCUMENTS, loader_of

if TYPE_CHECKING:
    import pytest

    from tests.support.console_browser import Browser
    from tests.support.daemon_cluster import DaemonCluster
    from tests.support.daemons import Daemon

require_console()


TRICKS: Final = (
    "<img src=x onerror=alert({0})>",
    "<svg><animate onbegin=alert({0}) attributeName=x dur=1s>",
    "<iframe srcdoc='<script>parent.alert({0})</script>'></iframe>",
    "</textarea><details open ontoggle=alert({0})>",
    '"><input autofocus onfocus=alert({0}) a="',
)


def test_nothing_that_is_stored_is_executed(
    daemon: Daemon, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(daemon, "s3://hostile/classes", monkeypatch, on_bad="mask", max_bad=1.0) as loader:
        plan = loader.plan.hash
        for _ in loader:  # a sample that cannot be decoded is noted with its name
            pass
    page = browser.page
    browser.show("/buckets/hostile?prefix=keys%2F&flat=1", ".object .name button")
    shown = page.locator(".object .name button")
    assert page.locator(".object .name button:has-text('⟨U+202E⟩<b onmouseover')").count() == 1
    assert shown.count() == len(ATTACKS)
    for number in range(shown.count()):
        shown.nth(number).click()
        page.wait_for_selector("dialog pre, dialog .problem")
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")
    for name, (body, _) in DOCUMENTS.items():
        browser.show("/buckets/hostile?prefix=documents%2F", f"button:has-text('{name}')")
        page.click(f"button:has-text('{name}')")
        page.wait_for_selector("dialog pre")
        assert "onerror=alert(15)" in page.locator("dialog .facts").inner_text()
        if name != "data.json":
            assert page.locator("dialog pre").inner_text() == body.decode()
        page.keyboard.press("Escape")
    browser.show(f"/batches/{plan}?batch={len(ATTACKS)}", "ol.rows canvas")
    page.click("details.plan summary")
    page.wait_for_selector("details.plan .ops >> text=random_resized_crop")
    assert BROKEN in page.locator("details.plan td").first.inner_text()
    page.click("details.plan dd a")  # the dataset: names of classes, and what could not be used
    page.wait_for_selector("section[aria-label^='Bad samples of plan'] td")
    assert BROKEN in page.locator("section[aria-label^='Bad samples of plan'] td").first.inner_text()
    classes = page.locator("[aria-label='Samples of each class of label']").first.inner_text()
    assert BROKEN in classes
    assert ATTACKS[0] in classes
    for selector in (
        "main script",
        "main svg[onload]",
        "main [onerror]",
        "main iframe",
        "main embed",
        "main object",
    ):
        assert page.locator(selector).count() == 0
    for name in ("page.html", "drawing.svg"):  # opened by their own addresses, in an origin of their own
        address = daemon.client().generate_presigned_url(
            "get_object", {"Bucket": "hostile", "Key": f"documents/{name}"}
        )
        other = browser.context.new_page()
        other.on("dialog", lambda dialog: dialog.dismiss())
        other.goto(address)
        assert other.evaluate("self.origin") == "null"
        other.close()
    assert browser.trouble == []


def trick(number: int) -> str:
    """A text that would be executed as alert(number), if it were markup."""
    return TRICKS[number % len(TRICKS)].format(number)


USER_OP: Final = """
from meshsdk.userops import BYTES, BadSample, array, op

@op(input=BYTES, output=array("int64", ()), memory=128 << 20)
def hostile(data):
    {summary!r}
    raise BadSample({error!r})
"""


def test_texts_of_users_are_shown_as_texts(nodes: DaemonCluster, browser: Browser) -> None:
    """Eighteen more tries: with the eighteen above, 36 of 36 do nothing."""
    daemon = nodes["n1"]
    page, table, archive = browser.page, io.BytesIO(), io.BytesIO()
    pq.write_table(pa.table({trick(20): [trick(21)]}), table)
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr(f"{trick(22)}.txt", "")
    objects = {
        "columns.parquet": table.getvalue(),
        "names.zip": archive.getvalue(),
        "foreign.svg": (
            b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(23)'><foreignObject>"
            b"<body xmlns='http://www.w3.org/1999/xhtml' onload='alert(23)'/></foreignObject></svg>"
        ),
        "page.xhtml": b"<html xmlns='http://www.w3.org/1999/xhtml'><script>alert(24)</script></html>",
        "object.html": b"<object data='data:text/html,<script>parent.alert(25)</script>'></object>",
    }
    kinds = {"svg": "image/svg+xml", "xhtml": "application/xhtml+xml", "html": "text/html"}
    policy: dict[str, Any] = {
        "Effect": "Allow",
        "Action": "s3:GetObject",
        "Resource": f"arn:aws:s3:::photos/{trick(27)}*",
    }
    policy["Condition"] = {"StringLike": {"aws:username": trick(26)}}
    rule = {"ID": trick(28), "Status": "Enabled", "Filter": {"Prefix": trick(29)}, "Expiration": {"Days": 1}}
    with contextlib.closing(daemon.client()) as s3:
        s3.create_bucket(Bucket="tricks")
        for name, body in objects.items():
            kind = kinds.get(name.rpartition(".")[2], "application/octet-stream")
            s3.put_object(Bucket="tricks", Key=name, Body=body, ContentType=kind)
        noted = nodes.key_with_primary("n1", "tricks", f"{trick(30)}/x")  # in the audit log of n1
        s3.put_object(Bucket="tricks", Key=noted, Body=b"")
        s3.put_bucket_lifecycle_configuration(Bucket="tricks", LifecycleConfiguration={"Rules": [rule]})

    def sent(method: str, target: str, body: bytes | dict[str, Any]) -> None:
        answer = daemon.request(
            method, target, body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        assert answer.status < 300, answer.body

    sent("PUT", "/-/admin/policies/tricks", {"Version": "2012-10-17", "Statement": [policy]})
    sent("POST", "/-/admin/users", {"user_id": "tricked", "display_name": trick(31), "email": trick(32)})
    sent("POST", "/-/modules?name=tricks", USER_OP.format(summary=trick(33), error=trick(34)).encode())
    steps = [{"op": "decode"}, {"op": "encode", "args": {"format": "png"}}]
    view = {"kind": "transform", "ops": steps, "prefix": trick(35)}
    sent("POST", "/-/views", {"bucket": "tricks", "name": "made", "view": view})

    seen: dict[int, str] = {}

    def look(*numbers: int, where: str) -> None:
        for number in numbers:
            page.get_by_text(trick(number)).first.wait_for(state="attached")
            seen[number] = where

    for name, shown in {"columns.parquet": (20, 21), "names.zip": (22,)}.items():
        browser.show("/buckets/tricks", f"button:has-text('{name}')")
        page.click(f"button:has-text('{name}')")
        look(*shown, where=name)
        page.keyboard.press("Escape")
    for number, name in enumerate(list(objects)[2:], 23):
        page.click(f"button:has-text('{name}')")
        page.wait_for_selector("dialog pre")
        assert page.locator("dialog pre").inner_text() == objects[name].decode()
        seen[number] = name
        page.keyboard.press("Escape")
    look(30, where="a folder")
    page.click("button:has-text('Settings')")
    page.wait_for_selector("section[aria-label='Lifecycle rules'] li")
    look(28, 29, where="a lifecycle rule")
    browser.show("/users", "section[aria-label=Policies] summary")
    page.click("section[aria-label=Policies] summary:has-text('tricks')")
    look(26, 27, where="a named policy")
    assert (
        "Users and keys with this policy may read objects"
        in page.locator("section[aria-label=Policies] .words").last.inner_text()
    )
    look(31, 32, where="a user")
    browser.show("/ops", "section[aria-label=Library] td")
    look(33, where="an op")
    page.fill("[name=sample]", "s3://tricks/page.xhtml")
    page.fill("[name=ops]", '[{"op": "tricks/hostile"}]')
    page.click("button:has-text('Run')")
    page.wait_for_selector(".problem")
    look(34, where="an error of an op")
    browser.show("/views", "summary")
    look(35, where="a view")
    browser.show("/audit", "td")
    look(30, where="the audit log")
    browser.show(f"/buckets/tricks?prefix={quote(trick(36))}", "text=No objects here")
    assert page.input_value("[name=prefix]") == trick(36)
    page.goto(f"{daemon.endpoint}/-/console/#/{trick(37)}")
    page.wait_for_selector("h1")
    assert set(seen) == set(range(20, 36))
    assert len(ATTACKS) + len(DOCUMENTS) + len(seen) >= 30  # besides 15 to 17, 36 and 37
    assert (
        page.locator("main [onerror], main iframe, main [onbegin], main [ontoggle], main [onfocus]").count()
        == 0
    )
    assert browser.trouble == []

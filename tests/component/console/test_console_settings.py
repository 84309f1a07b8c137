"""The console's settings of buckets, and what a key may do."""

from __future__ import annotations

import contextlib
import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.console_browser import open_browser, require_console

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.console_browser import Browser
    from tests.support.daemons import Daemon

require_console()

RULES: Final = (
    (
        {"prefix": "old & <b>/", "days": "30", "tags": "kind=raw, of = us"},
        "Objects that begin with old & <b>/, with the tag kind: raw, with the tag of: us are deleted 30 days",
        "0 objects.",
    ),
    (
        {"action": "date", "date": "2999-01-01", "prefix": "train/", "larger": "0"},
        "Objects that begin with train/, larger than 0 B are deleted on 2999-01-01.",
        "0 objects.",
    ),
    (
        {"action": "versions", "days": "2", "keep": "3", "smaller": "100"},
        "Earlier versions of objects smaller than 100 B are removed 2 days after they were replaced",
        "0 earlier versions.",
    ),
    ({"action": "markers"}, "Delete markers without other versions are removed.", "0 delete markers."),
    (
        {"action": "uploads", "days": "1", "prefix": "in/"},
        "Incomplete uploads of objects that begin with in/ are aborted after one day.",
        "0 uploads.",
    ),
)
"""What is put into the form, what it says then, and what the rule would remove now."""
_RAW: Final = [{"Key": "kind", "Value": "raw"}, {"Key": "of", "Value": "us"}]
_LATER: Final = datetime(2999, 1, 1, tzinfo=UTC)
WRITTEN: Final[list[dict[str, Any]]] = [
    {"Filter": {"And": {"Prefix": "old & <b>/", "Tags": _RAW}}, "Expiration": {"Days": 30}},
    {"Filter": {"And": {"Prefix": "train/", "ObjectSizeGreaterThan": 0}}, "Expiration": {"Date": _LATER}},
    {
        "Filter": {"ObjectSizeLessThan": 100},
        "NoncurrentVersionExpiration": {"NoncurrentDays": 2, "NewerNoncurrentVersions": 3},
    },
    {"Filter": {}, "Expiration": {"ExpiredObjectDeleteMarker": True}},
    {"Filter": {"Prefix": "in/"}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}},
]


def test_settings_policies_and_the_audit_log_in_words(daemon: Daemon, browser: Browser) -> None:
    attack = "<img src=x onerror=alert(18)>"
    s3 = daemon.client()
    statement = {
        "Sid": "x",
        "Effect": "Allow",
        "Principal": "*",
        "Action": ["s3:GetObject", "s3:ListBucket"],
        "Resource": ["arn:aws:s3:::photos", f"arn:aws:s3:::photos/{attack}*"],
        "Condition": {"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}},
    }
    absent_keys_pass = {
        "BoolIfExists": {"aws:SecureTransport": "true"},
        "Null": {"s3:prefix": "false"},
        "ForAllValues:StringLike": {"s3:RequestObjectTagKeys": "a*"},
    }
    more = {**statement, "Sid": "y", "Effect": "Deny", "Action": "s3:*"}
    more["Condition"] = absent_keys_pass
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement, more]})
    s3.put_bucket_policy(Bucket="photos", Policy=policy)
    s3.put_bucket_tagging(Bucket="photos", Tagging={"TagSet": [{"Key": "team", "Value": "vision"}]})
    s3.close()
    page = browser.page
    browser.show("/buckets/photos", "button:has-text('Settings')")
    page.click("button:has-text('Settings')")
    page.wait_for_selector("dialog >> text=On n1")
    words = (
        "Everyone, even without a key, may read objects and list objects. Applies to bucket photos and "
        f"objects of photos that begin with {attack}, if the client's address is in 10.0.0.0/8."
    )
    told = page.locator("dialog .words").inner_text()
    assert words in told
    for part in (
        "Everyone, even without a key, may never do anything with S3.",
        "the connection uses TLS (or not given)",
        "the listed prefix is present",
        "every value of s3:RequestObjectTagKeys is like a* (or not given)",
    ):
        assert part in told
    assert page.locator("dialog .tag").last.inner_text() == "team: vision"
    browser.screenshot("settings")
    expiry = page.locator("section[aria-label='Lifecycle rules']")
    assert "No lifecycle rules" in expiry.inner_text()
    page.click("summary:has-text('Add a rule')")
    page.select_option("dialog [name=action]", "date")
    page.fill("dialog [name=date]", "2020-01-01")  # never added: it would delete what the other tests read
    page.click("button:has-text('What would it remove now?')")
    expiry.get_by_text("If it were applied now, it would remove 32 objects, ").wait_for()
    page.select_option("dialog [name=action]", "days")
    for number, (fields, says, due) in enumerate(RULES, 1):
        for name, value in fields.items():
            if name == "action":
                page.select_option("dialog [name=action]", value)
            else:
                page.fill(f"dialog [name={name}]", value)
        expiry.get_by_label("Rule in words").get_by_text(says).wait_for()
        page.click("button:has-text('What would it remove now?')")
        expiry.get_by_text(f"If it were applied now, it would remove {due}").wait_for()
        page.click("button:has-text('Add rule')")
        page.wait_for_selector(f"[aria-label='Remove rule {number}']")
    browser.screenshot("lifecycle")
    with contextlib.closing(daemon.client()) as s3:
        rules = s3.get_bucket_lifecycle_configuration(Bucket="photos")["Rules"]
        assert [{"Status": "Enabled", **rule} for rule in WRITTEN] == [
            {name: rule[name] for name in rule if name != "ID"} for rule in rules
        ]
        some = {"And": {"Prefix": "a/", "ObjectSizeLessThan": 2048}}
        versions = {"NoncurrentDays": 1, "NewerNoncurrentVersions": 3}
        rules[1:] = [
            {"ID": "v", "Status": "Disabled", "Filter": some, "NoncurrentVersionExpiration": versions},
            {"Status": "Enabled", "Filter": {}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2}},
        ]
        s3.put_bucket_lifecycle_configuration(Bucket="photos", LifecycleConfiguration={"Rules": rules})
        page.keyboard.press("Escape")
        page.click("button:has-text('Settings')")
        page.wait_for_selector("[aria-label='Remove rule 3']")
        assert browser.violations() == []
        page.click("[aria-label='Remove rule 1']")
        page.wait_for_selector("[aria-label='Remove rule 3']", state="detached")
        first, second = expiry.locator("li").all_inner_texts()
        assert first.startswith(
            "disabled Earlier versions of objects that begin with a/, smaller than 2 KiB are removed one day "
            "after they were replaced, except the last 3. v"
        )
        assert second.startswith("Incomplete uploads of objects are aborted after 2 days.")
        page.click("[aria-label='Enable rule 1']")
        page.wait_for_selector("[aria-label='Disable rule 1']")
        assert s3.get_bucket_lifecycle_configuration(Bucket="photos")["Rules"][0]["Status"] == "Enabled"
        page.click("[aria-label='Remove rule 2']")
        page.wait_for_selector("[aria-label='Remove rule 2']", state="detached")
        page.click("[aria-label='Remove rule 1']")
        expiry.get_by_text("No lifecycle rules").wait_for()
        with pytest.raises(s3.exceptions.ClientError, match="NoSuchLifecycleConfiguration"):
            s3.get_bucket_lifecycle_configuration(Bucket="photos")
    page.keyboard.press("Escape")
    browser.show("/audit", "td")
    page.fill("[name=wanted]", "PutBucketPolicy")
    page.click("button:has-text('Show')")
    page.wait_for_selector("tbody tr")
    assert "s3://photos/" in page.locator("tbody tr").first.inner_text()


def test_where_the_objects_of_an_origin_are(daemon: Daemon, browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(3000))
    origin = {"url": f"file://{tmp_path}", "write": "off"}
    assert daemon.request("PUT", "/-/buckets/scans", json.dumps(origin).encode()).status == 200
    s3 = daemon.client()
    assert len(s3.get_object(Bucket="scans", Key="a.bin")["Body"].read()) == 3000
    browser.show("/buckets/scans", "button:has-text('Settings')")
    browser.page.click("button:has-text('Settings')")
    browser.page.wait_for_selector(f"dialog >> text=Origin: file://{tmp_path}. Objects are cached")
    text = browser.page.locator("dialog").inner_text()
    assert "The bucket is read-only." in text
    assert re.search(r"On n1: (1 object, 2.9 KiB|0 objects)", text), text
    browser.page.keyboard.press("Escape")
    s3.delete_bucket(Bucket="scans")


def test_a_key_without_rights_is_told_so_in_sentences(daemon: Daemon, chromium: Any) -> None:
    daemon.request("POST", "/-/admin/users", b'{"user_id": "guest"}')
    key = json.loads(daemon.request("POST", "/-/admin/keys", b'{"user_id": "guest"}').body)
    with open_browser(chromium, daemon) as browser:
        browser.page.goto(f"{daemon.endpoint}/console")
        browser.page.fill("[name=access]", key["access_key"])
        browser.page.fill("[name=secret]", "wrong")
        browser.page.click("button[type=submit]")
        browser.page.wait_for_selector("text=The access key does not exist, or the secret key is wrong.")
        browser.sign_in(key["access_key"], key["secret_key"])
        browser.page.wait_for_selector("text=Only root sees zones")
        for address in ("/buckets/photos", "/users"):
            browser.show(address, ".problem")
            assert (
                browser.page.locator(".problem").first.inner_text().startswith("Your key may not do this: ")
            )
        daemon.request("PATCH", f"/-/admin/keys/{key['access_key']}", b'{"enabled": false}')
        browser.page.goto(f"{daemon.endpoint}/-/console/#/buckets")
        browser.page.wait_for_selector("text=The session has ended: sign in again.")


def test_a_page_that_only_watches_leads_to_the_sign_in_when_its_session_ends(
    daemon: Daemon, chromium: Any
) -> None:
    daemon.request("POST", "/-/admin/users", b'{"user_id": "watcher"}')
    key = json.loads(daemon.request("POST", "/-/admin/keys", b'{"user_id": "watcher"}').body)
    with open_browser(chromium, daemon) as browser:
        browser.page.goto(f"{daemon.endpoint}/console")
        browser.sign_in(key["access_key"], key["secret_key"])
        browser.page.wait_for_selector("article[aria-label='Node n1']")
        daemon.request("PATCH", f"/-/admin/keys/{key['access_key']}", b'{"enabled": false}')
        browser.page.wait_for_selector("form >> text=The session has ended: sign in again.")

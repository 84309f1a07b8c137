"""The console of a mesh: a node is killed while somebody looks, and the node of the page itself."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

from tests.support.console_browser import open_browser, require_console

if TYPE_CHECKING:
    from tests.support.console_browser import Browser
    from tests.support.daemon_cluster import DaemonCluster
    from tests.support.daemons import Daemon

require_console()


def test_a_node_is_killed_while_somebody_looks(nodes: DaemonCluster, browser: Browser) -> None:
    page = browser.page
    key = nodes.key_with_primary("n3", "private", "nodes/small.json")  # n3 answers, and notes it
    with closing(nodes["n3"].client()) as s3:
        s3.put_object(Bucket="private", Key=key, Body=b'{"a": [1, 2]}')
        s3.get_object(Bucket="private", Key=key)["Body"].read()
    browser.show("/audit", ".problem")
    assert page.locator(".problem").all_inner_texts() == [
        "The requests of n2 are not shown: its audit log is not a file (set audit-log to a path)."
    ]
    page.fill("[name=wanted]", "GetObject")
    page.click("button:has-text('Show')")
    page.wait_for_selector("tbody tr:has-text('small.json'):has-text('n3')")
    browser.show("/overview", "article[aria-label='Node n3'] .tag.good")
    browser.await_order()
    nodes.kill("n3")
    page.wait_for_selector("text=/n3 (is not running|does not (answer|report))/")
    browser.screenshot("killed")
    assert browser.violations() == []
    browser.show("/audit", ".problem:has-text('The requests of n3 are not shown')")
    browser.show("/buckets/private?prefix=nodes%2F", "button:has-text('small.json')")
    page.click("button:has-text('small.json')")
    page.wait_for_selector("dialog pre")
    assert json.loads(page.locator("dialog pre").inner_text()) == {"a": [1, 2]}
    with page.expect_download() as download:
        page.click("dialog >> text=Download")
    assert download.value.path().read_text() == '{"a": [1, 2]}'
    page.keyboard.press("Escape")
    nodes["n3"].up()
    browser.show("/overview", "article[aria-label='Node n3'] .tag.good")
    browser.await_order()


def test_a_page_outlives_its_node(daemon: Daemon, chromium: Any) -> None:
    with open_browser(chromium, daemon) as browser:
        browser.sign_in(daemon.access_key, daemon.secret_key)
        browser.show("/overview", "section[aria-label=State]")
        browser.await_order()
        daemon.stop()
        browser.page.wait_for_selector(".problem:has-text('may be out of date')")
        daemon.up()
        browser.page.wait_for_selector(".problem", state="detached")
        browser.page.click("text=Sign out")
        browser.page.wait_for_selector("[name=secret]")
        assert browser.context.cookies() == []

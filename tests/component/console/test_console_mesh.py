"""The console of three nodes, in a real browser: an upload that is cut, and a node that is killed."""

from __future__ import annotations

import json
import os
import re
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from tests.support.bounded_wait import await_true
from tests.support.console_browser import open_browser, require_console, running_chromium
from tests.support.daemon_cluster import DaemonCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.console_browser import Browser

require_console()

PART: Final = 8 << 20
SIZE: Final = int(os.environ.get("MESH_TEST_UPLOAD_BYTES", str(24_000_000)))
"""Bytes of the upload; by hand once 200,000,000."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    """n2 has no audit log in a file."""
    logs = tmp_path_factory.mktemp("audit")
    own = {node: ("--audit-log", str(logs / node)) for node in ("n1", "n3")}
    with closing(
        DaemonCluster.start(3, args=("--console", "on", "--transform-workers", "1"), own=own)
    ) as running:
        with closing(running["n1"].client()) as s3:
            s3.create_bucket(Bucket="private")
        yield running


@pytest.fixture(scope="module")
def browser(mesh: DaemonCluster) -> Iterator[Browser]:
    with running_chromium() as chromium, open_browser(chromium, mesh["n1"], accept_downloads=True) as opened:
        opened.sign_in(mesh.access_key, mesh.secret_key)
        yield opened


def parts_in(urls: list[str]) -> list[int]:
    return sorted(int(re.findall(r"partNumber=(\d+)", url)[0]) for url in urls)


def test_an_upload_goes_on_after_a_cut(mesh: DaemonCluster, browser: Browser, tmp_path: Path) -> None:
    data = np.random.default_rng(1).bytes(SIZE)
    count = -(-SIZE // PART)
    (tmp_path / "large.bin").write_bytes(data)
    (tmp_path / "small.json").write_text('{"a": [1, 2]}')
    closed = browser.context.new_page()
    arrived: list[str] = []

    def note(request: Any) -> None:
        if "partNumber=" in request.url:
            arrived.append(request.url)

    closed.on("requestfinished", note)
    # It never arrives: a request that was only held back would be sent as the page closes.
    closed.route("**/*partNumber=2&*", lambda route: route.abort())
    closed.goto(f"{mesh['n1'].endpoint}/-/console/#/buckets/private")
    closed.set_input_files("input[type=file]", tmp_path / "large.bin")
    for _ in range(1500):
        if len(arrived) >= min(count - 1, 12):
            break
        closed.wait_for_timeout(20)
    closed.close()
    before = parts_in(arrived)
    assert 2 not in before
    sent: list[str] = []

    def cut_once(route: Any) -> None:
        sent.append(route.request.url)
        if len(sent) == 1:
            route.abort()
        else:
            route.continue_()

    browser.page.route("**/*partNumber=*", cut_once)
    browser.show("/buckets/private", "text=Nothing here")
    browser.page.set_input_files("input[type=file]", [tmp_path / "large.bin", tmp_path / "small.json"])
    browser.page.wait_for_selector("text=2 of 2 done")
    browser.page.unroute("**/*partNumber=*")
    left = [number for number in range(1, count + 1) if number not in before]
    assert set(left) >= set(parts_in(sent))
    assert len(sent) == len(set(parts_in(sent))) + 1
    with closing(mesh["n3"].client()) as s3:
        assert s3.get_object(Bucket="private", Key="large.bin")["Body"].read() == data


def test_a_node_is_killed_while_somebody_looks(mesh: DaemonCluster, browser: Browser) -> None:
    page = browser.page
    browser.show("/audit", "td")
    assert page.locator(".problem").all_inner_texts() == [
        "The requests of n2 are not shown: it has no audit log in a file."
    ]
    page.fill("[name=wanted]", "GetObject")  # asked of n3 above
    page.click("button:has-text('Show')")
    page.wait_for_selector("tbody tr:has-text('large.bin'):has-text('n3')")
    browser.show("/overview", "article[aria-label='Node n3'] .tag.good")
    page.wait_for_selector("text=Everything is in order.")
    mesh.kill("n3")
    page.wait_for_selector("text=/n3 does not (run|answer|tell)/")
    browser.screenshot("killed")
    assert browser.violations() == []
    browser.show("/audit", ".problem:has-text('The requests of n3 are not shown')")
    browser.show("/buckets/private", "button:has-text('small.json')")
    page.click("button:has-text('small.json')")
    page.wait_for_selector("dialog pre")
    assert json.loads(page.locator("dialog pre").inner_text()) == {"a": [1, 2]}
    with page.expect_download() as download:
        page.click("dialog >> text=Download")
    assert download.value.path().read_text() == '{"a": [1, 2]}'
    page.keyboard.press("Escape")
    mesh["n3"].up()
    browser.show("/overview", "article[aria-label='Node n3'] .tag.good")
    await_true(lambda: page.locator("text=Everything is in order.").count())

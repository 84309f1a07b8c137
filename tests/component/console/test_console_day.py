"""A page of the console that is open for long does not grow."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.console_browser import open_browser, require_console

if TYPE_CHECKING:
    from tests.support.daemons import Daemon

require_console()

LOOKS: Final = int(os.environ.get("MESH_TEST_LOOKS", "600"))
"""Looks of the stream, of ten seconds each; a day is 8,640."""
BEFORE: Final = 450
"""So many until the page has its last hour."""
GROWTH: Final = 120_000
"""Bytes: 600 looks that each keep 200 bytes are found."""
COLLECTIONS: Final = 4
PATIENCE: Final = 100.0
"""Seconds without a single look."""
STREAM: Final = Path(__file__).with_name("day_stream.js")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("address", "selector"),
    [("/overview", "figure.chart path.line"), ("/jobs", "article[aria-label='Loop resnet']")],
)
def test_a_page_that_is_open_for_a_day_does_not_grow(
    daemon: Daemon, chromium: Any, address: str, selector: str
) -> None:
    with open_browser(chromium, daemon, bypass_csp=True) as browser:
        page = browser.page
        page.add_init_script(path=STREAM)
        browser.sign_in(daemon.access_key, daemon.secret_key)
        browser.show(address, "h1")
        # What keeps memory is not what is painted, which takes half of the time.
        page.add_style_tag(content="main { display: none }")
        debugger = browser.context.new_cdp_session(page)

        def pass_until(looks: int) -> tuple[int, int]:
            """Let time pass; the bytes of the heap, and the nodes of the document."""
            page.evaluate("until => { day.until = until; day.go(); }", looks)
            seen, latest = -1, monotonic()
            while seen < looks:
                now = page.evaluate("() => day.looks()")
                if now > seen:
                    seen, latest = now, monotonic()
                assert monotonic() < latest + PATIENCE, f"no look after {seen} of {looks}"
                page.wait_for_timeout(100)
            page.wait_for_selector(selector, state="attached")
            return min(left() for _ in range(COLLECTIONS))

        def left() -> tuple[int, int]:
            """After a collection of garbage, which some of it survives."""
            page.wait_for_timeout(200)
            debugger.send("HeapProfiler.collectGarbage")
            heap = debugger.send("Runtime.getHeapUsage")["usedSize"]
            return heap, debugger.send("Memory.getDOMCounters")["nodes"]

        (before, nodes), (after, more) = pass_until(BEFORE), pass_until(BEFORE + LOOKS)
        print(f"{address}: {before:,} bytes and {nodes} nodes, after {LOOKS:,} looks {after:,} and {more}")
        assert after - before < GROWTH + 3 * LOOKS
        assert more - nodes < 50

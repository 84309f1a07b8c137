"""Every page of the console: in light and dark, on a screen and a phone, and for axe."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.console_browser import open_browser, require_console
from tests.support.console_data import loader_of

if TYPE_CHECKING:
    from tests.support.daemons import Daemon

require_console()


TOO_WIDE: Final = """() => [
    ...(document.documentElement.scrollWidth > innerWidth ? ["the page"] : []),
    ...[...document.querySelectorAll("main *")]
        .filter((each) => /auto|scroll/.test(getComputedStyle(each).overflowX))
        .filter((each) => each.scrollWidth > each.clientWidth + 1)
        .map((each) => `what scrolls: ${each.outerHTML.slice(0, 100)}`),
    ...[...document.querySelectorAll("main td, main dd, main li")]
        .map((each) => [each, each.clientWidth - 2 * parseFloat(getComputedStyle(each).paddingLeft)])
        .filter(([each, width]) => each.clientWidth && width < Math.min(64, 6 * each.innerText.length))
        .map(([each, width]) => `${width} px: ${each.outerHTML.slice(0, 100)}`),
]"""
"""What scrolls sideways, and cells whose words would break letter by letter."""
WIDTH: Final = "selector => document.querySelector(selector).getBoundingClientRect().width"
PAGES: Final = {
    "overview": ("/overview", "section[aria-label=Zones] tr:has-text('z2')"),
    "buckets": ("/buckets", "table"),
    "objects": ("/buckets/photos?prefix=train%2F&flat=1", ".object .name button"),
    "datasets": ("/datasets", "table a"),
    "plans": ("/batches", "table a"),
    "views": ("/views", "h1"),
    "ops": ("/ops", "section[aria-label=Library] td"),
    "jobs": ("/jobs", "section[aria-label=Training] :is(.empty, article)"),
    "users": ("/users", "section.user"),
    "audit": ("/audit", "td"),
}
LOOKS: Final = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark-phone": {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}},
}


@pytest.mark.sampled(2)
@pytest.mark.timeout(400)  # 20 s alone; a browser that draws without a GPU gets little of a busy machine
@pytest.mark.parametrize("look", LOOKS)
def test_every_page_is_there_and_accessible(
    daemon: Daemon, chromium: Any, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(daemon, "s3://photos/train", monkeypatch) as loader:
        plan = loader.plan.hash
    snapshot = json.loads(daemon.request("GET", f"/-/plans/{plan}").body)["snapshot"]
    pages = {
        **PAGES,
        "dataset": (f"/datasets/{snapshot}", ".bars >> nth=1"),
        "batch": (f"/batches/{plan}?batch=24", "ol.rows canvas"),
    }
    with open_browser(chromium, daemon, bypass_csp=True, **LOOKS[look]) as browser:
        browser.page.goto(f"{daemon.endpoint}/console")
        browser.page.wait_for_selector("form")
        found = {"sign-in": browser.violations()}
        browser.sign_in(daemon.access_key, daemon.secret_key)
        for name, (address, selector) in pages.items():
            browser.show(address, selector)
            browser.screenshot(f"{name}-{look}")
            found[name] = browser.violations()
            assert browser.page.evaluate(TOO_WIDE) == [], f"{name} does not fit"
            if name == "dataset":
                label, number = (browser.page.evaluate(WIDTH, f".bars {each}") for each in ("th", ".number"))
                assert label > 2 * number
        browser.page.click("details.plan summary")
        browser.page.wait_for_selector("details.plan .ops")
        found["plan"] = browser.violations()
        browser.page.click("details.plan summary")
        browser.page.click("ol.rows button")
        browser.page.wait_for_selector("dialog .pair canvas")
        browser.page.wait_for_selector("dialog .marked polygon >> nth=1")
        browser.screenshot(f"row-{look}")
        found["row"] = browser.violations()
        browser.show("/buckets/photos", ".object .name button")
        browser.page.click("button:has-text('Settings')")
        browser.page.click("summary:has-text('Add a rule')")
        browser.page.wait_for_selector("dialog select")
        browser.screenshot(f"settings-{look}")
        found["settings"] = browser.violations()
        assert browser.page.evaluate(TOO_WIDE) == [], "the settings do not fit"
    assert {name: each for name, each in found.items() if each} == {}

"""A test that fails leaves nothing to others: what its module made and shares is ended and made anew.

Law: no failure follows from another. Without this, a mesh that one test left with a node that will not
start, or with a device that is read-only, failed every test after it. Fixtures of the whole session stay:
they are one daemon that tests do not change.

A plugin of pytest; `tests/conftest.py` registers it.
"""

from __future__ import annotations

from typing import Any

import pytest

_failed = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_failed] = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    item.stash[_failed] |= report.failed
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Any:
    """After a failed test before its own end; where the end itself fails, after that."""
    try:
        if item.stash[_failed]:
            _end_shared(item.session)
    finally:
        try:
            result = yield
        except BaseException:
            _end_shared(item.session)
            raise
    return result


def _end_shared(session: pytest.Session) -> None:
    """What belongs to tests, classes, modules and packages, in pytest's own way."""
    session._setupstate.teardown_exact(session)  # type: ignore[arg-type]

"""A test that fails leaves nothing to others: what its module made and shares is ended and made anew.

Law: no failure follows from another. Without this, a mesh that one test left with a node that will not
start, or with a device that is read-only, failed every test after it. Fixtures of the whole session stay:
they are one daemon that tests do not change. What the failed test had open goes, too: pytest keeps its stack
until another test is called, which then failed by the unclosed sockets of this one.

A plugin of pytest; `tests/conftest.py` registers it.
"""

from __future__ import annotations

import gc
import sys
import warnings
from contextlib import suppress
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
    failed = item.stash[_failed]
    try:
        if failed:
            _end_shared(item.session)
    finally:
        try:
            result = yield
        except BaseException:
            failed = True
            _end_shared(item.session)
            raise
        finally:
            if failed:
                _forget_stack()
    return result


def _end_shared(session: pytest.Session) -> None:
    """What belongs to tests, classes, modules and packages, in pytest's own way."""
    session._setupstate.teardown_exact(session)  # type: ignore[arg-type]


def _forget_stack() -> None:
    """Let go of what pytest keeps for debuggers, and of all that only this refers to."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        with suppress(AttributeError):
            delattr(sys, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the test has failed already
        gc.collect()

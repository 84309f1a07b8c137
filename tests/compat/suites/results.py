"""What suites print, as test → "passed", "skipped", or what went wrong."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from tests.compat.conformance.knowing import PASSED, SKIPPED

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST = 200
_ID = re.compile(r"-?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class NoResultError(RuntimeError):
    """The suite printed nothing that says how its tests went, or did not come to its end."""


def of_junit(report: str) -> dict[str, str]:
    """Of pytest's XML: the test is named by its module, class and function."""
    found: dict[str, str] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        place = (case.get("classname") or "").rpartition("tests.")[2]
        name = f"{place}::{case.get('name')}"
        wrong = [child for child in case if child.tag in {"failure", "error"}]
        if wrong:
            found[name] = _short(wrong[0].get("message") or wrong[0].text or "")
        elif name not in found:  # an error at the end of a test is a second entry
            found[name] = SKIPPED if case.find("skipped") is not None else PASSED
    return _some(found)


def of_mint(output: str) -> dict[str, str]:
    """Of the lines of JSON that MinIO's Python suite prints. What it calls NA was answered 501: it counts as
    a failure here, so that each needs a reason."""
    found: dict[str, str] = {}
    for entry in _json_lines(output):
        if "name" not in entry or "status" not in entry:
            continue
        name = _unique(str(entry["name"]).partition(":")[2] or str(entry["name"]), found)
        if entry["status"] == "PASS":
            found[name] = PASSED
        else:
            found[name] = _short(str(entry.get("message") or entry.get("alert") or ""))
    return _some(found)


def of_mocha(report: str) -> dict[str, str]:
    """Of mocha's JSON reporter. Random ids in titles are left out."""
    try:
        told = json.loads(_ID.sub("", report))
    except ValueError:
        raise NoResultError(f"this is no report of mocha: {report[:_LONGEST]}") from None
    skipped = {test["fullTitle"] for test in told["pending"]}
    found: dict[str, str] = {}
    for test in told["tests"]:
        title = test["fullTitle"]
        name = _unique(title.removeprefix("functional tests "), found)
        if test["err"]:
            found[name] = _short(str(test["err"].get("message") or ""))
        else:
            found[name] = SKIPPED if title in skipped else PASSED
    titles = {test["fullTitle"] for test in told["tests"]}
    for failure in told["failures"]:  # a hook that fails is no test of its own
        if failure["fullTitle"] not in titles:
            name = failure["fullTitle"].removeprefix("functional tests ")
            found[name] = _short(str(failure["err"].get("message") or ""))
    return _some(found)


def _json_lines(output: str) -> Iterable[dict[str, Any]]:
    for line in output.splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict):
            yield told


def _unique(name: str, taken: Iterable[str]) -> str:
    """`name`, or `name (2)` and so on if a test of this name was there."""
    number, unique = 1, name
    while unique in taken:
        number += 1
        unique = f"{name} ({number})"
    return unique


def _short(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[0][:_LONGEST] if lines else "failed and said nothing"


def _some(found: dict[str, str]) -> dict[str, str]:
    if not found:
        raise NoResultError("no test was run")
    return found

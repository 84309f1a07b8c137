"""Ceph's s3-tests as this project runs them: configuration, users, and the outcome of each test.

Law: nothing of the suite is kept here; its place comes from outside. Files that test other services than S3
(IAM, STS, SNS, S3 Select) are left out; every other test is run and counted.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FILES = ("s3tests/functional/test_s3.py", "s3tests/functional/test_headers.py")
NEEDS = ("boto3", "pytest", "pytest-timeout", "requests", "lxml", "pytz", "isodate", "munch", "httplib2")
# A bucket made there reads back where it is; one of us-east-1 reads back nothing.
LOCATION = "eu-west-1"
_PEOPLE = ("main", "alt", "tenant", "iam", "iam root", "iam alt root")


@dataclass(frozen=True, slots=True)
class Person:
    """A user of the suite. `role` is what its configuration calls them."""

    role: str
    user_id: str
    access_key: str
    secret_key: str

    @property
    def name(self) -> str:
        return f"The {self.role} user"

    @property
    def email(self) -> str:
        return f"{self.user_id}@example.com"


def people() -> tuple[Person, ...]:
    """Users with fresh keys; six, as the suite's configuration asks for them, though S3's tests use three."""
    return tuple(
        Person(
            role, role.replace(" ", "-"), "SUITE" + secrets.token_hex(6).upper(), secrets.token_urlsafe(30)
        )
        for role in _PEOPLE
    )


def users_file(users: Sequence[Person]) -> str:
    """What `meshd serve --users` reads."""
    lines = []
    for person in users:
        lines.append(f"- user_id: {person.user_id}")
        lines += [f"  display_name: {person.name}", f"  email: {person.email}"]
        lines += [f"  access_key: {person.access_key}", f"  secret_key: {person.secret_key}"]
    return "\n".join(lines) + "\n"


def configuration(endpoint: str, users: Sequence[Person]) -> str:
    """The suite's configuration file."""
    where = urlsplit(endpoint)
    lines = ["[DEFAULT]", f"host = {where.hostname}", f"port = {where.port}"]
    lines += [f"is_secure = {where.scheme == 'https'}", "ssl_verify = False"]
    lines += ["[fixtures]", "bucket prefix = suite-{random}-"]
    for person in users:
        section = person.role if person.role.startswith("iam") else f"s3 {person.role}"
        lines += [f"[{section}]", f"display_name = {person.name}", f"user_id = {person.user_id}"]
        lines += [f"email = {person.email}", "tenant ="]
        lines += [f"access_key = {person.access_key}", f"secret_key = {person.secret_key}"]
        lines += [f"api_name = {LOCATION}", "lc_debug_interval = 1"] if person.role == "main" else []
    return "\n".join(lines) + "\n"


def outcomes(report: Path) -> Mapping[str, str]:
    """Test name → "passed", "skipped", or the first line of what went wrong, of pytest's XML report."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        wrong = [child for child in case if child.tag in {"failure", "error"}]
        skipped = case.find("skipped") is not None
        text = (wrong[0].get("message") or "failed").splitlines()[0][:200] if wrong else ""
        found[case.get("name") or "?"] = text or ("skipped" if skipped else "passed")
    return found

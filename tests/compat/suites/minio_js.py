"""minio-js's functional tests, run by mocha over its sources."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from tests.compat.homes import HOMES_AT, node, npm
from tests.compat.suites.places import Result
from tests.compat.suites.results import NoResultError, of_mocha

if TYPE_CHECKING:
    from pathlib import Path

    from tests.compat.suites.places import Place


def run(place: Place) -> Result:
    """All of them. A step that fails makes the steps after it pending: those count as skipped."""
    sources = _installed(place)
    environment = {
        "ACCESS_KEY": place.daemon.access_key,
        "SECRET_KEY": place.daemon.secret_key,
        "SERVER_ENDPOINT": place.host,
        "ENABLE_HTTPS": "0",
        "MINIO_REGION": "us-east-1",
    }
    report = place.scratch / "report.json"
    program = [node(), "node_modules/mocha/bin/mocha.js", "--no-config", "--exit", "--ui", "bdd"]
    program += ["--require", "source-map-support/register", "--require", "./babel-register.js"]
    program += ["--reporter", "json", "--reporter-option", f"output={report}"]
    program += ["tests/functional/functional-tests.js"]
    log = place.run(program, cwd=sources, environment=environment, codes=range(256))
    if not report.exists():
        raise NoResultError(f"mocha did not come to its end:\n{log[-3000:]}")
    version = json.loads((sources / "package.json").read_text())["version"]
    return Result(of_mocha(report.read_text()), version)


def _installed(place: Place) -> Path:
    """A copy of the checkout, with what its lock file names."""
    where = HOMES_AT / "suite-minio-js"
    stamp, wanted = where / ".installed", (place.repository / "package-lock.json").read_text()
    if not (stamp.exists() and stamp.read_text() == wanted):
        shutil.rmtree(where, ignore_errors=True)
        shutil.copytree(place.repository, where, ignore=shutil.ignore_patterns("node_modules", ".git"))
        flags = ["--ignore-scripts", "--no-fund", "--no-audit", "--loglevel=error"]
        place.run([npm(), "ci", *flags], cwd=where)
        stamp.write_text(wanted)
    return where

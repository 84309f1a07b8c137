"""`make conformance SUITE=path`: Ceph's s3-tests against a node, over HTTP and TLS, held against the list
of known failures. SUITE is a checkout of github.com/ceph/s3-tests; nothing of it is copied here.

Exits with 1 on a test that fails and is not listed, or is listed and passes.
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.compat.conformance.knowing import LIST, PASSED, SKIPPED, judge, known
from tests.compat.conformance.suites import FILES, NEEDS, configuration, outcomes, people, users_file
from tests.compat.homes import HOMES_AT, build
from tests.support.daemons import Daemon

HOME = HOMES_AT / "conformance"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat.conformance", description=__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--door", action="append", choices=["http", "https"])
    parser.add_argument("-k", dest="select", default="", help="pytest's -k")
    parser.add_argument("--keep", type=Path, help="folder for pytest's and the node's logs")
    options = parser.parse_args()
    if not (options.suite / FILES[0]).exists():
        parser.error(f"{options.suite} is no checkout of s3-tests: there is no {FILES[0]}")
    build("conformance", NEEDS)
    code = 0
    for door in options.door or ["http", "https"]:
        seen = run(options.suite.resolve(), door, options.select, options.keep)
        judgement = judge(seen, known(LIST.read_text(), door), whole=not options.select)
        code |= not judgement
        counts = collections.Counter(
            value if value in {PASSED, SKIPPED} else "failed" for value in seen.values()
        )
        print(f"over {door}: " + ", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
        for name, what in judgement.new.items():
            print(f"  new failure: {name}: {what}")
        for name in judgement.mended:
            print(f"  passes, take it off the list: {name}")
        for name in judgement.gone:
            print(f"  listed, but there is no such test: {name}")
    return int(code)


def run(suite: Path, door: str, select: str, keep: Path | None) -> dict[str, str]:
    """Outcome of each test over one door."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        folder = (keep / door).resolve() if keep else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        users = people()
        (folder / "users.yaml").write_text(users_file(users))
        report, log = folder / "report.xml", folder / "pytest.log"
        report.unlink(missing_ok=True)
        with (
            Daemon.start(
                args=["--users", str(folder / "users.yaml")], workers=2, tls=door == "https"
            ) as node,
            log.open("wb") as out,
        ):
            (folder / "suite.conf").write_text(configuration(node.endpoint, users))
            command = [
                str(HOME / "bin" / "python"),
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-W",
                "ignore",
            ]
            command += ["--timeout=120", f"--junitxml={report}", *(["-k", select] if select else []), *FILES]
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(folder),
                "S3TEST_CONF": str(folder / "suite.conf"),
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            if node.ca_cert:
                environment["SSL_CERT_FILE"] = node.ca_cert
            subprocess.run(command, cwd=suite, env=environment, stdout=out, stderr=out, check=False)
            (folder / "node.log").write_text(node.output())
        if not report.exists():
            raise SystemExit(f"pytest did not come to its end:\n{log.read_text(errors='replace')[-3000:]}")
        return dict(outcomes(report))


if __name__ == "__main__":
    sys.exit(main())

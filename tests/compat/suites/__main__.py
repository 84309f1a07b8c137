"""`python -m tests.compat.suites`: other people's test suites, unmodified, against a daemon.

Each runs against a daemon of its own, in an environment of its own under .venv-compat, and is held
against `expected/NAME.txt`, the list of tests that are expected to fail, with a reason each. A suite that
went as expected gets its row in docs/compatibility.md; rows of suites that were not run stay.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.compat.conformance.knowing import judge, known
from tests.compat.homes import ROOT, build
from tests.compat.suites.catalogue import SUITES
from tests.compat.suites.pages import KEPT, PAGE, Row, keep, with_suites
from tests.compat.suites.places import Place, ProgramError
from tests.compat.suites.results import NoResultError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from tests.compat.suites.catalogue import Suite
    from tests.compat.suites.places import Result

EXPECTED = Path(__file__).with_name("expected")
_EPILOG = """
suites that need a checkout (--suites DIR holds one folder for each):
{checkouts}

examples:
  python -m tests.compat.suites --suite rclone --suite lance
  python -m tests.compat.suites --suites ~/checkouts
  python -m tests.compat.suites --suites ~/checkouts --suite s3fs --keep /tmp/logs

Exits with 1 when a test fails that is not expected to, when one that is expected to fail passes or is no
more in the suite, or when a suite did not come to its end.
"""


class CheckoutError(RuntimeError):
    """The checkout is not there, or is of another version; the message says what to do."""


def main() -> int:
    options = _parser().parse_args()
    code = 0
    for suite in SUITES:
        if options.suite and suite.name not in options.suite:
            continue
        try:
            checkout = checkout_of(suite, options.suites)
        except CheckoutError as error:
            print(f"{suite.name}: {'not run' if options.suite else 'skipped'}: {error}", flush=True)
            code |= bool(options.suite or options.suites)
            continue
        code |= not _went_well(suite, checkout, options.keep)
    return code


def _parser() -> argparse.ArgumentParser:
    checkouts = "\n".join(f"  {suite.clone}" for suite in SUITES if suite.repository)
    parser = argparse.ArgumentParser(
        prog="python -m tests.compat.suites",
        description=__doc__,
        epilog=_EPILOG.format(checkouts=checkouts),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--suite",
        action="append",
        metavar="NAME",
        choices=[suite.name for suite in SUITES],
        help="run this one only; may be given more than once: " + ", ".join(suite.name for suite in SUITES),
    )
    parser.add_argument(
        "--suites",
        type=Path,
        metavar="DIR",
        help="the folder of checkouts; without it, suites that need one are skipped",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and reports of each suite here")
    return parser


def checkout_of(suite: Suite, folder: Path | None) -> Path | None:
    """The suite's checkout at the right tag; None for one that needs none. Raises CheckoutError."""
    if not suite.repository:
        return None
    if folder is None:
        raise CheckoutError(f"its tests are in no package: {suite.clone}, then --suites DIR")
    where = folder.resolve() / suite.folder
    if not where.is_dir():
        raise CheckoutError(f"{where} is not there: {suite.clone}")
    told = _git(where, "describe", "--tags", "--exact-match")
    if told.stdout.strip() != suite.tag:
        seen = told.stdout.strip() or told.stderr.strip()
        raise CheckoutError(f"{where} is not at tag {suite.tag} ({seen}): {suite.clone}")
    return where


def _git(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def _went_well(suite: Suite, checkout: Path | None, kept: Path | None) -> bool:
    """Run it, print how it went, and give it its row on the page if it went as expected."""
    print(f"{suite.name}: {suite.about}", flush=True)
    home = build(f"suite-{suite.name}", suite.packages) if suite.packages else Path(sys.prefix)
    try:
        result = _run(suite, home, checkout, kept)
    except (ProgramError, NoResultError) as error:
        print(f"{suite.name}: did not come to its end: {error}", flush=True)
        return False
    listed = EXPECTED / f"{suite.name}.txt"
    reasons = known(listed.read_text()) if listed.exists() else {}
    judgement = judge(result.outcomes, reasons)
    commit = _git(checkout, "rev-parse", "--short=7", "HEAD").stdout.strip() if checkout else ""
    about = f"{suite.about}; {result.notes}" if result.notes else suite.about
    row = Row.of(result, reasons, about, commit)
    print(
        f"{suite.name} {row.version}: {row.passed} passed, {len(row.expected)} failed as expected, "
        f"{row.skipped} skipped, {len(judgement.new)} failed otherwise; {result.notes}",
        flush=True,
    )
    for name, what in judgement.new.items():
        print(f"  new failure: {name} | {what}")
    for name in judgement.mended:
        print(f"  passes, take it off the list: {name}")
    for name in judgement.gone:
        print(f"  listed, but there is no such test: {name}")
    if judgement:
        rows = keep(KEPT, suite.name, row)
        PAGE.write_text(with_suites(PAGE.read_text(), rows))
        print(f"  a row of {PAGE.relative_to(ROOT)}", flush=True)
    return bool(judgement)


def _run(suite: Suite, home: Path, checkout: Path | None, kept: Path | None) -> Result:
    with tempfile.TemporaryDirectory(prefix="suite-") as scratch:
        folder = kept.resolve() / suite.name if kept else Path(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with Daemon.start(workers=suite.workers) as daemon:
            try:
                return suite.run(Place(daemon, home, folder, checkout))
            finally:
                (folder / "daemon.log").write_text(daemon.output())


if __name__ == "__main__":
    sys.exit(main())

"""The harness of the suites: what it reads, how it judges, what it writes. None of the suites is run."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, cast

import pytest

from tests.compat.conformance.knowing import PASSED, SKIPPED, judge, known
from tests.compat.suites.__main__ import EXPECTED, CheckoutError, checkout_of
from tests.compat.suites.catalogue import SUITES, Suite
from tests.compat.suites.commits import COMMITS, WRITERS, Journal, verdicts
from tests.compat.suites.inside.committer import CrowdedError, commit
from tests.compat.suites.many_files import Steps, digest, tree, unequal
from tests.compat.suites.pages import KEPT, PAGE, TITLE, Row, keep, kept, section, with_suites
from tests.compat.suites.places import Place, ProgramError, Result
from tests.compat.suites.results import NoResultError, of_junit, of_mint, of_mocha

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemons import Daemon

JUNIT = """<testsuites><testsuite>
<testcase classname="s3fs.tests.derived.s3fs_test.TestPut" name="test_a[1-2]"/>
<testcase classname="s3fs.tests.test_s3fs" name="test_b"><failure message="OSError: no&#10;more"/></testcase>
<testcase classname="s3fs.tests.test_s3fs" name="test_c"><skipped message="later"/></testcase>
<testcase classname="s3fs.tests.test_s3fs" name="test_d"/>
<testcase classname="s3fs.tests.test_s3fs" name="test_d"><error message="on teardown"/></testcase>
<testcase classname="" name="tests.unimportable"><error message=""/></testcase>
</testsuite></testsuites>"""


def test_pytests_report() -> None:
    assert of_junit(JUNIT) == {
        "derived.s3fs_test.TestPut::test_a[1-2]": PASSED,
        "test_s3fs::test_b": "OSError: no",
        "test_s3fs::test_c": SKIPPED,
        "test_s3fs::test_d": "on teardown",
        "::tests.unimportable": "failed and said nothing",
    }


def test_minios_lines() -> None:
    lines = [
        {"name": "minio-py:test_put", "status": "PASS"},
        {"name": "minio-py:test_put", "status": "FAIL", "message": "S3Error: x\ny"},
        {"name": "minio-py:test_select", "status": "NA", "alert": "Not Implemented"},
    ]
    output = "a warning\n" + "\n".join(map(json.dumps, lines)) + "\n17\n"
    assert of_mint(output) == {
        "test_put": PASSED,
        "test_put (2)": "S3Error: x",
        "test_select": "Not Implemented",
    }


def test_mochas_report() -> None:
    tests = [
        {"fullTitle": "functional tests put ok", "err": {}},
        {"fullTitle": "functional tests put ok", "err": {"message": "S3Error: no\nat line 1"}},
        {"fullTitle": "functional tests later", "err": {}},
    ]
    hook = {"fullTitle": 'functional tests "before all" hook', "err": {"message": "no bucket"}}
    report = {"tests": tests, "pending": [tests[2]], "failures": [tests[1], hook]}
    assert of_mocha(json.dumps(report)) == {
        "put ok": PASSED,
        "put ok (2)": "S3Error: no",
        "later": SKIPPED,
        '"before all" hook': "no bucket",
    }


@pytest.mark.parametrize("text", ["", "no json", '{"name": 1}'])
def test_a_suite_that_says_nothing_did_not_pass(text: str) -> None:
    with pytest.raises(NoResultError):
        of_mint(text)
    with pytest.raises((NoResultError, KeyError)):
        of_mocha(text)
    with pytest.raises(NoResultError):
        of_junit("<testsuites/>")


def test_the_lists_have_a_suite_and_a_reason_a_line() -> None:
    files = sorted(EXPECTED.glob("*"))
    assert files
    for file in files:
        assert file.stem in {suite.name for suite in SUITES}, file
        assert known(file.read_text()), file


def test_an_expected_failure_that_passes_and_one_that_is_gone_are_complaints() -> None:
    judgement = judge({"a": PASSED, "b": "wrong", "c": "wrong"}, {"a": "why", "b": "why", "d": "why"})
    assert (judgement.mended, dict(judgement.new), judgement.gone) == (("a",), {"c": "wrong"}, ("d",))
    assert not judgement


ROW = Row.of(
    Result({"a": PASSED, "b": PASSED, "c": SKIPPED, "d": "501", "e": "501"}, "1.2", ""),
    {"d": "not built", "e": "not built", "z": "passes here"},
    "all | tests",
)


def test_a_row_counts_what_was_seen() -> None:
    assert (ROW.version, ROW.passed, ROW.skipped) == ("1.2", 2, 1)
    assert Row.of(Result({"a": PASSED}, "1"), {}, "all", "f671ca9").version == "1 (f671ca9)"
    assert ROW.expected == {"d": "not built", "e": "not built"}


def test_a_run_of_one_suite_replaces_its_own_row_only(tmp_path: Path) -> None:
    at = tmp_path / "kept.json"
    keep(at, "one", ROW)
    rows = keep(at, "two", Row("3", "more", 7, 0, {}))
    newer = Row("4", "more", 8, 0, {})
    assert keep(at, "two", newer) == {"one": rows["one"], "two": newer} == kept(at)


def test_the_page_keeps_its_clients_and_has_one_part_of_suites() -> None:
    first = with_suites("# Clients\n\nthese\n", {"one": ROW})
    again = with_suites(first, {"one": ROW, "two": Row("3", "more", 1_234, 0, {})})
    assert again.startswith("# Clients\n\nthese\n\n")
    assert again.count(TITLE) == 1
    assert "| one 1.2 | all \\| tests | 2 | 2 | 1 |" in again
    assert "| two 3 | more | 1,234 | 0 | 0 |" in again
    assert "| one | `d`, `e` | not built |" in again
    assert with_suites(again, {}) == "# Clients\n\nthese\n"


def test_the_page_is_what_the_kept_rows_say() -> None:
    rows = kept(KEPT)
    assert rows.keys() <= {suite.name for suite in SUITES}
    assert PAGE.read_text().endswith(section(rows))


def test_expected_failures_on_the_page_are_those_of_the_lists() -> None:
    for name, row in kept(KEPT).items():
        listed = EXPECTED / f"{name}.txt"
        assert row.expected == (known(listed.read_text()) if listed.exists() else {}), name


def test_a_checkout_is_asked_for_by_its_tag(tmp_path: Path) -> None:
    suite = Suite("x", "", lambda _place: ROWLESS, (), "https://example.com/people/x-tests", "v1")
    with pytest.raises(
        CheckoutError, match=r"git clone --depth 1 --branch v1 https://example\.com/people/x-tests"
    ):
        checkout_of(suite, None)
    with pytest.raises(CheckoutError, match="is not there"):
        checkout_of(suite, tmp_path)
    where = tmp_path / "x-tests"
    git = ["git", "-C", str(where), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", "init", "-q", str(where)], check=True, timeout=60)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True, timeout=60)
    with pytest.raises(CheckoutError, match="not at tag v1"):
        checkout_of(suite, tmp_path)
    subprocess.run([*git, "tag", "v1"], check=True, timeout=60)
    assert checkout_of(suite, tmp_path) == where
    assert checkout_of(Suite("y", "", lambda _place: ROWLESS), None) is None


ROWLESS = Result({}, "")


def test_suites_that_need_a_checkout_are_skipped_with_a_line() -> None:
    names = {suite.name for suite in SUITES if suite.repository}
    command = [sys.executable, "-m", "tests.compat.suites"]
    for name in sorted(names):
        command += ["--suite", name]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 1, "what was asked for by name was not run"
    assert {line.partition(":")[0] for line in told.stdout.splitlines()} == names
    assert all("git clone" in line for line in told.stdout.splitlines())


def test_rows_are_judged_by_the_journal() -> None:
    lines = ["begin w0-0", "again w0-0", "done w0-0", "begin w1-0", "begin w2-0", "done w2-0", "begin"]
    journal = Journal.of(lines)
    assert (journal.done, journal.again) == (("w0-0", "w2-0"), 1)
    good = verdicts(journal, ["w0-0", "w2-0", "w1-0"])  # w1-0 was done, and nobody lived to say so
    assert set(good.values()) == {PASSED}
    lost, twice, invented = verdicts(journal, ["w0-0", "w0-0", "w9-9"]).values()
    assert "w2-0" in lost
    assert "w0-0" in twice
    assert "w9-9" in invented


def test_a_committer_tries_the_same_row_again(tmp_path: Path) -> None:
    class Crowded:
        def __init__(self, bucket: str) -> None:
            assert bucket == "b"
            self.committed: list[str] = []
            self.refused = False

        def create(self) -> None:
            raise NotImplementedError

        def rows(self) -> list[str]:
            return self.committed

        def commit(self, row: str) -> None:
            self.refused = not self.refused
            if self.refused:
                raise CrowdedError
            self.committed.append(row)

    table = Crowded("b")
    commit(table, tmp_path / "journal", ["a", "b"])
    journal = Journal.of((tmp_path / "journal").read_text().splitlines())
    assert table.rows() == list(journal.done) == ["a", "b"]
    assert journal.again == 2
    assert WRITERS * COMMITS == 400


def test_folders_are_compared_by_their_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert tree(one, 120) == tree(other, 120) == sum(file.stat().st_size for file in one.rglob("*.bin"))
    assert len(digest(one)) == 120
    assert not unequal(one, other)
    changed = sorted(other.rglob("*.bin"))[7]
    changed.write_bytes(changed.read_bytes() + b"x")
    assert str(changed.relative_to(other)) in unequal(one, other)
    changed.unlink()
    assert unequal(one, other).startswith("1 of 120")


def test_a_step_that_raises_or_complains_has_failed() -> None:
    def broken() -> str:
        raise ProgramError("ended with\n 1")

    steps = Steps()
    assert steps.do("good", lambda: "")
    assert not steps.do("bad", lambda: "3 files differ")
    assert not steps.do("broken", broken)
    assert steps.outcomes == {"good": PASSED, "bad": "3 files differ", "broken": "ended with 1"}


class NoDaemon:
    access_key, secret_key, endpoint = "key", "secret", "http://127.0.0.1:9"


def test_programs_end_within_their_limit_and_fail_with_what_they_said(tmp_path: Path) -> None:
    place = Place(cast("Daemon", NoDaemon()), tmp_path, tmp_path)
    assert place.run(["sh", "-c", "echo $AWS_ACCESS_KEY_ID"]) == "key\n"
    with pytest.raises(ProgramError, match="ended with 3\nso it is"):
        place.run(["sh", "-c", "echo so it is; exit 3"])
    with pytest.raises(ProgramError, match=r"longer than 0 s"):
        place.run(["sleep", "600"], limit=0.2)

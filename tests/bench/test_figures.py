"""What is kept of a run, what the report makes of it, and what the command says of both."""

from __future__ import annotations

import pkgutil
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from bench import __main__ as command
from bench import catalogue, headlines, machine, provenance, report
from bench.catalogue import BY_NAME, ENTRIES, Entry
from bench.loader_report import OURS
from bench.processes import ChildError
from bench.progress import Progress
from bench.results import Figure, RowResult, finished, keep, load
from bench.rows import FULL, QUICK, store_rows
from bench.store_report import bar_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bench.runner import Bench, Outcome

HERE = {"cpu": "Here", "cores_used": 2, "cores": 2, "memory_gib": 8, "kernel": "6.1"}
HERE |= {"congestion_control": "reno", "python": "3.11.7"}


def row(name: str, *figures: Figure, **fields: Any) -> RowResult:
    made = RowResult(name, name, "2026-01-01T10:00:00+00:00", "abc", {"rounds": 2}, figures, {}, HERE)
    return replace(made, **fields)


# --- what is in the repository ----------------------------------------------------------------------------


def test_the_report_is_what_the_kept_figures_give() -> None:
    """`python -m bench --report` writes it anew, after a change of its words or a row."""
    assert command.REPORT.read_text() == report.render(load(command.KEPT), FULL)


def test_the_readme_shows_ratios_of_the_kept_figures() -> None:
    page, kept = command.README.read_text(), load(command.KEPT)
    assert page == headlines.placed(page, kept)
    without = headlines.placed(page, {name: found for name, found in kept.items() if name != "loaders"})
    assert len(page.splitlines()) == len(without.splitlines()) + 2  # the first epoch, the same again
    with pytest.raises(ValueError, match="no place"):
        headlines.placed("# A page", kept)


def test_kept_rows_say_where_they_come_from() -> None:
    kept = load(command.KEPT)
    assert set(kept) <= set(BY_NAME)
    for name, found in kept.items():
        assert found.name == name
        assert found.taken
        assert found.commit
        assert machine.sentence(found.machine)
        assert found.versions["Ours"]
        lost = {figure.round is None for figure in found.figures}
        assert lost == {bool(found.recovered)}, name
        assert found.recovered or not found.ratios, name


def test_every_row_is_of_one_section_of_the_report() -> None:
    named = [name for section in report.SECTIONS for name in section.names]
    assert sorted(named) == sorted(BY_NAME)


# --- what the report says of provenance -------------------------------------------------------------------


def test_rows_of_two_machines_are_told_apart() -> None:
    there = HERE | {"cpu": "There"}
    rows = {
        "get-10k": row("get-10k", Figure("meshd", 0, {"rate": 1.0})),
        "put-10k": row("put-10k", Figure("meshd", 0, {"rate": 1.0}), machine=there, commit="def"),
    }
    text = report.render(rows, QUICK)
    assert "*Taken: get-10k on 2026-01-01 at commit abc, machine A, 2 rounds; " in text
    assert "put-10k on 2026-01-01 at commit def, machine B, 2 rounds.*" in text
    assert "- **Machine A**: Here, 2 of 2 cores" in text
    assert "- **Machine B**: There, 2 of 2 cores" in text
    alone = report.render({"get-10k": rows["get-10k"]}, QUICK)
    assert "machine A" not in alone
    assert "\n- Here, 2 of 2 cores" in alone


def test_rows_of_two_machines_are_not_held_against_each_other() -> None:
    """The limits, and a small bucket beside a large one, are rows of their own."""
    there = HERE | {"cpu": "There"}
    rates = {"socket": {"gigabytes": 8.0}, "transform": {"rate": 2000.0}}
    rows = {
        "get-64m": row("get-64m", Figure("meshd", 0, {"gigabytes": 4.0})),
        "list": row("list", Figure("meshd", 0, {"rate": 90.0})),
        "list-few": row("list-few", Figure("meshd", 0, {"rate": 100.0})),
        "loaders": row("loaders", Figure(OURS, 0, {"first_rate": 1000.0})),
        "limits": row("limits", *(Figure(name, 0, metrics) for name, metrics in rates.items())),
    }
    rows["loaders"] = replace(rows["loaders"], setup={"rounds": 1, "photographs": 9, "batch": 3})
    said = ("4 MiB × 4 is 50 % of it", "against the bucket of 1,000 | 0.90×", "the first epoch is 50 % of it")
    alike = report.render(rows, QUICK)
    assert [words in alike for words in said] == [True] * 3
    for name in ("limits", "list-few"):
        rows[name] = replace(rows[name], machine=there)
    apart = report.render(rows, QUICK)
    assert [words in apart for words in said] == [False] * 3


def test_versions_that_differ_between_rows_are_both_told() -> None:
    rows = {
        name: row(name, versions={"Ours": {"numpy": version, "lmdb": "1"}})
        for name, version in (("cold", "2.0"), ("ops", "2.1"))
    }
    assert "- Ours: numpy 2.0 and 2.1, lmdb 1" in "\n".join(provenance.section(rows))


def test_medians_whose_rounds_are_lost_are_marked() -> None:
    printed = row("get-10k", Figure("meshd", None, {"rate": 0.5}), Figure("seaweedfs", None, {"rate": 0.2}))
    printed = replace(printed, recovered="As printed.", ratios={"meshd ÷ seaweedfs, rate": 2.68})
    assert printed.ratio("meshd", "seaweedfs", "rate") == 2.68
    assert printed.ratio("seaweedfs", "meshd", "rate") == 0.4
    text = report.render({"get-10k": printed}, QUICK)
    assert "2 rounds†.*" in text
    assert "- † As printed." in text


def test_a_note_stands_by_its_row() -> None:
    assert provenance.taken({"ops": row("ops", note="on a cold day.")}, ["ops"])[0].endswith(
        ".* ops: on a cold day."
    )


# --- what a run keeps -------------------------------------------------------------------------------------


def test_of_an_interrupted_row_the_finished_rounds_count() -> None:
    figures = [Figure(name, number, {}) for number in range(3) for name in "ab"]
    assert finished(figures[:5]) == tuple(figures[:4])
    assert finished(figures[:4]) == tuple(figures[:2])  # nobody has said yet that the second is over
    assert finished(figures[:1]) == finished([]) == ()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No servers, no look at the machine."""
    monkeypatch.setattr(command, "Bench", lambda *_: nullcontext(None))
    monkeypatch.setattr(machine, "busy", lambda: 0.0)
    monkeypatch.setattr(machine, "pin", lambda: [0])
    monkeypatch.setattr(machine, "versions", lambda _: {})
    monkeypatch.setattr("signal.signal", lambda *_: None)


def taking(name: str, *figures: Figure, stop: bool = False, **skipped: str) -> Entry:
    """A row that gives these figures, and is then interrupted if it is to be."""

    def run(_: Bench) -> Outcome:
        def each() -> Iterator[Figure]:
            yield from figures
            if stop:
                raise KeyboardInterrupt

        return name, each(), skipped

    return Entry(name, "", 1, (), run)


def called(
    monkeypatch: pytest.MonkeyPatch, folder: Path, entry: Entry, *flags: str, also: Entry | None = None
) -> tuple[int, str]:
    entries = tuple(each for each in (entry, also) if each)
    monkeypatch.setattr(command, "ENTRIES", entries)
    monkeypatch.setattr(command, "BY_NAME", {each.name: each for each in entries})
    argv = ["--figures", str(folder), "--scratch", str(folder / "scratch"), *flags]
    done = CliRunner().invoke(command.main, argv)
    return done.exit_code, done.output


@pytest.mark.usefixtures("quiet")
def test_an_interrupted_run_keeps_finished_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [Figure("meshd", number, {"rate": 1.0 + number}) for number in range(3)]
    code, _ = called(monkeypatch, tmp_path / "kept", taking("get-10k", *figures, stop=True))
    assert code == 130
    [found] = load(tmp_path / "kept").values()
    assert [figure.round for figure in found.figures] == [0, 1]
    assert found.setup["rounds"] == 2
    assert "get-10k on" in (tmp_path / "kept.md").read_text()
    code, _ = called(monkeypatch, tmp_path / "kept", taking("get-10k", figures[0], stop=True))
    assert code == 130
    assert load(tmp_path / "kept") == {"get-10k": found}  # not one round was finished


@pytest.mark.usefixtures("quiet")
def test_one_row_is_renewed_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, before = (row(name, Figure("meshd", 0, {"rate": 1.0})) for name in ("put-10k", "get-10k"))
    for each in (other, before):
        keep(tmp_path / "kept", each)
    entry = taking("get-10k", Figure("meshd", 0, {"rate": 7.0}))
    code, said = called(monkeypatch, tmp_path / "kept", entry)
    assert code == 0, said
    kept = load(tmp_path / "kept")
    assert kept["put-10k"] == other
    assert kept["get-10k"].value("meshd", "rate") == 7.0
    assert kept["get-10k"].machine == machine.describe()
    assert "| PUT 10 KiB × 16 |" in (tmp_path / "kept.md").read_text()


@pytest.mark.usefixtures("quiet")
def test_a_row_nobody_took_part_in_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, skipped = tmp_path / "kept", taking("get-10k", meshd="wrk is not installed")
    before = row("get-10k", Figure("meshd", 0, {"rate": 1.0}))
    keep(folder, before)
    _, said = called(monkeypatch, folder, skipped)
    assert "wrk is not installed" in said
    assert load(folder) == {"get-10k": before}


@pytest.mark.usefixtures("quiet")
def test_a_row_that_ends_with_an_error_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, before = tmp_path / "kept", row("get-10k", Figure("meshd", 0, {"rate": 1.0}))
    keep(folder, before)

    def broken(_: Bench) -> Outcome:
        raise ChildError("seaweedfs did not open its port")

    good = taking("ops", Figure("meshd", 0, {"rate": 500.0}))
    code, said = called(monkeypatch, folder, Entry("get-10k", "", 1, (), broken), also=good)
    assert code == 1
    assert "did not open its port" in said
    assert load(folder)["get-10k"] == before
    assert load(folder)["ops"].value("meshd", "rate") == 500.0


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("rate", "problem", "flags", "code"),
    [
        (9.0, "", ("--strict",), 0),
        (1.0, "", (), 0),
        (1.0, "", ("--strict",), 3),
        (9.0, "it ended", ("--strict",), 1),
    ],
)
def test_exit_codes(
    rate: float,
    problem: str,
    flags: tuple[str, ...],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = {"meshd": rate, "seaweedfs": 2.0}
    figures = [Figure(name, 0, {"rate": each, "p99_ms": 1.0}) for name, each in rates.items()]
    figures.append(Figure("nginx", 0, {"rate": 20.0}, problem))
    found, said = called(monkeypatch, tmp_path / "kept", taking("get-10k", *figures), *flags)
    assert found == code, said
    assert ("bar: GET 10 KiB × 16: meshd ÷ SeaweedFS, 0.50×, ≥ 1.5 missed" in said) == (rate == 1.0)


def test_the_report_alone_measures_nothing(tmp_path: Path) -> None:
    keep(tmp_path / "kept", row("ops", Figure("meshd", 0, {"rate": 500.0})))
    done = CliRunner().invoke(command.main, ["--report", "--figures", str(tmp_path / "kept")])
    assert done.exit_code == 0, done.output
    assert "| meshd | 500 | 2.00 | – |" in (tmp_path / "kept.md").read_text()


def test_unknown_rows_are_wrong_usage() -> None:
    done = CliRunner().invoke(command.main, ["--only", "loaders,lodaers"])
    assert done.exit_code == 2
    assert "no row lodaers; there are get-10k" in done.output


# --- what the command teaches -----------------------------------------------------------------------------


def test_the_list_teaches_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalogue.NEEDS, "etcd", ("a real etcd", lambda: "pip install it"))
    text = CliRunner().invoke(command.main, ["--list"]).output
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    for entry in ENTRIES:
        assert entry.about in lines[entry.name]
        assert all(need in lines[entry.name] for need in entry.needs)
        assert set(entry.needs) <= set(catalogue.NEEDS)
        assert entry.minutes > 0
    assert "etcd: a real etcd – MISSING HERE: pip install it" in text
    assert BY_NAME["restore"].missing() == ["pip install it"]


def test_lines_of_progress_come_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    entries = [taking("get-10k"), taking("ops")]
    with Progress(entries, toy=False) as progress:
        progress.begin(entries[0])
        progress.say("get-10k: meshd, round 1 of 5")
        progress.begin(entries[1])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(
        "[1/2] get-10k: looking how busy the machine is, about 1 min of 2 min that are left"
    )
    assert lines[1].endswith("[1/2] get-10k: meshd, round 1 of 5")
    assert lines[2].endswith("about 1 min of 1 min that are left")


def test_a_checkout_that_was_changed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"rev-parse": "abc1234\n", "status": " M meshd/cli.py\n"}
    monkeypatch.setattr(machine, "output", lambda argv: said[argv[3]])
    assert machine.commit() == "abc1234+"
    said["status"] = ""
    assert machine.commit() == "abc1234"
    said["rev-parse"] = "fatal: not a git repository"
    assert machine.commit() == "unknown"


def test_a_ratio_that_a_report_printed_is_judged_as_it_was_printed() -> None:
    [store] = [each for each in store_rows(FULL) if each.name == "put-10k"]
    printed = row("put-10k", *(Figure(name, None, {"rate": 1.0}) for name in ("meshd", "seaweedfs")))
    printed = replace(printed, ratios={"meshd ÷ seaweedfs, rate": 0.71})
    assert bar_lines(store, {"put-10k": printed})[0][1:] == ["0.71×", "≥ 0.7 met"]


def test_a_run_names_folders_as_a_user_would(tmp_path: Path) -> None:
    assert command.shown(command.REPORT) == "docs/benchmarks.md"
    assert command.shown(tmp_path / "kept.md") == "kept.md"
    assert repr(Progress([], toy=True)) == "<Progress 0 of 0 rows>"


def test_what_the_readme_names_is_there() -> None:
    """Dotted names of the bench in its README are modules and what they have, files are files."""
    folder = command.KEPT.parent
    text = (folder / "README.md").read_text()
    named = re.findall(r"`(bench\.[\w.]+)`", text)
    assert len(named) >= 15
    for name in named:
        pkgutil.resolve_name(name)
    for file in re.findall(r"\b\w+\.py\b", text):
        assert (folder / file).exists() or (command.ROOT / "tests" / "bench" / file).exists(), file

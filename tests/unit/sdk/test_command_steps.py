"""Progress of a command: a bar where somebody looks, nothing where nobody does."""

from __future__ import annotations

import io
import sys

import pytest

from meshsdk.cli.command_base import Session


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def looked_at(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """stderr as a terminal, for the rest of the test."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return found


def run(session: Session) -> None:
    with session.steps("schema", 2) as done:
        done("180 samples are pinned")
        done.reached(0.4)
        done("the first is prepared")


def test_a_bar_tells_steps_and_how_far_the_one_under_way_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = looked_at(monkeypatch)
    with Session(None, False, False).steps("schema", 2) as done:
        done("180 samples are pinned")
        done.reached(0.4)
        done("the first is prepared")
    text = terminal.getvalue()
    assert "schema: the first is prepared" in text
    assert "2/2" in text


def test_how_far_a_step_is_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = looked_at(monkeypatch)
    with Session(None, False, False).steps("schema", 2) as done:
        done("pinned")
        done.reached(0.4)
        done.reached(0.9)
    assert "schema: 90% of this step" in terminal.getvalue()
    assert "2/2" not in terminal.getvalue()


@pytest.mark.parametrize("session", [Session(None, True, False), Session(None, False, True)])
def test_programs_and_who_asked_for_quiet_see_none(monkeypatch: pytest.MonkeyPatch, session: Session) -> None:
    terminal = looked_at(monkeypatch)
    run(session)
    assert terminal.getvalue() == ""


def test_without_a_terminal_there_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    run(Session(None, False, False))
    assert capfd.readouterr() == ("", "")


def test_work_of_few_steps_is_told_in_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with Session(None, False, False).logged_steps("split", 2) as done:
        done("pinned")
        done.reached(0.5)
        done("cut")
    assert capfd.readouterr().err.splitlines() == [
        "mesh: split: pinned (1 of 2)",
        "mesh: split: cut (2 of 2)",
    ]

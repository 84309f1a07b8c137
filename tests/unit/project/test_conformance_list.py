"""The list of known conformance failures can only shrink."""

from __future__ import annotations

import pytest

from tests.compat.conformance.knowing import LIST, ListError, judge, known
from tests.compat.conformance.suites import configuration, people, users_file


def test_a_run_as_expected() -> None:
    assert judge({"a": "passed", "b": "boom", "c": "skipped"}, {"b": "a reason"})


def test_new_failures_and_mended_tests_fail_the_run() -> None:
    judgement = judge({"a": "boom", "b": "passed"}, {"b": "a reason", "z": "a reason"})
    assert not judgement
    assert judgement.new == {"a": "boom"}
    assert judgement.mended == ("b",)
    assert judgement.gone == ("z",)
    assert judge({"a": "passed"}, {"z": "a reason"}, whole=False)


@pytest.mark.parametrize("line", ["name", "name |", "name | no", "n | long enough\nn | long enough"])
def test_a_line_without_reason_or_twice_is_refused(line: str) -> None:
    with pytest.raises(ListError):
        known(f"# heading\n\n{line}\n")


def test_the_list_is_readable() -> None:
    assert all(name.startswith("test_") for name in known(LIST.read_text()))


def test_people_and_configuration_agree() -> None:
    users = people()
    text = configuration("https://127.0.0.1:9", users)
    assert "is_secure = True" in text
    for person in users:
        assert person.access_key in users_file(users)
        assert person.secret_key in text


def test_a_line_may_be_for_one_door() -> None:
    text = "a | a long reason\nb (https) | a long reason\n"
    assert set(known(text, "http")) == {"a"}
    assert set(known(text, "https")) == {"a", "b"}

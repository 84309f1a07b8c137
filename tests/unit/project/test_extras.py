"""Every extra is tried by `make extras`, and every requirement says from which version on."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.extras.__main__ import SMOKES

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


def test_every_extra_is_tried() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert set(SMOKES) == {"", *extras}
    assert all(set(asked) <= set(extras) for asked, _ in SMOKES.values())


def test_every_requirement_has_a_floor() -> None:
    told = tomllib.loads(PROJECT.read_text())["project"]
    for requirements in (told["dependencies"], *told["optional-dependencies"].values()):
        for requirement in requirements:
            assert any(word in requirement for word in (">=", "==")), requirement

"""Keys that are renewed in a file while a client uses them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from meshsdk.client.request import Request
from meshsdk.client.settings import load_settings
from meshsdk.client.signer import Signer
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, name: str, moment: float) -> None:
    path.write_text(json.dumps({"AccessKeyId": name, "SecretAccessKey": "s", "SessionToken": f"t-{name}"}))
    os.utime(path, (moment, moment))


def environment(path: Path) -> dict[str, str]:
    return {"MESH_ENDPOINT": "http://a:1", "MESH_CREDENTIALS_FILE": str(path), "AWS_ACCESS_KEY_ID": "other"}


def test_new_keys_are_used_once_they_are_there(tmp_path: Path) -> None:
    path, now = tmp_path / "credentials.json", [1_800_000_000.0]
    write(path, "FIRST", 1)
    settings = load_settings(env=environment(path))
    assert (settings.access_key, settings.session_token) == ("FIRST", "t-FIRST")
    signer = Signer(settings, clock=lambda: now[0])
    assert b"Credential=FIRST/" in signer.head(Request("GET", "/"))
    write(path, "SECOND", 2)
    now[0] += 11
    head = signer.head(Request("GET", "/"))
    assert b"Credential=SECOND/" in head
    assert b"x-amz-security-token: t-SECOND" in head
    path.write_text("{")  # being written
    now[0] += 11
    assert b"Credential=SECOND/" in signer.head(Request("GET", "/"))


def test_a_file_without_keys_is_told_and_arguments_win(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    with pytest.raises(ConfigurationError, match="MESH_CREDENTIALS_FILE="):
        load_settings(env=environment(path))
    given = load_settings(env=environment(path), access_key="MINE", secret_key="s")
    assert (given.access_key, given.credentials_file) == ("MINE", "")


def test_the_file_of_a_key_that_was_made_does_as_well(tmp_path: Path) -> None:
    path = tmp_path / "ann.json"
    path.write_text(json.dumps({"access_key": "ANN", "secret_key": "s", "user_id": "ann"}))
    settings = load_settings(env=environment(path))
    assert (settings.access_key, settings.secret_key, settings.session_token) == ("ANN", "s", None)
    path.write_text("[1]")
    with pytest.raises(ConfigurationError, match="key add --json"):
        load_settings(env=environment(path))

"""Where a node's directory is, said in a header: any path that is text, and nothing else."""

from __future__ import annotations

import pytest

from meshwire.http_values.mesh_headers import HandoverDirectory, parse_handover_directory

ID = "0" * 32


@pytest.mark.parametrize("directory", ["/srv/data/run/local", "/home/zoë/my data/run", "/a%41/+b@c", "/日本"])
def test_a_path_comes_back_as_it_was(directory: str) -> None:
    header = HandoverDirectory(ID, directory).to_header()
    assert header.isascii()
    assert parse_handover_directory(header) == HandoverDirectory(ID, directory)


@pytest.mark.parametrize(
    "said",
    ["", ID, f"{ID} srv", f"{ID} /a b", f"{ID} /a%00", f"{ID} /a%0A", f"{ID} /%ff", f"{ID} /%4", "x /srv"],
)
def test_what_is_no_path_is_none(said: str) -> None:
    assert parse_handover_directory(said) is None


def test_a_path_that_is_no_text_is_not_told() -> None:
    assert parse_handover_directory(HandoverDirectory(ID, "/srv/\udcff").to_header()) is None

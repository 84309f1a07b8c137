"""The environment while the node's modules load."""

from __future__ import annotations

import os
import ssl

import pytest

from meshd.process.bootstrap import without_system_authorities


@pytest.mark.parametrize("given", [{}, {"SSL_CERT_FILE": "/etc/own.pem"}], ids=["none said", "one said"])
def test_authorities_are_not_read_while_modules_load_and_are_where_they_were_after(
    given: dict[str, str],
) -> None:
    env = {"OTHER": "1", **given}
    with without_system_authorities(env):
        assert env == {"OTHER": "1", ssl.get_default_verify_paths().openssl_cafile_env: os.devnull}
    assert env == {"OTHER": "1", **given}


def test_a_context_made_meanwhile_knows_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_DIR", os.devnull)
    with without_system_authorities(os.environ):
        assert ssl.create_default_context().get_ca_certs() == []

"""The users file: what is accepted, and complaints that name the line and no secret."""

from __future__ import annotations

import pytest

from meshd.config import ConfigError
from meshd.control.identities import check_keys
from meshd.process.root_credentials import RootCredentials
from meshd.process.users_file import parse_users

GOOD = b"""
- user_id: ann
  display_name: Ann Example
  email: ann@example.org
  access_key: ANNKEY
  secret_key: ann-secret-key
- {user_id: bob, access_key: "12345", secret_key: 0123456789}
"""


def test_users_are_read_as_they_stand() -> None:
    ann, bob = parse_users(GOOD)
    assert (ann.user.user_id, ann.user.display_name, ann.user.email) == (
        "ann",
        "Ann Example",
        "ann@example.org",
    )
    assert (ann.key.access_key, ann.key.secret_key, ann.key.user_id) == ("ANNKEY", "ann-secret-key", "ann")
    assert not ann.user.root
    assert (bob.user.display_name, bob.user.email) == ("bob", "")
    assert (bob.key.access_key, bob.key.secret_key) == ("12345", "0123456789")  # never numbers


def test_an_empty_file_has_no_users() -> None:
    assert parse_users(b"") == ()
    assert parse_users(b"[]") == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"user_id: ann", "line 1: expected a list"),
        (b"- ann", "line 1: expected a user with user_id"),
        (b"\n- user_id: ann\n  secret_key: hidden-secret", "line 2: the user has no access_key"),
        (b"- user_id: ann\n  acess_key: A", "line 2: unknown field 'acess_key'; did you mean access_key?"),
        (b"- user_id: ann\n  user_id: bob", "line 2: user_id is given twice"),
        (b"- user_id: [a]", "line 1: user_id must be a plain value"),
        (b"- {user_id: a, access_key: AAA, secret_key: short}", "line 1: a secret key has 8 to 128"),
        (b"- {user_id: a, access_key: 'A/A', secret_key: hidden-secret}", "line 1: an access key has"),
        (
            b"- {user_id: root, access_key: AAA, secret_key: hidden-secret}",
            "root is reserved for the node's root user",
        ),
        (b'- {user_id: "a\\nb", access_key: AAA, secret_key: hidden-secret}', "all of them printable"),
        (
            b"- {user_id: %s, access_key: AAA, secret_key: hidden-secret}" % (b"a" * 257),
            "has at most 256 bytes",
        ),
        (
            GOOD + b"- {user_id: eve, access_key: ANNKEY, secret_key: hidden-secret}",
            "line 8: access_key ANNKEY",
        ),
        (b"- {user_id: a, access_key: ROOT, secret_key: hidden-secret}", "already the root user's"),
        (b"- user_id: a\n  secret_key: 'hidden-secret\n", "not valid YAML"),
        (b"\xff\xfe\x00", "not valid YAML"),
        (b"- &a [*a]", "expected a user"),
    ],
)
def test_complaints(text: bytes, complaint: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_users(text, ["ROOT"], where="users file u.yaml")
    assert str(refusal.value).startswith("users file u.yaml, line ")
    assert complaint in str(refusal.value)
    assert "hidden-secret" not in str(refusal.value)
    assert "short" not in str(refusal.value)


def test_the_same_access_key_twice_names_both_lines() -> None:
    with pytest.raises(ConfigError, match="line 8: access_key ANNKEY is already taken on line 2"):
        parse_users(GOOD + b"- {user_id: eve, access_key: ANNKEY, secret_key: abcdefgh}")


def test_keys() -> None:
    check_keys("AKIA123", "wJalrXUtnFEMI/K7MDENG+bPxRfiCY=")
    for access, secret in (
        ("", "x" * 8),
        ("a b", "x" * 8),
        ("abc", "x" * 7),
        ("abc", "has space"),
        ("é" * 3, "x" * 8),
    ):
        with pytest.raises(ValueError, match="key has"):
            check_keys(access, secret)


def test_root_credentials_do_not_show_their_secret() -> None:
    assert "hush-hush" not in repr(RootCredentials("root", "hush-hush"))
    assert "hush-hush" not in repr(RootCredentials("root", "hush-hush").account())

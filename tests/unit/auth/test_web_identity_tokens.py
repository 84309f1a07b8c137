"""Validation of tokens: what is accepted, and what hostile tokens try."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from meshd.auth.web_identity.exchange import unmet_condition
from meshd.auth.web_identity.key_set import KeySetError, parse_key_set
from meshd.auth.web_identity.token_validation import (
    LEEWAY_SECONDS,
    MAX_TOKEN_BYTES,
    TokenExpiredError,
    TokenRejectedError,
    UnknownKeyError,
    parse_token,
    validate_token,
)
from meshd.control.roles import IdentityProvider, TrustCondition
from tests.support.oidc_issuer import SigningKey, encoded, key_set

if TYPE_CHECKING:
    from meshd.auth.web_identity.key_set import KeySet
    from meshd.auth.web_identity.token_validation import ValidToken

ISSUER = "https://issuer.example"
NOW = 1_800_000_000.0
RSA, OTHER, EC, EC384 = (
    SigningKey("rsa"),
    SigningKey("other"),
    SigningKey("ec", "ES256"),
    SigningKey("ec384", "ES384"),
)
KEYS = parse_key_set(key_set(RSA, EC, EC384))
PROVIDER = IdentityProvider(name="p", issuer=ISSUER, audiences=("mesh", "shardmesh.io"))
CLAIMS: dict[str, Any] = {"iss": ISSUER, "sub": "ann", "aud": "mesh", "iat": NOW, "exp": NOW + 60}


def validate(
    text: str, keys: KeySet = KEYS, provider: IdentityProvider = PROVIDER, now: float = NOW
) -> ValidToken:
    return validate_token(parse_token(text), provider, keys, now)


def refusal(text: str, **options: Any) -> str:
    with pytest.raises(TokenRejectedError) as refused:
        validate(text, **options)
    told = str(refused.value)
    assert not any(part in told for part in text.split(".") if len(part) > 8)
    return told


@pytest.mark.parametrize("key", [RSA, EC])
def test_a_token_of_each_usual_algorithm_is_accepted(key: SigningKey) -> None:
    valid = validate(key.sign(CLAIMS))
    assert (valid.issuer, valid.subject, valid.audience, valid.expires) == (ISSUER, "ann", "mesh", NOW + 60)


def test_one_of_several_audiences_is_enough() -> None:
    assert validate(RSA.sign({**CLAIMS, "aud": ["x", "shardmesh.io"]})).audience == "shardmesh.io"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"iss": ISSUER + "/"}, "iss"),
        ({"iss": "https://evil.example"}, "iss"),
        ({"iss": [ISSUER]}, "iss"),
        ({"iss": None}, "iss"),
        ({"aud": "other"}, "aud"),
        ({"aud": []}, "aud"),
        ({"aud": None}, "aud"),
        ({"aud": ["mesh", 1]}, "aud"),
        ({"aud": {"mesh": 1}}, "aud"),
        ({"aud": ["x"] * 21 + ["mesh"]}, "aud"),
        ({"sub": ""}, "sub"),
        ({"sub": None}, "sub"),
        ({"sub": 7}, "sub"),
        ({"sub": "a" * 256}, "sub"),
        ({"sub": "ann\nroot"}, "sub"),
        ({"exp": None}, "exp"),
        ({"exp": "never"}, "exp"),
        ({"exp": True}, "exp"),
        ({"exp": -1}, "exp"),
        ({"nbf": NOW + LEEWAY_SECONDS + 1}, "nbf"),
        ({"iat": NOW + LEEWAY_SECONDS + 1}, "iat"),
        ({"nbf": "x"}, "nbf"),
        ({"nbf": None}, ""),
        ({"iat": None}, ""),
        ({"nbf": NOW + LEEWAY_SECONDS}, ""),
        ({"exp": NOW - LEEWAY_SECONDS + 1}, ""),
    ],
)
def test_claims_must_be_those_of_the_provider_and_of_now(changes: dict[str, Any], told: str) -> None:
    token = RSA.sign({name: value for name, value in {**CLAIMS, **changes}.items() if value is not None})
    if told:
        assert told in refusal(token)
    else:
        validate(token)


def test_an_expired_token_is_told_from_others() -> None:
    with pytest.raises(TokenExpiredError):
        validate(RSA.sign({**CLAIMS, "exp": NOW - LEEWAY_SECONDS}))


def test_no_algorithm_but_those_of_the_provider() -> None:
    body = encoded(json.dumps(CLAIMS).encode())
    for name in ("none", "None", "NONE", "HS256", "RS1", "", "RS256 "):
        header = encoded(json.dumps({"alg": name, "kid": "rsa"}).encode())
        assert "algorithm" in refusal(f"{header}.{body}.{encoded(b'x')}")
    assert "three parts" in refusal(f"{body}.{body}")
    assert "base64url" in refusal(RSA.sign(CLAIMS).rpartition(".")[0] + ".")
    assert "not allowed" in refusal(EC384.sign(CLAIMS))
    only = IdentityProvider(name="p", issuer=ISSUER, audiences=("mesh",), algorithms=("RS512",))
    assert "not allowed" in refusal(RSA.sign(CLAIMS), provider=only)


def test_a_public_key_is_no_secret_of_hmac() -> None:
    """Signed with HS256 and the issuer's public key as the secret (CVE-2015-9235), in several forms of it."""
    public = RSA.private.public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    document = json.dumps(RSA.public_document()).encode()
    careless = IdentityProvider(name="p", issuer=ISSUER, audiences=("mesh",), algorithms=("RS256", "HS256"))
    for secret in (pem, pem.rstrip(), der, document):
        header = encoded(json.dumps({"alg": "HS256", "kid": "rsa"}).encode())
        signed = f"{header}.{encoded(json.dumps(CLAIMS).encode())}"
        forged = f"{signed}.{encoded(hmac.digest(secret, signed.encode(), hashlib.sha256))}"
        assert "algorithm" in refusal(forged)
        assert "algorithm" in refusal(forged, provider=careless)


def test_the_header_names_no_key_of_its_own() -> None:
    """A key in the header, or a URL of one, is ignored; the key id alone selects among the issuer's."""
    for own in (
        {"jwk": OTHER.public_document()},
        {"jku": "https://evil.example/keys"},
        {"x5u": "https://evil.example/cert"},
        {"x5c": ["MIIB"]},
    ):
        assert "signature" in refusal(OTHER.sign(CLAIMS, kid="rsa", **own))
        validate(RSA.sign(CLAIMS, **own))
    with pytest.raises(UnknownKeyError):
        validate(OTHER.sign(CLAIMS))
    for odd in ("../../dev/null", "rsa'--", "RSA", " rsa"):
        with pytest.raises(UnknownKeyError):
            validate(RSA.sign(CLAIMS, kid=odd))


@pytest.mark.parametrize("kid", [7, "", ["rsa"], {"rsa": 1}, "k" * 1025])
def test_a_key_id_is_a_short_text(kid: Any) -> None:
    assert "kid" in refusal(RSA.sign(CLAIMS, kid=kid))


def test_without_a_key_id_any_key_of_the_kind_may_have_signed() -> None:
    validate(RSA.sign(CLAIMS, kid=None))
    validate(EC.sign(CLAIMS, kid=None))
    assert "signature" in refusal(OTHER.sign(CLAIMS, kid=None))


def test_a_key_verifies_only_its_own_kind_of_signature() -> None:
    assert "signature" in refusal(RSA.sign(CLAIMS, kid="ec"))
    assert "signature" in refusal(EC.sign(CLAIMS, kid="rsa"))
    # A key of another curve than the algorithm's (RFC 7518 §3.4).
    forged = EC384.sign_text(json.dumps({"alg": "ES256", "kid": "ec384"}), json.dumps(CLAIMS))
    assert "signature" in refusal(forged)
    restricted = parse_key_set(json.dumps({"keys": [RSA.public_document(alg="RS512")]}))
    assert "signature" in refusal(RSA.sign(CLAIMS), keys=restricted)


def test_signatures_are_whole_and_have_one_spelling() -> None:
    head, body, signature = EC.sign(CLAIMS).split(".")
    raw = base64.urlsafe_b64decode(signature + "==")
    der = jwt.utils.raw_to_der_signature(raw, EC.private.curve)
    for odd in (raw[:-1], raw[:32], raw + b"\0", b"\0" * 64, der, b"\0" * 32 + raw[32:]):
        assert "signature" in refusal(f"{head}.{body}.{encoded(odd)}")
    for spelling in (
        signature + "==",
        signature + "\n",
        signature.replace("A", " A", 1) + " ",
        "+" + signature[1:],
    ):
        assert refusal(f"{head}.{body}.{spelling}")


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        ('{"alg":"RS256","kid":"rsa","alg":"none"}', None),
        ('{"alg":"RS256","kid":"rsa","crit":["exp"]}', None),
        ('{"alg":"RS256","kid":"rsa","crit":[]}', None),
        ('{"alg":"RS256","kid":"rsa","b64":false,"crit":["b64"]}', None),
        ('{"alg":"RS256","kid":"rsa","typ":"secevent+jwt"}', None),
        ('{"alg":"RS256","kid":"rsa","typ":7}', None),
        ('["RS256"]', None),
        ('{"alg":["RS256"],"kid":"rsa"}', None),
        ('{"kid":"rsa"}', None),
        ("{", None),
        (None, f'{{"sub":"root",{json.dumps(CLAIMS)[1:-1]}}}'),
        (None, json.dumps({**CLAIMS, "exp": 0.5}).replace("0.5", "1e400")),
        (None, json.dumps({**CLAIMS, "exp": 0.5}).replace("0.5", "Infinity")),
        (None, json.dumps({**CLAIMS, "deep": json.loads("[" * 40 + "]" * 40)})),
        (None, json.dumps([CLAIMS])),
        (None, "null"),
        (None, '"ann"'),
        (None, ""),
    ],
)
def test_documents_are_read_strictly(header: str | None, payload: str | None) -> None:
    usual = json.dumps({"alg": "RS256", "kid": "rsa"})
    assert refusal(RSA.sign_text(header or usual, json.dumps(CLAIMS) if payload is None else payload))


def test_other_encodings_of_unicode_are_no_documents() -> None:
    header = encoded(json.dumps({"alg": "RS256", "kid": "rsa"}).encode())
    for data in (
        json.dumps(CLAIMS).encode("utf-16"),
        b"\xff\xfe{}",
        b"\xef\xbb\xbf" + json.dumps(CLAIMS).encode(),
    ):
        assert refusal(f"{header}.{encoded(data)}.{encoded(b'x')}")


def test_huge_tokens_are_refused_before_they_are_parsed() -> None:
    assert "characters" in refusal("e" * (MAX_TOKEN_BYTES + 1))
    assert "characters" in refusal(RSA.sign({**CLAIMS, "pad": "x" * MAX_TOKEN_BYTES}))


@given(st.text() | st.from_regex(r"[A-Za-z0-9_-]{0,20}(\.[A-Za-z0-9_-]{0,20}){0,4}", fullmatch=True))
def test_any_text_is_refused_without_another_error(text: str) -> None:
    with pytest.raises(TokenRejectedError):
        validate(text)


_TOKEN = EC.sign(CLAIMS)


@given(st.integers(0, len(_TOKEN) - 1), st.characters(codec="utf-8"))
def test_no_changed_token_is_accepted(place: int, character: str) -> None:
    changed = _TOKEN[:place] + character + _TOKEN[place + 1 :]
    if changed != _TOKEN:
        with pytest.raises(TokenRejectedError):
            validate(changed)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    st.sampled_from(["iss", "sub", "aud", "exp", "nbf", "iat"]),
)
def test_claims_of_any_type_are_accepted_or_refused(value: Any, name: str) -> None:
    """There is no other error, and only texts and times are accepted."""
    token = EC.sign({**CLAIMS, name: value})
    with suppress(TokenRejectedError):
        validate(token)
        assert isinstance(value, str | float | list)


# --- key sets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "document",
    [
        "",
        "[]",
        "{}",
        '{"keys": {}}',
        '{"keys": []}',
        '{"keys": [], "keys": []}',
        '{"keys": [{"kty": "oct", "k": "AAAA", "kid": "h"}]}',
        json.dumps({"keys": [RSA.public_document(use="enc")]}),
        json.dumps({"keys": [RSA.public_document(key_ops=["encrypt"])]}),
        json.dumps({"keys": [RSA.public_document(d="AQAB")]}),
        json.dumps({"keys": [RSA.public_document(n="!!")]}),
        json.dumps({"keys": [RSA.public_document(e=65537)]}),
        json.dumps({"keys": [RSA.public_document(kid=5)]}),
        json.dumps({"keys": [RSA.public_document(alg="HS256")]}),
        json.dumps({"keys": [EC.public_document(y=EC.public_document()["x"])]}),
        json.dumps({"keys": [EC.public_document(crv="secp256k1")]}),
        json.dumps({"keys": [SigningKey("small", bits=1024).public_document()]}),
        json.dumps({"keys": [RSA.public_document()] * 101}),
        json.dumps({"keys": [RSA.public_document()], "pad": "x" * (256 << 10)}),
    ],
)
def test_unusable_key_sets_are_refused(document: str) -> None:
    with pytest.raises(KeySetError):
        parse_key_set(document)


def test_one_odd_key_spoils_no_set() -> None:
    odd = [
        {"kty": "oct", "k": "AAAA", "kid": "h"},
        "text",
        {"kty": "RSA"},
        RSA.public_document(use="enc", kid="e"),
    ]
    found = parse_key_set(json.dumps({"keys": [*odd, RSA.public_document()]}))
    assert [key.key_id for key in found.keys] == ["rsa"]
    validate(RSA.sign(CLAIMS), keys=found)


# --- trust conditions ---------------------------------------------------------------------------------------

POD = {
    "sub": "system:serviceaccount:train:trainer",
    "groups": ["ml", "people"],
    "email_verified": True,
    "level": 3,
    "kubernetes.io": {"namespace": "train", "serviceaccount": {"name": "trainer"}},
    "a/b": {"c~d": "x"},
}


@pytest.mark.parametrize(
    ("claim", "values", "wildcard", "met"),
    [
        ("sub", ("system:serviceaccount:train:trainer",), False, True),
        ("sub", ("other", "system:serviceaccount:train:trainer"), False, True),
        ("sub", ("system:serviceaccount:train:*",), False, False),
        ("sub", ("system:serviceaccount:train:*",), True, True),
        ("sub", ("system:serviceaccount:*:trainer",), True, True),
        ("sub", ("system:serviceaccount:train:t?ainer",), True, True),
        ("sub", ("system:serviceaccount:other:*",), True, False),
        ("sub", ("*",), True, True),
        ("groups", ("ml",), False, True),
        ("groups", ("admins",), False, False),
        ("email_verified", ("true",), False, True),
        ("email_verified", ("True",), False, False),
        ("level", ("3",), False, False),
        ("level", ("*",), True, False),
        ("missing", ("*",), True, False),
        ("kubernetes.io", ("*",), True, False),
        ("/kubernetes.io/namespace", ("train",), False, True),
        ("/kubernetes.io/serviceaccount/name", ("trainer",), False, True),
        ("/kubernetes.io/serviceaccount/uid", ("*",), True, False),
        ("/groups/0", ("ml",), False, False),
        ("/a~1b/c~0d", ("x",), False, True),
        ("kubernetes.io/namespace", ("train",), False, False),
    ],
)
def test_conditions_compare_claims(claim: str, values: tuple[str, ...], wildcard: bool, met: bool) -> None:
    condition = TrustCondition(claim, values, wildcard)
    assert (unmet_condition([condition], POD) is None) == met


def test_every_condition_must_be_met() -> None:
    first, second = TrustCondition("sub", ("*",), True), TrustCondition("groups", ("admins",))
    assert unmet_condition([first, second], POD) is second

"""Key sets of issuers (JWKS): the public keys that may have signed a token, by key id and algorithm.

Symmetric and private keys, keys for encryption, and keys of an unusual kind or size are ignored, as RFC 7517
§5 asks, so that one odd key does not make an issuer unusable. A key verifies only its own kind of signature.
https://www.rfc-editor.org/rfc/rfc7517, rfc7518
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshwire.strict_json import PlanError, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jwt import PyJWK

MAX_KEY_SET_BYTES: Final = 256 << 10
_MAX_KEYS: Final = 100
_RSA_BITS: Final = (2048, 8192)
_PRIVATE: Final = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth", "k"})
ALGORITHM_KINDS: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", "")),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
"""Every algorithm that a provider may allow → kind and curve of its keys. None of them is symmetric."""


class KeySetError(Exception):
    """The document is not a set of keys that can verify tokens."""


class VerificationKey(msgspec.Struct, frozen=True):
    """A public key. `algorithm` is "" if the key set does not restrict it; `document` is its JWK."""

    key_id: str | None
    kind: str
    curve: str
    algorithm: str
    document: tuple[tuple[str, str], ...]

    def verifies(self, algorithm: str) -> bool:
        """Whether signatures of `algorithm` may be this key's."""
        wanted = ALGORITHM_KINDS.get(algorithm)
        return self.algorithm in ("", algorithm) and wanted == (self.kind, self.curve)

    def load(self, algorithm: str) -> PyJWK:
        """Return the key for one algorithm."""
        return _load(self.document, algorithm)


class KeySet(msgspec.Struct, frozen=True):
    """The usable keys of an issuer."""

    keys: tuple[VerificationKey, ...]

    def __repr__(self) -> str:
        return f"<KeySet of {len(self.keys)} keys>"

    def candidates(self, key_id: str | None, algorithm: str) -> tuple[VerificationKey, ...]:
        """Return the keys that may have signed with `algorithm`: those with `key_id`. A token without one may
        have been signed by any of them."""
        return tuple(key for key in self.keys if key_id in (None, key.key_id) and key.verifies(algorithm))

    def has_key_id(self, key_id: str | None) -> bool:
        """Whether any key, of whatever kind, has the id; True without an id."""
        return key_id is None or any(key.key_id == key_id for key in self.keys)


def parse_key_set(text: str | bytes) -> KeySet:
    """Parse a JWKS document. Raises KeySetError, which says what is wrong with it."""
    if len(text) > MAX_KEY_SET_BYTES:
        raise KeySetError(f"the key set has more than {MAX_KEY_SET_BYTES:,} bytes")
    try:
        document = read_json(text if isinstance(text, str) else text.decode("utf-8"))
    except UnicodeDecodeError:
        raise KeySetError("the key set is not UTF-8") from None
    except PlanError as error:
        raise KeySetError(f"the key set is not a JSON document: {error}") from None
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise KeySetError('a key set has the form {"keys": […]}')
    if len(listed) > _MAX_KEYS:
        raise KeySetError(f"the key set has more than {_MAX_KEYS} keys")
    keys = tuple(key for each in listed if isinstance(each, dict) and (key := _usable(each)) is not None)
    if not keys:
        raise KeySetError("the key set has no public key that can verify signatures (RSA, EC or Ed25519)")
    return KeySet(keys)


def _usable(document: Mapping[str, Any]) -> VerificationKey | None:
    """Return a key that can be used, else None."""
    kind, curve, algorithm = document.get("kty"), document.get("crv", ""), document.get("alg", "")
    key_id, operations = document.get("kid"), document.get("key_ops")
    if document.get("use", "sig") != "sig" or not _PRIVATE.isdisjoint(document):
        return None
    if operations is not None and not (isinstance(operations, list) and "verify" in operations):
        return None
    if not isinstance(key_id, str | None) or not isinstance(curve, str) or not isinstance(algorithm, str):
        return None
    if algorithm and algorithm not in ALGORITHM_KINDS:
        return None
    if (kind, "" if kind == "RSA" else curve) not in ALGORITHM_KINDS.values():
        return None
    fields = tuple((name, document[name]) for name in ("kty", "crv", "n", "e", "x", "y") if name in document)
    if not all(isinstance(value, str) for _, value in fields):
        return None
    key = VerificationKey(key_id, str(kind), "" if kind == "RSA" else curve, algorithm, fields)
    return key if _is_sound(key) else None


def _is_sound(key: VerificationKey) -> bool:
    """Whether the key can be loaded (a point that is on its curve, numbers that are some) and an RSA key has
    a
    usual size."""
    from jwt.exceptions import PyJWTError

    algorithm = next(name for name, kind in ALGORITHM_KINDS.items() if kind == (key.kind, key.curve))
    try:
        loaded = key.load(key.algorithm or algorithm)
    except (PyJWTError, ValueError, TypeError, OverflowError):
        return False
    return key.kind != "RSA" or _RSA_BITS[0] <= loaded.key.key_size <= _RSA_BITS[1]


@lru_cache(256)
def _load(document: tuple[tuple[str, str], ...], algorithm: str) -> PyJWK:
    # Imported on demand: with `cryptography` it costs a node that exchanges no tokens some megabytes.
    from jwt import PyJWK

    return PyJWK(dict(document), algorithm)

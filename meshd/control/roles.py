"""Identity providers and roles: whose tokens the mesh accepts, and which rights they are exchanged for.

A provider is an OpenID Connect issuer. A role belongs to one provider; a token of it whose claims meet all
the role's conditions gets temporary credentials with the role's policies. Names of entries: `idp/NAME` and
`role/NAME`. They have a topic of their own, because earlier releases cannot decode them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar, cast

import msgspec

from meshd.control.cached_topic import CachedTopic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshd.control.control_api import ControlStore


class Revocation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which temporary credentials are revoked: those of an earlier `round`, and those issued `before`
    (seconds since 1970). `at_ms`: when this was last changed."""

    round: int = 0
    before: int = 0
    at_ms: int = 0


TOPIC = "roles"
ROLE_PREFIX: Final = "role/"
"""Precedes a role's name where it stands for a user or a key; neither may contain a slash."""
DEFAULT_ALGORITHMS: Final = ("RS256", "ES256")


class RoleEntry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An entry of the topic: a provider or a role, distinguished by `type`; `created_ms` since 1970."""

    name: str
    created_ms: int = 0
    description: str = ""


class IdentityProvider(RoleEntry, frozen=True, tag="idp"):
    """An OpenID Connect issuer whose tokens are accepted.

    `issuer` is its URL, exactly as tokens have it in `iss`. `audiences`: at least one of them must be in
    `aud`. `algorithms`: of signatures. `ca`: PEM certificates to trust for the issuer; the machine's if
    empty. `jwks`: the issuer's keys as a JSON document; with it nothing is fetched. `jwks_uri`: where the
    keys are, if the discovery document is not to be asked. `allow_http`: whether the issuer may be fetched
    without TLS.
    """

    issuer: str
    audiences: tuple[str, ...]
    algorithms: tuple[str, ...] = DEFAULT_ALGORITHMS
    ca: str = ""
    jwks: str = ""
    jwks_uri: str = ""
    allow_http: bool = False


class TrustCondition(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A claim that must have one of `values`. `claim` is a name, or a JSON pointer that begins with `/`.
    `wildcard`: whether `*` and `?` in the values stand for any text and any character."""

    claim: str
    values: tuple[str, ...]
    wildcard: bool = False


class Role(RoleEntry, frozen=True, tag="role"):
    """Rights that tokens of `provider` are exchanged for if all `conditions` are met.

    `policies` are names. `max_seconds` limits the lifetime of the credentials. `seed` is a secret that
    distinguishes the role from an earlier one of the same name. `ended`: revocation of its credentials.
    """

    provider: str
    conditions: tuple[TrustCondition, ...]
    seed: str
    policies: tuple[str, ...] = ()
    max_seconds: int = 3600
    ended: Revocation = Revocation()

    def __repr__(self) -> str:
        return f"Role(name={self.name!r}, provider={self.provider!r}, policies={self.policies!r})"


R = TypeVar("R", bound=RoleEntry)


_decode = msgspec.json.Decoder(cast("type[RoleEntry]", IdentityProvider | Role)).decode


class RoleTable:
    """Providers and roles by name. Reads are dictionary reads."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = CachedTopic(control, TOPIC, _decode)
        self._entries: Mapping[str, RoleEntry] = {}
        self._providers: Mapping[str, IdentityProvider] = {}
        self._roles: Mapping[str, Role] = {}

    def __repr__(self) -> str:
        return f"<RoleTable {len(self._roles)} roles, {len(self._providers)} providers>"

    def providers(self) -> Mapping[str, IdentityProvider]:
        """Returns providers by name, in order."""
        self._refresh(self._documents.current())
        return self._providers

    def roles(self) -> Mapping[str, Role]:
        """Returns roles by name, in order; another object after each change."""
        entries = self._documents.current()
        if entries is not self._entries:
            self._refresh(entries)
        return self._roles

    async def update_entry(self, kind: type[R], name: str, decide: Callable[[R | None], R | None]) -> bool:
        """Replaces an entry by what `decide` returns for the current one; see `CachedTopic.update`."""
        return await self._documents.update(
            f"{kind.__struct_config__.tag}/{name}",
            cast("Callable[[RoleEntry | None], RoleEntry | None]", decide),
        )

    def _refresh(self, entries: Mapping[str, RoleEntry]) -> None:
        if entries is not self._entries:
            ordered = [entries[place] for place in sorted(entries)]
            self._providers = {each.name: each for each in ordered if isinstance(each, IdentityProvider)}
            self._roles = {each.name: each for each in ordered if isinstance(each, Role)}
            self._entries = entries

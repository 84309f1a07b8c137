"""Identity providers and roles: created, changed and removed by the admin API.

Only root reaches this module; the endpoint checks that. A change is checked as a whole before it is stored,
and takes effect at once for exchanges; credentials that were issued before end when they expire, or when
their role is removed or revoked. Policies of a role take effect at once for issued credentials, too.
"""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict, replace

from meshd.auth.identities.admin_errors import (
    AdminError,
    check_name,
    check_policy_count,
    check_text,
    iso_time,
    no_such_policy,
    no_such_provider,
    no_such_role,
    paginate,
)
from meshd.auth.identities.sts_sessions import revocation_fields
from meshd.auth.web_identity.issuer_client import IssuerError, check_url, fetch_key_set
from meshd.auth.web_identity.key_set import ALGORITHM_KINDS, KeySetError, parse_key_set
from meshd.control.identities import new_secret_key
from meshd.control.roles import (
    DEFAULT_ALGORITHMS,
    ROLE_PREFIX,
    IdentityProvider,
    Role,
    TrustCondition,  # noqa: TC001 - msgspec reads it from the annotations
)
from meshwire.iam.parse import role_arn

if TYPE_CHECKING:
    from meshd.auth.identities.admin_errors import Page
    from meshd.control.identities import IdentityTable, KeyLastUsed
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.admin")
_MAX_CA_BYTES = 64 << 10
_MAX_LISTED = 20
_MAX_VALUE = 1024
MIN_ROLE_SECONDS, MAX_ROLE_SECONDS = 900, 12 * 3600


class NewProvider(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /-/admin/idps`; see `IdentityProvider`. `jwks` is the document's text."""

    name: str
    issuer: str
    audiences: tuple[str, ...]
    algorithms: tuple[str, ...] = DEFAULT_ALGORITHMS
    ca: str = ""
    jwks: str = ""
    jwks_uri: str = ""
    allow_http: bool = False
    description: str = ""


class ProviderChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `PATCH /-/admin/idps/NAME`; None leaves a field as it is."""

    audiences: tuple[str, ...] | None = None
    algorithms: tuple[str, ...] | None = None
    ca: str | None = None
    jwks: str | None = None
    jwks_uri: str | None = None
    allow_http: bool | None = None
    description: str | None = None


class NewRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /-/admin/roles`; see `Role`."""

    name: str
    provider: str
    conditions: tuple[TrustCondition, ...]
    policies: tuple[str, ...] = ()
    max_seconds: int = 3600
    description: str = ""


class RoleChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `PATCH /-/admin/roles/NAME`; None leaves a field as it is."""

    provider: str | None = None
    conditions: tuple[TrustCondition, ...] | None = None
    policies: tuple[str, ...] | None = None
    max_seconds: int | None = None
    description: str | None = None


class RoleAdmin:
    """Manages providers and roles. One instance per worker; all state is in the control store."""

    def __init__(self, identities: IdentityTable, use: KeyLastUsed, clock: Clock) -> None:
        self._identities, self._table = identities, identities.roles
        self._use, self._clock = use, clock

    def __repr__(self) -> str:
        return f"<RoleAdmin {self._table!r}>"

    # --- providers ----------------------------------------------------------------------------------

    def list_providers(self, after: str, limit: int) -> Page:
        """List providers in order of their names."""
        return paginate(self._table.providers(), after, limit, self._show_provider)

    def get_provider(self, name: str) -> dict[str, Any]:
        """Return a provider with its documents. Raises AdminError NoSuchProvider."""
        provider = self._provider(name)
        return self._show_provider(provider) | {"ca": provider.ca, "jwks": provider.jwks}

    async def add_provider(self, new: NewProvider) -> dict[str, Any]:
        """Register a provider. Raises AdminError BadRequest, ProviderExists."""
        check_name("the provider's name", new.name)
        provider = IdentityProvider(created_ms=self._clock.now_ms(), **asdict(new))
        _check_provider(provider)

        def create(old: IdentityProvider | None) -> IdentityProvider:
            if old is not None:
                raise AdminError("ProviderExists", f"the identity provider {new.name} exists already")
            return provider

        await self._table.update_entry(IdentityProvider, new.name, create)
        _log.info("identity provider added", extra={"idp": new.name, "issuer": new.issuer})
        return self.get_provider(new.name)

    async def change_provider(self, name: str, change: ProviderChange) -> dict[str, Any]:
        """Change a provider. Raises AdminError NoSuchProvider, BadRequest."""
        wanted = {field: value for field, value in asdict(change).items() if value is not None}

        def write(old: IdentityProvider | None) -> IdentityProvider:
            if old is None:
                raise no_such_provider(name)
            changed = replace(old, **wanted)
            _check_provider(changed)
            return changed

        await self._table.update_entry(IdentityProvider, name, write)
        _log.info("identity provider changed", extra={"idp": name, "fields": sorted(wanted)})
        return self.get_provider(name)

    async def remove_provider(self, name: str, *, force: bool) -> None:
        """Remove a provider. Raises AdminError NoSuchProvider, ProviderInUse (unless forced: its roles cannot
        be
        assumed then)."""
        roles = self._roles_of(name)
        if roles and not force:
            raise AdminError(
                "ProviderInUse",
                f"{len(roles)} role{' trusts' if len(roles) == 1 else 's trust'} the provider {name}",
                help="remove the roles first; with force, they stay and cannot be assumed",
                detail={"roles": roles},
            )

        def drop(old: IdentityProvider | None) -> None:
            if old is None:
                raise no_such_provider(name)

        await self._table.update_entry(IdentityProvider, name, drop)
        _log.info("identity provider removed", extra={"idp": name, "forced": force})

    async def fetch_keys(self, name: str) -> dict[str, Any]:
        """Return the keys that a provider has now, as this node gets them: an error says why it does not.
        Raises AdminError NoSuchProvider."""
        provider = self._provider(name)
        try:
            found = parse_key_set(provider.jwks) if provider.jwks else await fetch_key_set(provider)
        except (KeySetError, IssuerError) as error:
            return {"name": name, "error": str(error), "keys": []}
        keys = [
            {"kid": key.key_id or "", "kind": f"{key.kind} {key.curve}".rstrip(), "alg": key.algorithm}
            for key in found.keys
        ]
        return {"name": name, "error": "", "keys": keys}

    # --- roles --------------------------------------------------------------------------------------

    def list_roles(self, after: str, limit: int) -> Page:
        """List roles in order of their names."""
        return paginate(self._table.roles(), after, limit, self._show_role)

    def get_role(self, name: str) -> dict[str, Any]:
        """Return a role. Raises AdminError NoSuchRole."""
        role = self._table.roles().get(name)
        if role is None:
            raise no_such_role(name)
        return self._show_role(role)

    async def add_role(self, new: NewRole) -> dict[str, Any]:
        """Create a role. Raises AdminError BadRequest, NoSuchProvider, NoSuchPolicy, RoleExists."""
        check_name("the role's name", new.name)
        role = Role(created_ms=self._clock.now_ms(), seed=new_secret_key(), **_fields(new))
        self._check_role(role)

        def create(old: Role | None) -> Role:
            if old is not None:
                raise AdminError("RoleExists", f"the role {new.name} exists already")
            return role

        await self._table.update_entry(Role, new.name, create)
        _log.info("role added", extra={"role": new.name, "idp": new.provider, "policies": new.policies})
        return self.get_role(new.name)

    async def change_role(self, name: str, change: RoleChange) -> dict[str, Any]:
        """Change a role. Raises AdminError NoSuchRole, BadRequest, NoSuchProvider, NoSuchPolicy."""
        wanted = {field: value for field, value in _fields(change).items() if value is not None}

        def write(old: Role | None) -> Role:
            changed = replace(_existing(old, name), **wanted)
            self._check_role(changed)
            return changed

        await self._table.update_entry(Role, name, write)
        _log.info("role changed", extra={"role": name, "fields": sorted(wanted)})
        return self.get_role(name)

    async def remove_role(self, name: str) -> None:
        """Remove a role: its credentials end at once. Raises AdminError NoSuchRole."""

        def drop(old: Role | None) -> None:
            _existing(old, name)

        await self._table.update_entry(Role, name, drop)
        await self._use.forget(ROLE_PREFIX + name)
        _log.info("role removed", extra={"role": name})

    async def attach_policy(self, name: str, policy: str) -> dict[str, Any]:
        """Attach a policy to a role. Raises AdminError NoSuchRole, NoSuchPolicy, BadRequest."""
        self._check_policies((policy,))

        def attach(old: Role | None) -> Role:
            role = _existing(old, name)
            return replace(role, policies=check_policy_count((*role.policies, policy)))

        await self._table.update_entry(Role, name, attach)
        _log.info("policy attached", extra={"policy": policy, "role": name})
        return self.get_role(name)

    async def detach_policy(self, name: str, policy: str) -> dict[str, Any]:
        """Detach a policy, which need not exist, from a role. Raises AdminError NoSuchRole, NoSuchPolicy (not
        attached)."""

        def detach(old: Role | None) -> Role:
            role = _existing(old, name)
            if policy not in role.policies:
                raise AdminError("NoSuchPolicy", f"the policy {policy[:80]!r} is not attached there")
            return replace(role, policies=tuple(each for each in role.policies if each != policy))

        await self._table.update_entry(Role, name, detach)
        _log.info("policy detached", extra={"policy": policy, "role": name})
        return self.get_role(name)

    # --- checks and views ---------------------------------------------------------------------------

    def _provider(self, name: str) -> IdentityProvider:
        provider = self._table.providers().get(name)
        if provider is None:
            raise no_such_provider(name)
        return provider

    def _roles_of(self, provider: str) -> list[str]:
        return [role.name for role in self._table.roles().values() if role.provider == provider]

    def _check_role(self, role: Role) -> None:
        check_text(description=role.description)
        self._provider(role.provider)
        self._check_policies(role.policies)
        check_policy_count(role.policies)
        if not MIN_ROLE_SECONDS <= role.max_seconds <= MAX_ROLE_SECONDS:
            raise AdminError(
                "BadRequest",
                f"max_seconds is from {MIN_ROLE_SECONDS} (15 minutes) to {MAX_ROLE_SECONDS} (12 hours), "
                f"not {role.max_seconds}",
            )
        _check_conditions(role.conditions)

    def _check_policies(self, policies: tuple[str, ...]) -> None:
        for name in policies:
            if name not in self._identities.policies():
                raise no_such_policy(name)

    def _show_provider(self, provider: IdentityProvider) -> dict[str, Any]:
        source = "a stored document" if provider.jwks else provider.jwks_uri or "discovery"
        return {
            "name": provider.name,
            "issuer": provider.issuer,
            "audiences": provider.audiences,
            "algorithms": provider.algorithms,
            "keys": source,
            "allow_http": provider.allow_http,
            "roles": self._roles_of(provider.name),
            "description": provider.description,
            "created": iso_time(provider.created_ms),
        }

    def _show_role(self, role: Role) -> dict[str, Any]:
        used = self._use.last_used_ms(ROLE_PREFIX + role.name)
        return {
            "name": role.name,
            "arn": role_arn(ROLE_PREFIX + role.name),
            "provider": role.provider,
            "conditions": [asdict(each) for each in role.conditions],
            "policies": role.policies,
            "max_seconds": role.max_seconds,
            "description": role.description,
            "created": iso_time(role.created_ms),
            "last_used": iso_time(used) if used else "",
            **revocation_fields(role.ended),
        }


def _fields(body: NewRole | RoleChange) -> dict[str, Any]:
    return {name: getattr(body, name) for name in body.__struct_fields__}


def _existing(role: Role | None, name: str) -> Role:
    if role is None:
        raise no_such_role(name)
    return role


def _check_provider(provider: IdentityProvider) -> None:
    """Raise AdminError BadRequest unless the provider can be used."""
    check_text(description=provider.description)
    for what, url in (("issuer", provider.issuer), ("jwks_uri", provider.jwks_uri)):
        try:
            # With a stored key set the issuer is only a name, whatever its scheme.
            if url or what == "issuer":
                check_url(url, allow_http=provider.allow_http or bool(provider.jwks))
        except IssuerError as error:
            raise AdminError("BadRequest", f"{what}: {error}, not {url[:200]!r}") from None
    if "?" in provider.issuer:
        raise AdminError("BadRequest", "issuer: the URL of an issuer has no query")
    if provider.jwks and provider.jwks_uri:
        raise AdminError("BadRequest", "give jwks or jwks_uri, not both")
    _check_texts("audiences", provider.audiences)
    if not provider.algorithms or not set(provider.algorithms) <= set(ALGORITHM_KINDS):
        raise AdminError(
            "BadRequest",
            f"algorithms are one or more of {', '.join(ALGORITHM_KINDS)}; symmetric ones (HS*) and `none` "
            "are never accepted",
        )
    if provider.jwks:
        try:
            parse_key_set(provider.jwks)
        except KeySetError as error:
            raise AdminError("BadRequest", f"jwks: {error}") from None
    if provider.ca:
        _check_ca(provider.ca)


def _check_ca(pem: str) -> None:
    if len(pem) > _MAX_CA_BYTES:
        raise AdminError("BadRequest", f"ca: the certificates have more than {_MAX_CA_BYTES:,} bytes")
    try:
        ssl.create_default_context(cadata=pem)
    except (ssl.SSLError, ValueError):
        raise AdminError("BadRequest", "ca: expected certificates in PEM form") from None


def _check_conditions(conditions: tuple[TrustCondition, ...]) -> None:
    """Raise AdminError BadRequest unless the conditions are usable and say who may assume the role."""
    if len(conditions) > _MAX_LISTED:
        raise AdminError("BadRequest", f"a role has at most {_MAX_LISTED} conditions")
    for each in conditions:
        if not 0 < len(each.claim) <= 256 or not each.claim.isprintable():
            raise AdminError("BadRequest", "claim is the name of a claim, such as sub, or a JSON pointer")
        _check_texts(f"the values of {each.claim}", each.values)
    if all(each.claim in ("aud", "iss") for each in conditions):
        raise AdminError(
            "BadRequest",
            "a role needs a condition on a claim that says who may assume it, such as sub: otherwise "
            "everybody with a token of the issuer may",
            help="to trust everybody, give the claim sub with the wildcard value *",
        )


def _check_texts(what: str, texts: tuple[str, ...]) -> None:
    if not 0 < len(texts) <= _MAX_LISTED:
        raise AdminError("BadRequest", f"{what}: expected 1 to {_MAX_LISTED} texts")
    if not all(0 < len(text) <= _MAX_VALUE and text.isprintable() for text in texts):
        raise AdminError("BadRequest", f"{what}: each is a printable text of 1 to {_MAX_VALUE} characters")

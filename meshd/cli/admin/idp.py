"""`meshd admin idp`: identity providers, whose tokens are exchanged for temporary credentials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meshd.cli.admin.client import admin_client_options
from meshd.cli.admin.output import answer, as_json, confirm, print_hint, show_one, show_rows, yes

if TYPE_CHECKING:
    from meshd.cli.admin.client import AdminClient

_COLUMNS = ("name", "issuer", "audiences", "keys", "roles", "created")
_EXAMPLES = """
\b
An issuer for people, whose keys the nodes fetch themselves:
  meshd admin idp add company --issuer https://login.example.org/realms/ml --audience shardmesh

\b
A Kubernetes cluster's issuer, which the nodes need not reach:
  issuer=$(kubectl get --raw /.well-known/openid-configuration | jq -r .issuer)
  kubectl get --raw /openid/v1/jwks > jwks.json
  meshd admin idp add cluster --issuer "$issuer" --audience shardmesh.io --jwks jwks.json

\b
Then say which tokens get which rights: meshd admin role add --help
"""
_provider_options = (
    click.option(
        "--audience",
        "audiences",
        multiple=True,
        metavar="TEXT",
        help="An audience (aud) that tokens must have; repeatable: one of them is enough.",
    ),
    click.option(
        "--algorithm",
        "algorithms",
        multiple=True,
        metavar="NAME",
        help="An algorithm that tokens may be signed with; repeatable.  [RS256, ES256]",
    ),
    click.option(
        "--ca", type=click.File("r"), metavar="FILE", help="Trust these certificates (PEM) for the issuer."
    ),
    click.option(
        "--jwks", type=click.File("r"), metavar="FILE", help="The issuer's keys; nothing is fetched then."
    ),
    click.option(
        "--jwks-uri", metavar="URL", help="Where the keys are, if discovery is not to be used or is refused."
    ),
    click.option(
        "--allow-http/--no-allow-http",
        default=None,
        help="Fetch without TLS: only for an issuer on a network that you trust.",
    ),
    click.option("--description", help="A note for your records."),
)


def _options(command: Any) -> Any:
    for option in reversed(_provider_options):
        command = option(command)
    return command


@click.group(epilog=_EXAMPLES)
def idp() -> None:
    """Register, list, check, change and remove identity providers.

    An identity provider is an OpenID Connect issuer. A role trusts one of them: a token of it that meets the
    role's conditions is exchanged for temporary credentials.
    """


@idp.command("add")
@click.argument("name")
@click.option("--issuer", required=True, metavar="URL", help="The issuer, exactly as tokens have it (iss).")
@_options
@as_json
@admin_client_options()
def add(node: AdminClient, name: str, issuer: str, as_json: bool, **given: Any) -> None:
    """Register the identity provider NAME.

    \b
    meshd admin idp add company --issuer https://login.example.org/realms/ml --audience shardmesh
    """
    made = node.request("POST", "admin", "idps", body={"name": name, "issuer": issuer, **_body(given)})
    answer(made, as_json, lambda: _show(made))
    if not as_json:
        print_hint(f"next, try to get its keys: meshd admin idp check {name}")


@idp.command("ls")
@as_json
@admin_client_options()
def ls(node: AdminClient, as_json: bool) -> None:
    """List identity providers and the roles that trust them.

    \b
    meshd admin idp ls
    """
    found = node.list_all("admin", "idps")
    empty = "no identity providers; register one: meshd admin idp add NAME --issuer URL --audience TEXT"
    answer(found, as_json, lambda: show_rows(found, _COLUMNS, empty))


@idp.command("show")
@click.argument("name")
@as_json
@admin_client_options()
def show(node: AdminClient, name: str, as_json: bool) -> None:
    """Show an identity provider.

    --json also prints its certificates and its stored keys.

    \b
    meshd admin idp show company
    """
    found = node.request("GET", "admin", "idps", name)
    answer(found, as_json, lambda: _show(found))


@idp.command("check")
@click.argument("name")
@as_json
@admin_client_options()
def check(node: AdminClient, name: str, as_json: bool) -> None:
    """List the provider's keys as the node gets them.

    They are fetched now, as an exchange would fetch them; an error says why that fails.

    \b
    meshd admin idp check company
    """
    found = node.request("GET", "admin", "idps", name, "keys")
    if found["error"]:
        raise click.ClickException(f"{name}: {found['error']}")
    answer(found, as_json, lambda: show_rows(found["keys"], ("kid", "kind", "alg"), "no keys"))


@idp.command("set")
@click.argument("name")
@_options
@as_json
@admin_client_options()
def change(node: AdminClient, name: str, as_json: bool, **given: Any) -> None:
    """Change an identity provider.

    What is not given stays as it is.

    \b
    kubectl get --raw /openid/v1/jwks | meshd admin idp set cluster --jwks -
    """
    changed = node.request("PATCH", "admin", "idps", name, body=_body(given))
    answer(changed, as_json, lambda: _show(changed))


@idp.command("rm")
@click.argument("name")
@click.option("--force", is_flag=True, help="Even if roles trust it; they stay and cannot be assumed.")
@yes
@as_json
@admin_client_options()
def rm(node: AdminClient, name: str, force: bool, yes: bool, as_json: bool) -> None:
    """Remove an identity provider.

    Its tokens are refused at once; credentials stay valid until they expire, or until their role is revoked.

    \b
    meshd admin idp rm company
    """
    confirm(f"Remove the identity provider {name}?", yes)
    query = {"force": "true"} if force else None
    removed = node.request("DELETE", "admin", "idps", name, query=query)
    answer(removed, as_json, lambda: print_hint(f"removed {name}"))


def _body(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the options that were given."""
    body = {name: value for name, value in given.items() if value not in (None, ())}
    return {
        name: value.read() if name in ("ca", "jwks") and not isinstance(value, str) else value
        for name, value in body.items()
    }


def _show(found: dict[str, Any]) -> None:
    show_one({name: value for name, value in found.items() if name not in ("ca", "jwks")})

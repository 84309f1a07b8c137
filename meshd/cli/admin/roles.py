"""`meshd admin role`: roles, which tokens of an identity provider are exchanged for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meshd.cli.admin.client import admin_client_options
from meshd.cli.admin.output import answer, as_json, confirm, print_hint, show_one, show_rows, yes
from meshd.cli.admin.sts import add_revoke_command, parse_duration

if TYPE_CHECKING:
    from meshd.cli.admin.client import AdminClient

_COLUMNS = ("name", "arn", "provider", "conditions", "policies", "max_seconds", "last_used")
_EXAMPLES = """
\b
Pods of one service account of a Kubernetes cluster may do what the policy read-train allows:
  meshd admin role add trainer --idp cluster --policy read-train \\
      --claim sub=system:serviceaccount:train:trainer

\b
All service accounts of a namespace, and people of a group (a claim that is a list):
  meshd admin role add team --idp cluster --policy read-train --claim-like 'sub=system:serviceaccount:train:*'
  meshd admin role add people --idp company --policy read-train --claim groups=ml --max-duration 8h

\b
A claim within another one is named by a JSON pointer:
  --claim /kubernetes.io/serviceaccount/name=trainer

\b
A pod or a person then needs only this; boto3, awscli and the SDK do the rest:
  AWS_ROLE_ARN=arn:aws:iam:::role/trainer
  AWS_WEB_IDENTITY_TOKEN_FILE=/var/run/secrets/shardmesh.io/serviceaccount/token
  AWS_ENDPOINT_URL=https://mesh.example:9000
"""
_role_options = (
    click.option(
        "--claim",
        "equal",
        multiple=True,
        metavar="CLAIM=VALUE",
        help="The token's claim must be VALUE; repeatable. The same claim twice: either value.",
    ),
    click.option(
        "--claim-like",
        "like",
        multiple=True,
        metavar="CLAIM=PATTERN",
        help="The same, with * for any text and ? for any character.",
    ),
    click.option(
        "--max-duration",
        metavar="TIME",
        help="Longest lifetime of credentials, 15m to 12h.  [1h]",
    ),
    click.option("--description", help="A text for your records."),
)


def _options(command: Any) -> Any:
    for option in reversed(_role_options):
        command = option(command)
    return command


@click.group(epilog=_EXAMPLES)
def role() -> None:
    """Create, list, show, change, revoke and remove roles.

    A role may do what its policies allow, and nothing else. Who may assume it: everybody with a token of its
    identity provider that meets all conditions on claims.
    """


@role.command("add")
@click.argument("name")
@click.option("--idp", "provider", required=True, metavar="NAME", help="The identity provider to trust.")
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="Attach this policy; repeatable.")
@_options
@as_json
@admin_client_options()
def add(
    node: AdminClient, name: str, provider: str, policies: tuple[str, ...], as_json: bool, **given: Any
) -> None:
    """Create the role NAME.

    \b
    meshd admin role add trainer --idp cluster --policy read-train \\
        --claim sub=system:serviceaccount:train:trainer
    """
    body = {"name": name, "provider": provider, "policies": policies, "conditions": [], **_body(given)}
    made = node.request("POST", "admin", "roles", body=body)
    answer(made, as_json, lambda: _show(made))
    if not as_json:
        print_hint(f"next, in the pod: AWS_ROLE_ARN={made['arn']} and AWS_WEB_IDENTITY_TOKEN_FILE")


@role.command("ls")
@as_json
@admin_client_options()
def ls(node: AdminClient, as_json: bool) -> None:
    """List roles with their conditions and policies.

    \b
    meshd admin role ls
    """
    found = node.list_all("admin", "roles")
    rows = [each | {"conditions": _conditions_text(each["conditions"])} for each in found]
    empty = "no roles; create one: meshd admin role add NAME --idp IDP --claim sub=…"
    answer(found, as_json, lambda: show_rows(rows, _COLUMNS, empty))


@role.command("show")
@click.argument("name")
@as_json
@admin_client_options()
def show(node: AdminClient, name: str, as_json: bool) -> None:
    """Show a role.

    \b
    meshd admin role show trainer
    """
    found = node.request("GET", "admin", "roles", name)
    answer(found, as_json, lambda: _show(found))


@role.command("set")
@click.argument("name")
@click.option("--idp", "provider", metavar="NAME", help="Trust another identity provider.")
@_options
@as_json
@admin_client_options()
def change(node: AdminClient, name: str, provider: str | None, as_json: bool, **given: Any) -> None:
    """Change a role.

    What is not given stays as it is. Conditions that are given replace all earlier ones.

    \b
    meshd admin role set trainer --max-duration 8h
    """
    body = _body(given) | ({"provider": provider} if provider else {})
    changed = node.request("PATCH", "admin", "roles", name, body=body)
    answer(changed, as_json, lambda: _show(changed))


@role.command("rm")
@click.argument("name")
@yes
@as_json
@admin_client_options()
def rm(node: AdminClient, name: str, yes: bool, as_json: bool) -> None:
    """Remove a role. Its credentials are refused at once.

    \b
    meshd admin role rm trainer
    """
    confirm(f"Remove the role {name}? Its credentials end.", yes)
    removed = node.request("DELETE", "admin", "roles", name)
    answer(removed, as_json, lambda: print_hint(f"removed {name}; its credentials are no longer valid"))


add_revoke_command(
    role,
    "roles",
    "NAME",
    "Revoke the temporary credentials of the role {}?",
    """Revoke the temporary credentials of a role.

Clients that still have a valid token can get new ones at once.

\b
meshd admin role revoke trainer
""",
)


def _body(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the options that were given."""
    body: dict[str, Any] = {}
    if given["equal"] or given["like"]:
        body["conditions"] = [*_conditions(given["equal"], False), *_conditions(given["like"], True)]
    if given["max_duration"] is not None:
        body["max_seconds"] = parse_duration(given["max_duration"], "--max-duration")
    if given["description"] is not None:
        body["description"] = given["description"]
    return body


def _conditions(texts: tuple[str, ...], wildcard: bool) -> list[dict[str, Any]]:
    values: dict[str, list[str]] = {}
    for text in texts:
        claim, equals, value = text.partition("=")
        if not (claim and equals and value):
            option = "--claim-like" if wildcard else "--claim"
            raise click.UsageError(f"{option}: expected CLAIM=VALUE, such as sub=ann, not {text!r}")
        values.setdefault(claim, []).append(value)
    return [{"claim": claim, "values": found, "wildcard": wildcard} for claim, found in values.items()]


def _conditions_text(conditions: list[dict[str, Any]]) -> str:
    return "; ".join(
        f"{each['claim']} {'like' if each['wildcard'] else 'is'} {' or '.join(each['values'])}"
        for each in conditions
    )


def _show(found: dict[str, Any]) -> None:
    show_one(found | {"conditions": _conditions_text(found["conditions"])})

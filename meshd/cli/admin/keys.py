"""`meshd admin key`: access keys of users."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from meshd.cli.admin.client import admin_client_options
from meshd.cli.admin.output import answer, as_json, confirm, print_hint, show_one, show_rows, yes
from meshd.cli.admin.sts import add_revoke_command

if TYPE_CHECKING:
    from meshd.cli.admin.client import AdminClient

_COLUMNS = ("access_key", "user_id", "name", "enabled", "works", "origin", "policies", "created", "last_used")
_EXAMPLES = """
\b
Examples:
  meshd admin key add ann --name laptop
  meshd admin key add ann --policy read-train --json > key.json
  meshd admin key ls --user ann
  meshd admin key disable MESH0GO8111SCTDGVYCF      # refused at once; `enable` reverses it
"""


@click.group(epilog=_EXAMPLES)
def key() -> None:
    """Create, list, disable, enable and remove keys.

    A key has the rights of its user; attached policies limit it to what one of them allows.
    """


@key.command("add")
@click.argument("user_id")
@click.option("--name", default="", help="Purpose of the key: laptop, ci, …")
@click.option(
    "--policy", "policies", multiple=True, metavar="NAME", help="Limit the key by this policy; repeatable."
)
@click.option(
    "--access-key", default="", help="Use this access key; the secret is prompted for, or read from stdin."
)
@as_json
@admin_client_options()
def add(
    node: AdminClient, user_id: str, name: str, policies: tuple[str, ...], access_key: str, as_json: bool
) -> None:
    """Create a key for a user. Its secret is shown only once and cannot be read later.

    \b
    meshd admin key add ann --name laptop
    """
    secret = _ask_secret() if access_key else ""
    body = {"user_id": user_id, "name": name, "policies": policies, "access_key": access_key}
    made = node.request("POST", "admin", "keys", body=body | {"secret_key": secret})
    answer(made, as_json, lambda: show_one(made))
    if not as_json:
        print_hint("save the secret now: it is not shown again")


@key.command("ls")
@click.option("--user", "user_id", default="", metavar="USER_ID", help="Only keys of this user.")
@as_json
@admin_client_options()
def ls(node: AdminClient, user_id: str, as_json: bool) -> None:
    """List keys.

    `works` is no for a disabled key and for one whose user no longer exists; `last used` is accurate to the
    hour.

    \b
    meshd admin key ls --user ann
    """
    found = node.list_all("admin", "keys", query={"user": user_id})
    answer(
        found, as_json, lambda: show_rows(found, _COLUMNS, "no keys; create one: meshd admin key add USER")
    )


@key.command("show")
@click.argument("access_key")
@as_json
@admin_client_options()
def show(node: AdminClient, access_key: str, as_json: bool) -> None:
    """Show a key, without its secret.

    \b
    meshd admin key show MESH0GO8111SCTDGVYCF
    """
    found = node.request("GET", "admin", "keys", access_key)
    answer(found, as_json, lambda: show_one(found))


@key.command("disable")
@click.argument("access_key")
@as_json
@admin_client_options()
def disable(node: AdminClient, access_key: str, as_json: bool) -> None:
    """Disable a key at once. Its temporary credentials are refused too.

    \b
    meshd admin key disable MESH0GO8111SCTDGVYCF
    """
    _switch(node, access_key, as_json, enabled=False)


@key.command("enable")
@click.argument("access_key")
@as_json
@admin_client_options()
def enable(node: AdminClient, access_key: str, as_json: bool) -> None:
    """Enable a disabled key again.

    \b
    meshd admin key enable MESH0GO8111SCTDGVYCF
    """
    _switch(node, access_key, as_json, enabled=True)


@key.command("rm")
@click.argument("access_key")
@yes
@as_json
@admin_client_options()
def rm(node: AdminClient, access_key: str, yes: bool, as_json: bool) -> None:
    """Remove a key permanently. Its temporary credentials end with it.

    \b
    meshd admin key rm MESH0GO8111SCTDGVYCF
    """
    confirm(f"Remove the key {access_key} permanently? (`disable` can be undone)", yes)
    removed = node.request("DELETE", "admin", "keys", access_key)
    answer(removed, as_json, lambda: print_hint(f"removed {access_key}"))


add_revoke_command(
    key,
    "keys",
    "ACCESS_KEY",
    "Revoke the temporary credentials created with {}?",
    """Revoke the temporary credentials created with a key.

The key stays valid, and new temporary credentials can be requested at once.

\b
meshd admin key revoke MESH0GO8111SCTDGVYCF
meshd admin key revoke MESH0GO8111SCTDGVYCF --before 2026-11-22T03:00:00Z
""",
)


def _switch(node: AdminClient, access_key: str, as_json: bool, *, enabled: bool) -> None:
    changed = node.request("PATCH", "admin", "keys", access_key, body={"enabled": enabled})
    answer(changed, as_json, lambda: show_one(changed))


def _ask_secret() -> str:
    if sys.stdin.isatty():
        return str(click.prompt("Secret key", hide_input=True, confirmation_prompt=True))
    return sys.stdin.readline().strip()

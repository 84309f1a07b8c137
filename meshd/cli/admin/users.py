"""`meshd admin user`: users, who own buckets and hold keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meshd.cli.admin.client import admin_client_options
from meshd.cli.admin.output import answer, as_json, confirm, print_hint, show_one, show_rows, yes
from meshd.cli.admin.sts import add_revoke_command

if TYPE_CHECKING:
    from meshd.cli.admin.client import AdminClient

_COLUMNS = ("user_id", "display_name", "email", "origin", "policies", "created")
_EXAMPLES = """
\b
Examples:
  meshd admin user add ann --name "Ann Example" --policy read-train
  meshd admin user ls
  meshd admin user show ann
  meshd admin user revoke ann --yes      # their temporary credentials, not their keys
  meshd admin user rm ann --yes
"""


@click.group(epilog=_EXAMPLES)
def user() -> None:
    """Add, list, show, change and remove users.

    A user may create buckets and do everything in their own; policies add rights to others' buckets.
    """


@user.command("add")
@click.argument("user_id")
@click.option("--name", default="", help="Display name, shown as the owner of objects.  [USER_ID]")
@click.option("--email", default="", help="E-mail address, for your records.")
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="Attach this policy; repeatable.")
@as_json
@admin_client_options()
def add(
    node: AdminClient, user_id: str, name: str, email: str, policies: tuple[str, ...], as_json: bool
) -> None:
    """Add a user. They can sign once they have a key: `meshd admin key add USER_ID`.

    \b
    meshd admin user add ann --name 'Ann Example'
    """
    body = {"user_id": user_id, "display_name": name, "email": email, "policies": policies}
    made = node.request("POST", "admin", "users", body=body)
    answer(made, as_json, lambda: show_one(made))
    if not as_json:
        print_hint(f"next, create a key: meshd admin key add {user_id}")


@user.command("ls")
@as_json
@admin_client_options()
def ls(node: AdminClient, as_json: bool) -> None:
    """List users. `origin` is admin (created here), file (the users file) or root.

    \b
    meshd admin user ls
    """
    found = node.list_all("admin", "users")
    answer(found, as_json, lambda: show_rows(found, _COLUMNS, "no users; add one: meshd admin user add NAME"))


@user.command("show")
@click.argument("user_id")
@as_json
@admin_client_options()
def show(node: AdminClient, user_id: str, as_json: bool) -> None:
    """Show a user with their keys and buckets.

    \b
    meshd admin user show ann
    """
    found = node.request("GET", "admin", "users", user_id)
    answer(found, as_json, lambda: show_one(found))


@user.command("set")
@click.argument("user_id")
@click.option("--name", help="New display name.")
@click.option("--email", help="New e-mail address.")
@as_json
@admin_client_options()
def change(node: AdminClient, user_id: str, name: str | None, email: str | None, as_json: bool) -> None:
    """Change a user's display name or e-mail address.

    \b
    meshd admin user set ann --email ann@example.org
    """
    body: dict[str, Any] = {"display_name": name, "email": email}
    changed = node.request("PATCH", "admin", "users", user_id, body=body)
    answer(changed, as_json, lambda: show_one(changed))


@user.command("rm")
@click.argument("user_id")
@click.option(
    "--force",
    is_flag=True,
    help="Remove the user even if they own buckets, which then stay and can be used by root.",
)
@yes
@as_json
@admin_client_options()
def rm(node: AdminClient, user_id: str, force: bool, yes: bool, as_json: bool) -> None:
    """Remove a user with all their keys. They are refused everywhere at once.

    \b
    meshd admin user rm ann
    """
    confirm(f"Remove the user {user_id} and all their keys?", yes)
    query = {"force": "true"} if force else None
    removed = node.request("DELETE", "admin", "users", user_id, query=query)
    answer(removed, as_json, lambda: print_hint(f"removed {user_id} and their keys"))


add_revoke_command(
    user,
    "users",
    "USER_ID",
    "Revoke the temporary credentials of {}?",
    """Revoke the temporary credentials created with any key of a user.

The keys stay valid, and new temporary credentials can be requested at once.

\b
meshd admin user revoke ann
meshd admin user revoke ann --before 2026-11-22T03:00:00Z
""",
)

"""`meshd admin policy`: named policies and their attachments."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any

import click

from meshd.cli.admin.client import admin_client_options
from meshd.cli.admin.output import answer, as_json, confirm, print_hint, show_json, show_one, show_rows, yes

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.cli.admin.client import AdminClient

_EXAMPLES = """
\b
A policy that lets its holder read one prefix (read-train.json):
  {"Version": "2012-10-17", "Statement": [
    {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::photos/train/*"},
    {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "arn:aws:s3:::photos",
     "Condition": {"StringLike": {"s3:prefix": "train/*"}}}]}

\b
Examples:
  meshd admin policy put read-train read-train.json
  meshd admin policy attach read-train --user ann        # adds the right to those of ann
  meshd admin policy attach read-train --key MESH0GO…    # limits this key to it
  meshd admin policy attach read-train --role trainer    # allows it to the role
  meshd admin policy show read-train --json
"""


@click.group(epilog=_EXAMPLES)
def policy() -> None:
    """Create, list, show, attach, detach and remove policies.

    Attached to a user, a policy adds rights (and a Deny removes them); attached to a key, it limits that key.
    A role may do what its policies allow, and nothing else.
    """


@policy.command("put")
@click.argument("name")
@click.argument("file", type=click.File("rb"))
@as_json
@admin_client_options()
def put(node: AdminClient, name: str, file: IO[bytes], as_json: bool) -> None:
    """Create or replace the policy NAME from FILE (- for stdin). It takes effect at once where it is
    attached.

    \b
    meshd admin policy put read-train read-train.json
    """
    made = node.request("PUT", "admin", "policies", name, body=file.read())
    answer(made, as_json, lambda: _show(made))


@policy.command("ls")
@as_json
@admin_client_options()
def ls(node: AdminClient, as_json: bool) -> None:
    """List policies and what they are attached to.

    \b
    meshd admin policy ls
    """
    found = node.list_all("admin", "policies")
    columns = ("name", "users", "keys", "roles", "created")
    empty = "no policies; create one: meshd admin policy put NAME FILE"
    answer(found, as_json, lambda: show_rows(found, columns, empty))


@policy.command("show")
@click.argument("name")
@as_json
@admin_client_options()
def show(node: AdminClient, name: str, as_json: bool) -> None:
    """Show a policy and its document; --json prints both as JSON.

    \b
    meshd admin policy show read-train --json
    """
    found = node.request("GET", "admin", "policies", name)
    answer(found, as_json, lambda: _show(found))


@policy.command("rm")
@click.argument("name")
@click.option(
    "--force",
    is_flag=True,
    help="Remove it even if it is attached; those users and keys are then refused everything.",
)
@yes
@as_json
@admin_client_options()
def rm(node: AdminClient, name: str, force: bool, yes: bool, as_json: bool) -> None:
    """Remove a policy.

    \b
    meshd admin policy rm read-train
    """
    confirm(f"Remove the policy {name}?", yes)
    query = {"force": "true"} if force else None
    removed = node.request("DELETE", "admin", "policies", name, query=query)
    answer(removed, as_json, lambda: print_hint(f"removed {name}"))


def _holder_options(word: str) -> Callable[[Any], Any]:
    def add_options(command: Any) -> Any:
        for name, metavar in (("role", "NAME"), ("key", "ACCESS_KEY"), ("user", "USER_ID")):
            command = click.option(f"--{name}", metavar=metavar, help=f"{word} this {name}.")(command)
        return command

    return add_options


@policy.command("attach")
@click.argument("name")
@_holder_options("To")
@as_json
@admin_client_options()
def attach(node: AdminClient, name: str, as_json: bool, **holder: str | None) -> None:
    """Attach a policy to a user, a key or a role.

    \b
    meshd admin policy attach read-train --user ann
    """
    changed = node.request("PUT", "admin", *_holder(**holder), "policies", name)
    answer(changed, as_json, lambda: show_one(changed))


@policy.command("detach")
@click.argument("name")
@_holder_options("From")
@as_json
@admin_client_options()
def detach(node: AdminClient, name: str, as_json: bool, **holder: str | None) -> None:
    """Detach a policy from a user, a key or a role. A key without policies has all rights of its user, a role
    without policies none.

    \b
    meshd admin policy detach read-train --user ann
    """
    changed = node.request("DELETE", "admin", *_holder(**holder), "policies", name)
    answer(changed, as_json, lambda: show_one(changed))


def _holder(user: str | None, key: str | None, role: str | None) -> tuple[str, str]:
    given = [(kind, name) for kind, name in (("users", user), ("keys", key), ("roles", role)) if name]
    if len(given) != 1:
        raise click.UsageError("give either --user USER_ID, --key ACCESS_KEY or --role NAME")
    return given[0]


def _show(found: dict[str, object]) -> None:
    show_one({name: value for name, value in found.items() if name != "policy"})
    show_json(json.loads(json.dumps(found["policy"])))

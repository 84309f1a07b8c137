"""`mesh op`: what nodes can do to a field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from meshsdk import library
from meshsdk.cli.pushing import list_modules, push, rm, test
from meshsdk.cli.running import shared_options

if TYPE_CHECKING:
    from meshsdk.cli.running import Session
    from meshsdk.library import Argument, OpInfo


@click.group("op")
def op() -> None:
    """What storage nodes can do to a field: in plans (`Dataset.map`) and in views (`--op`).

    Beside the ops that nodes come with there are those of your own: one Python file is a module, each of its
    functions an op named MODULE/FUNCTION. They run in processes of their own, with limits on memory, time and
    files.
    """


for _command in (push, test, list_modules, rm):
    op.add_command(_command)


@op.command("ls")
@click.argument("word", default="")
@shared_options
def list_all(session: Session, word: str) -> None:
    """Lists the node's ops, or those that are about WORD.

    \b
    mesh op ls
    mesh op ls crop
    """
    with session.client() as client:
        listed = library.list_ops(client.transport)
    found = [line for line in listed if word.lower() in f"{line.op} {line.summary}".lower()]
    if not found:
        session.tell(f"no op is about {word!r}: `mesh op ls` lists all {len(listed)}")
    for line in found:
        session.show(
            f"{line.op:20} {line.takes} → {line.gives}",
            op=line.op,
            version=line.version,
            summary=line.summary,
            takes=line.takes,
            gives=line.gives,
            arguments=list(line.arguments),
        )


@op.command()
@click.argument("name")
@shared_options
def show(session: Session, name: str) -> None:
    """Tells what an op takes, gives, and refuses; its arguments.

    \b
    mesh op show random_resized_crop
    """
    with session.client() as client:
        found = library.show_op(client.transport, name)
    session.show(
        _page(found),
        op=found.op,
        version=found.version,
        versions=list(found.versions),
        summary=found.summary,
        takes=found.takes,
        gives=found.gives,
        refuses=found.refuses,
        random=found.random,
        mixes=found.mixes,
        inputs=list(found.inputs),
        arguments=[
            {"name": item.name, "kind": item.kind, "required": item.required, "default": item.default}
            for item in found.arguments
        ],
    )


def _page(found: OpInfo) -> str:
    lines = [f"{found.op} (version {found.version})", f"  {found.summary}", ""]
    lines += [f"  takes  {found.takes}", f"  gives  {found.gives}"]
    if found.refuses:
        lines.append(f"  a sample is bad when: {found.refuses}")
    if found.random:
        lines.append("  draws: keyed by seed, epoch and position, the same on every node")
    if found.arguments:
        wide = max(len(item.name) for item in found.arguments)
        lines += ["", *(f"  {item.name:{wide}}  {_told(item)}" for item in found.arguments)]
    given = [f"{item.name}={_example(item)}" for item in found.arguments if item.required]
    lines.append("")
    if found.op.isidentifier():
        lines.append(f"  in a plan: ds.map(ops.{found.op}({', '.join(['FIELD', *given])}))")
    else:
        fields = f"({', '.join(map(repr, found.inputs))})" if found.inputs else "FIELD"
        lines.append(f"  in a plan: ds.map(ops.user({', '.join([repr(found.op), fields, *given])}))")
    if not found.mixes and not found.inputs:
        lines.append(f"  in a view: --op '{' '.join([found.op, *given])}'")
    return "\n".join(lines)


def _told(item: Argument) -> str:
    if item.required:
        return f"{item.kind} (required)"
    return f"{item.kind}  [default: {json.dumps(item.default, ensure_ascii=False)}]"


def _example(item: Argument) -> str:
    """A place holder for a value, or the first choice."""
    return item.kind.split('"')[1] if item.kind.startswith('one of "') else item.name.upper()

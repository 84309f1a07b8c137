"""`mesh op`: the ops of the nodes, and modules of your own: push, test, list and remove.

Law: the node describes its ops and builds user modules; this command only sends and prints.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshsdk.admin import op_catalog
from meshsdk.byte_sizes import format_size
from meshsdk.cli.command_base import EXIT_FAILED, shared_options
from meshsdk.cli.view import parse_op
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from meshsdk.admin.op_catalog import Argument, OpInfo, Pushed, Trial, Trials
    from meshsdk.cli.command_base import Session
    from meshsdk.client.s3_client import Client


_SHORT = 19  # of a version: "sha256:" and twelve digits
_MOST = 64
_PIP_SECONDS = 600


def wheel_options(command: Any) -> Any:
    """Add the options of what a module brings along."""
    command = click.option(
        "--requirements",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Requirements file; each requirement is sent as a wheel.",
    )(command)
    return click.option(
        "--wheel",
        "wheels",
        multiple=True,
        metavar="FILE|NAME",
        help="A wheel to send, or a requirement for pip to download; repeatable.",
    )(command)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="MODULE.py")
@click.option("--name", metavar="NAME", help="Name of the module.  [the file's]")
@click.option("--draft", is_flag=True, help="Usable only by version; the name keeps its current build.")
@wheel_options
@shared_options
def push(
    session: Session,
    file: Path,
    name: str | None,
    draft: bool,
    wheels: Sequence[str],
    requirements: Path | None,
) -> None:
    """Push a Python file of functions marked with @op to the node.

    Each function becomes the op NAME/FUNCTION, for plans (`ops.user`) and views (`--op`). Its version is
    the hash of the content: plans keep the build they were created with, whatever is pushed later.

    Libraries that the nodes do not have are sent as wheels. pip downloads the named ones for this machine,
    without their dependencies. Compiled wheels require nodes whose kernel has Landlock, and one wheel for
    each Python version and CPU architecture among the nodes.

    \b
    mesh op push augment.py
    mesh op push augment.py --wheel einops==0.8.1 --wheel ./ours-1.0-py3-none-any.whl
    mesh op show augment/brighten
    mesh view create photos--bright --op decode --op 'augment/brighten gain=1.5' --op 'encode format=jpeg'
    \b
    A module:
      import numpy as np
      from meshsdk.userops import image, op
    \b
      @op(input=image("h", "w", 3), output=image("h", "w", 3))
      def brighten(pixels, *, gain: float = 1.2):
          "Pixels times gain."
          return np.clip(pixels * gain, 0, 255).astype(np.uint8)
    """
    brought = collect_wheels(wheels, requirements)
    with session.make_client() as client:
        pushed = _push(client, file, name, brought, draft=draft)
    known = "" if pushed.new else " (unchanged)"
    lines = [f"{pushed.module} {pushed.version}{known}"]
    lines += [f"  {item['op']:24} {item['takes']} → {item['gives']}" for item in pushed.ops]
    if draft:
        lines.append(f"  a draft: use it by its version, with version={pushed.version[:_SHORT]}…")
    session.show(
        "\n".join(lines),
        module=pushed.module,
        version=pushed.version,
        draft=pushed.draft,
        new=pushed.new,
        held=list(pushed.held),
        ops=list(pushed.ops),
    )


def _push(
    client: Client, file: Path, name: str | None, wheels: Mapping[str, bytes], *, draft: bool
) -> Pushed:
    source, called = file.read_bytes(), name or file.stem
    return op_catalog.push_module(client.transport, called, source, draft=draft, wheels=wheels)


def collect_wheels(wheels: Sequence[str], requirements: Path | None) -> dict[str, bytes]:
    """Return wheels by name: files, and what pip downloads. Raises ConfigurationError."""
    files = [Path(each) for each in wheels if each.endswith(".whl")]
    wanted = [each for each in wheels if not each.endswith(".whl")]
    wanted += ["-r", str(requirements)] if requirements is not None else []
    with tempfile.TemporaryDirectory() as folder:
        if wanted:
            options = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", folder]
            command = [sys.executable, "-m", "pip", "download", *options, *wanted]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
            if done.returncode:
                said = done.stderr.strip().splitlines()[-1:] or ["pip failed"]
                raise ConfigurationError(
                    f"--wheel {' '.join(wanted)}: {said[0]}; or give the file of a wheel"
                )
            files += sorted(Path(folder).glob("*.whl"))
        try:
            return {file.name: file.read_bytes() for file in files}
        except OSError as error:
            raise ConfigurationError(f"--wheel {error.filename}: {error.strerror}") from error


@click.command()
@click.argument("what", metavar="OP|'OP KEY=VALUE …'|MODULE.py")
@click.argument("samples", nargs=-1, required=True, metavar="s3://BUCKET/KEY…")
@click.option("--op", "name", metavar="FUNCTION", help="The op of MODULE.py to test.  [its only one]")
@click.option("--arg", "args", multiple=True, metavar="KEY=VALUE", help="An argument of the op; repeatable.")
@click.option(
    "--before", multiple=True, metavar="'NAME KEY=VALUE …'", help="Ops before it; repeatable, in order."
)
@click.option(
    "--after", multiple=True, metavar="'NAME KEY=VALUE …'", help="Ops after it; repeatable, in order."
)
@click.option(
    "--limit", default=8, show_default=True, type=click.IntRange(1, _MOST), help="Objects per prefix."
)
@click.option("--seed", default=0, show_default=True, help="Seed of random ops.")
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), help="Folder for the outputs.")
@wheel_options
@shared_options
def test(
    session: Session,
    what: str,
    samples: Sequence[str],
    name: str | None,
    args: Sequence[str],
    before: Sequence[str],
    after: Sequence[str],
    limit: int,
    seed: int,
    save: Path | None,
    wheels: Sequence[str],
    requirements: Path | None,
) -> int:
    """Apply an op to chosen objects, and report the results.

    A file is pushed as a draft first, so nothing else changes. Each sample is processed twice, in different
    order, to detect an op that is not deterministic. A prefix (`s3://photos/train/`) stands for its first
    objects. Exit code 1 if anything is wrong.

    \b
    mesh op test augment.py --op brighten --arg gain=2 --before decode s3://photos/train/0001.jpg
    mesh op test augment/brighten --before decode s3://photos/train/ --limit 20
    mesh op test 'resize size=64' --before decode s3://photos/train/
    mesh op test augment/brighten --before decode --after 'encode format=png' --save ./out
    s3://photos/train/
    """
    brought = collect_wheels(wheels, requirements)
    with session.make_client() as client:
        tried = _spec(client, what, name, brought)
        tried["args"] = tried.get("args", {}) | parse_op(" ".join(["op", *args]))["args"]
        chain = [*map(parse_op, before), tried, *map(parse_op, after)]
        keys = list(_samples(client, samples, limit))
        trials = op_catalog.try_ops(client.transport, chain, keys, seed=seed, results=save is not None)
    for number, trial in enumerate(trials.results):
        _show(session, trial, _save_trial(save, number, trial, trials) if save is not None else "")
    wrong = [trial for trial in trials.results if trial.error or trial.repeats is not True]
    left = len(keys) - len(trials.results)
    version = next(version for op, version in trials.ops if op == tried["op"])
    shown = version if len(version) <= _SHORT else f"{version[:_SHORT]}…"
    text = f"{tried['op']} {shown} outputs {trials.output}: "
    text += f"{len(trials.results) - len(wrong)} of {len(keys)} correct"
    session.show(
        text + (f", {left} not reached in time" if left else ""),
        op=tried["op"],
        version=version,
        output=trials.output,
        samples=len(keys),
        wrong=len(wrong) + left,
    )
    return EXIT_FAILED if wrong or left else 0


def _spec(client: Client, what: str, name: str | None, wheels: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the op under test; a file is pushed as a draft."""
    if not what.endswith(".py"):
        return parse_op(what)
    pushed = _push(client, Path(what), None, wheels, draft=True)
    names = [str(item["op"]) for item in pushed.ops]
    wanted = f"{pushed.module}/{name}" if name else names[0]
    if wanted not in names or (name is None and len(names) > 1):
        known = ", ".join(item.partition("/")[2] for item in names)
        raise ConfigurationError(f"{what} has the ops {known}; choose one with --op")
    return {"op": wanted, "version": pushed.version}


def _samples(client: Client, samples: Sequence[str], limit: int) -> Iterator[str]:
    for url in samples:
        match = re.fullmatch(r"s3://([^/]+)/(.*)", url)
        if match is None:
            raise ConfigurationError(
                f"{url!r} is not an object; expected s3://BUCKET/KEY, or a prefix that ends in /"
            )
        bucket, key = match.groups()
        if key and not key.endswith("/"):
            yield url
            continue
        found = [item.key for _, item in zip(range(limit), client.list(bucket, key), strict=False)]
        if not found:
            raise ConfigurationError(f"no objects found at {url}")
        yield from (f"s3://{bucket}/{item}" for item in found)


def _show(session: Session, trial: Trial, saved: str) -> None:
    if trial.error:
        text = f"{trial.sample}  {trial.code}: {trial.error}"
    else:
        text = f"{trial.sample}  {format_size(trial.size)} in {trial.seconds * 1000:.1f} ms"
        if trial.repeats is False:
            text += "  NOT REPEATED: the second run gave a different result"
        elif trial.repeats is None:
            text += "  (not tried twice)"
        text += f"  → {saved}" if saved else ""
    record = {"sample": trial.sample, "bytes": trial.size, "seconds": trial.seconds, "sha256": trial.sha256}
    record |= {"repeats": trial.repeats, "code": trial.code, "op": trial.op, "error": trial.error}
    session.show(text, **record, **({"saved": saved} if saved else {}))


def _save_trial(folder: Path, number: int, trial: Trial, trials: Trials) -> str:
    if trial.result is None:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", trial.sample.rpartition("/")[2])[-100:]
    target = folder / f"{number}-{stem}{'' if trials.output.startswith('bytes') else '.npy'}"
    target.write_bytes(trial.result)
    return str(target)


@click.command("modules")
@shared_options
def list_modules(session: Session) -> None:
    """List pushed modules and their builds, newest first.

    \b
    mesh op modules
    """
    with session.make_client() as client:
        found = op_catalog.list_modules(client.transport)
    if not found:
        session.tell("no modules yet: mesh op push FILE.py")
    for module in found:
        for build in module.builds:
            when = datetime.fromtimestamp(build.pushed_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")
            state = "draft" if build.draft else "latest" if build.version == module.version else ""
            ops = " ".join(build.ops)
            session.show(
                f"{module.module:16} {build.version}  {when}  {build.pushed_by:12} {state:6} {ops}",
                module=module.module,
                version=build.version,
                source=build.source,
                pushed_ms=build.pushed_ms,
                pushed_by=build.pushed_by,
                state=state,
                ops=list(build.ops),
            )


@click.command()
@click.argument("name", metavar="MODULE")
@click.option("--version", default="", metavar="sha256:HEX", help="Only this build.  [all builds]")
@shared_options
def rm(session: Session, name: str, version: str) -> None:
    """Remove a module, or one build of it. Plans and views that use it are rejected from then on.

    \b
    mesh op modules
    mesh op rm augment --version sha256:0b1c…
    """
    with session.make_client() as client:
        removed = op_catalog.remove_module(client.transport, name, version)
    for gone in removed:
        session.show(f"removed {name} {gone}", action="remove", module=name, version=gone)


@click.group("op")
def op() -> None:
    """Show the nodes' ops on fields, for plans (`Dataset.map`) and views (`--op`); push and test your own.

    In addition to the built-in ops you can push your own: one Python file is a module, and each of its
    functions an op named MODULE/FUNCTION. They run in separate processes, with limits on memory, time and
    files.
    """


for _command in (push, test, list_modules, rm):
    op.add_command(_command)


@op.command("ls")
@click.argument("word", default="")
@shared_options
def list_all(session: Session, word: str) -> None:
    """List the node's ops, or those that match WORD.

    \b
    mesh op ls
    mesh op ls crop
    """
    with session.make_client() as client:
        listed = op_catalog.list_ops(client.transport)
    found = [line for line in listed if word.lower() in f"{line.op} {line.summary}".lower()]
    if not found:
        session.tell(f"no op matches {word!r}: `mesh op ls` lists all {len(listed)}")
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
    """Show an op's input, output, bad samples and arguments.

    \b
    mesh op show random_resized_crop
    """
    with session.make_client() as client:
        found = op_catalog.show_op(client.transport, name)
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
        lines.append(f"  a sample is bad if: {found.refuses}")
    if found.random:
        lines.append("  random: keyed by seed, epoch and position, the same on every node")
    if found.arguments:
        wide = max(len(item.name) for item in found.arguments)
        lines += ["", *(f"  {item.name:{wide}}  {_describe_argument(item)}" for item in found.arguments)]
    given = [f"{item.name}={_example(item)}" for item in found.arguments if item.required]
    lines.append("")
    inputs = [repr(name) for name in found.inputs]
    if found.op.isidentifier():
        lines.append(f"  in a plan: ds.map(ops.{found.op}({', '.join([*(inputs or ['FIELD']), *given])}))")
    else:
        fields = f"({', '.join(map(repr, found.inputs))})" if found.inputs else "FIELD"
        lines.append(f"  in a plan: ds.map(ops.user({', '.join([repr(found.op), fields, *given])}))")
    if not found.mixes and not found.inputs:
        lines.append(f"  in a view: --op '{' '.join([found.op, *given])}'")
    return "\n".join(lines)


def _describe_argument(item: Argument) -> str:
    if item.required:
        return f"{item.kind} (required)"
    return f"{item.kind}  [default: {json.dumps(item.default, ensure_ascii=False)}]"


def _example(item: Argument) -> str:
    """Return a placeholder for a value, or the first choice."""
    return item.kind.split('"')[1] if item.kind.startswith('one of "') else item.name.upper()

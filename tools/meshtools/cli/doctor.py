"""`mesh doctor`: where a training job's time goes, and the cheapest fix."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import click

from meshsdk.cli.bench import parse_op
from meshsdk.cli.cat import KIND_OPTION, parse_fields
from meshsdk.cli.command_base import shared_options
from meshsdk.cli.documents import whole_hash
from meshsdk.cli.path_arguments import SCHEME, parse_location
from meshsdk.errors import BadSampleError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.cli.command_base import Session
    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset
    from meshsdk.loader.loader_setup import MeasuredPlan
    from meshsdk.open_dataset import Kind
    from meshtools.doctor.advice import Diagnosis

_HASH = re.compile(r"[0-9a-f]{6,64}")  # of a plan, or its first digits
_VIEW = re.compile(r"[a-z0-9][a-z0-9.-]*--[a-z0-9.-]+")
_USUAL_BATCH = 256
_DOING = {
    "fetch": "takes batches that no node has prepared",
    "preprocessing": "takes them again, now with recently read sources",
    "network": "takes batches that are ready on the nodes",
    "compute": "takes batches from memory",
}


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="URL|VIEW|PLAN or -- COMMAND…")
@click.option("-b", "--batch", type=click.IntRange(1), help="Global batch size [256, or the view's].")
@click.option("--world", type=click.IntRange(1), help="Ranks that share it [1, or the view's].")
@click.option("--step-time", type=click.FloatRange(0), default=0.0, help="Seconds of compute per step [0].")
@click.option("--field", "fields", multiple=True, help="NAME=EXT[;EXT], NAME=@class [default: guessed].")
@KIND_OPTION
@click.option("--filter", "condition", help="Only samples for which this expression is true.")
@click.option("--op", "ops", multiple=True, help="OP:FIELD or OP:FIELD:SIZE, in order.")
@click.option("--loader", type=click.IntRange(1), default=1, help="Measure a script's N-th loader [1].")
@click.option("-n", "--steps", type=click.IntRange(2, 10_000), default=32, help="Steps timed per stage [32].")
@shared_options
def doctor(
    session: Session,
    what: Sequence[str],
    batch: int | None,
    world: int | None,
    step_time: float,
    fields: Sequence[str],
    kind: Kind,
    condition: str | None,
    ops: Sequence[str],
    loader: int,
    steps: int,
) -> None:
    """Find what a training job waits for, by removing one stage after the other (fetching, preprocessing, the
    network) until only its own compute is left. Report the longest stall and its cheapest fix, with the
    maximum gain of that fix.

    A command runs unmodified, and is stopped when the measurement is complete. It trains on repeated batches:
    make it write its checkpoints to a scratch directory.

    \b
    mesh doctor -- python train.py
    mesh doctor -- torchrun --nproc-per-node 8 train.py
    mesh doctor s3://photos/train --op decode:image --op center_crop:image:224 -b 256 --step-time 0.05
    mesh doctor photos--train224
    mesh doctor 4f1c09e2 -b 256          a plan's hash, or its first digits: mesh plans ls
    """
    from meshtools.doctor import examine_plan, script_hook
    from meshtools.doctor.stage_times import RUNS

    target = what[0] if len(what) == 1 and _is_target(what[0]) else None
    if target is None:
        if _is_target(what[0]) and shutil.which(what[0]) is None:
            raise ConfigurationError(
                f"{what[0]} and {what[1]!r}: give one dataset, or a command, which opens its own dataset"
            )
        if fields or ops or condition or batch or world or step_time:
            raise ConfigurationError(
                "a command has its own dataset and batch size; with a command, use only --steps and --loader"
            )
        line = session.lines("doctor", len(RUNS))  # the command prints, too: its output would tear a bar
        _show(
            session,
            script_hook.examine_script(
                what, steps=steps, loader=loader, progress=lambda run: line(_DOING[run])
            ),
        )
        return
    with session.make_client() as client:
        subject, ds = _subject(client, target, batch, world, (fields, kind, condition, ops))
        try:
            with session.logged_steps("doctor", len(RUNS)) as done:
                found = examine_plan.examine(
                    subject, steps=steps, step_seconds=step_time, progress=lambda run: done(_DOING[run])
                )
        except BadSampleError:
            if ds is not None:
                ds.preflight()  # if none can be prepared, its error says what the samples look like
            raise
    _show(session, found)


def _is_target(text: str) -> bool:
    if _HASH.fullmatch(text):
        return shutil.which(text) is None  # six letters and more may be a command
    return text.startswith(SCHEME) or _VIEW.fullmatch(text) is not None


def _subject(
    client: Client,
    target: str,
    batch: int | None,
    world: int | None,
    dataset: tuple[Sequence[str], Kind, str | None, Sequence[str]],
) -> tuple[MeasuredPlan, Dataset | None]:
    from meshsdk.loader.loader import Loader
    from meshsdk.open_dataset import open as open_dataset
    from meshtools.doctor.examine_plan import plan_subject, view_subject

    fields, kind, condition, ops = dataset
    view = target.removeprefix(SCHEME).rstrip("/")
    if _HASH.fullmatch(target):
        plan = whole_hash(client, "plans", target)
        return plan_subject(client.transport, plan, batch or _USUAL_BATCH, world or 1), None
    if _VIEW.fullmatch(view):
        return view_subject(client.transport, view, batch, world), None
    made = [parse_op(op) for op in ops]
    url = str(parse_location(target))
    ds = open_dataset(url, parse_fields(fields) if fields else None, kind=kind, client=client)
    ds = (ds if condition is None else ds.filter(condition)).map(*made)
    return Loader(ds, batch or _USUAL_BATCH, rank=0, world=world or 1, output="numpy").subject(), ds


def _show(session: Session, found: Diagnosis) -> None:
    from meshtools.doctor.advice import render_report

    session.show(render_report(found), **found.to_dict())

"""`mesh tune`: what to change on a live mesh, what that gains, and what it has gained."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Final

import click

from meshsdk.cli.command_base import shared_options
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.cli.command_base import Session
    from meshsdk.client.transport import Transport
    from meshtools.tune.changes import Advice, Change
    from meshtools.tune.live_mesh import Outcome
    from meshtools.tune.observation import Observation

KINDS: Final = (
    "decoded cache",
    "decoded quota",
    "transform processes",
    "sharing",
    "cache quota",
    "prefetch",
    "order",
    "read-ahead",
    "parallel runs",
    "copies",
)
"""Of changes: those of `meshtools.tune.changes`, which is imported when it is needed."""
_LEAST_WINDOW: Final = 5.0  # seconds; loops report once a second at most


@click.command()
@click.option(
    "-w",
    "--window",
    type=click.FloatRange(_LEAST_WINDOW, 3600),
    default=15.0,
    help="Seconds for which the mesh is observed, before and after a change [15].",
)
@click.option(
    "--apply", "applies", is_flag=True, help="Make the changes that a running mesh accepts; asks before each."
)
@click.option(
    "--yes", is_flag=True, help="With --apply: do not ask; make every change with a predicted gain."
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(KINDS),
    metavar="KIND",
    help=f"Only changes of this kind; repeatable: {', '.join(KINDS)}.",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=900.0,
    help="With --apply: maximum seconds to wait for the loops to complete an epoch [900].",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=NUMBER",
    help="Another rate of the model, as with mesh sizing.",
)
@shared_options
def tune(
    session: Session,
    window: float,
    applies: bool,
    yes: bool,
    only: Sequence[str],
    patience: float,
    changes: Sequence[str],
) -> None:
    """Suggest changes to a running mesh: caches, order of a loop, read-ahead, sharing, parallel runs, copies.
    Each change comes with the gain that the model of `mesh sizing` predicts from current measurements, the
    reason, and the command. Run it during training, with loops that report (MESH_REPORT=NAME).

    With --apply, change quotas and copies of buckets, which are all that running nodes accept, and measure
    the gain. Copies make nothing faster: --yes does not change them, unless --only names them.

    \b
    mesh tune
    mesh tune --apply --only "decoded quota"
    mesh tune --json --window 60
    """
    from meshtools.cli.hardware_estimate import read_assumptions
    from meshtools.tune.changes import advise
    from meshtools.tune.live_mesh import with_facts

    if applies and not yes and (session.as_json or not sys.stdin.isatty()):
        raise ConfigurationError("--apply asks on a terminal; without one, give --yes as well")
    assumed = read_assumptions(None, changes)
    with session.make_client() as client:
        seen, parts = _watch(session, client.transport, window)
        seen = with_facts(seen, client.transport)
        advice = advise(seen, assumed)
        chosen = [change for change in advice.changes if not only or change.kind in only]
        session.show(_text(seen, advice, chosen), **_record(seen, advice, chosen))
        if not applies:
            return
        live = [change for change in chosen if change.live]
        if not live:
            session.tell("nothing of this can be changed while the nodes run")
        wanted = [change for change in live if _confirm(change, yes=yes, named=change.kind in only)]
        if wanted:
            _apply(session, client.transport, wanted, parts, window, patience)


def _watch(session: Session, transport: Transport, window: float) -> tuple[Observation, list[Observation]]:
    """Observe the mesh for the window, with a bar that says how much of it is over."""
    from meshtools.tune.live_mesh import PARTS, watch

    with session.steps(f"observing the mesh for {window:.0f} s", PARTS) as done:

        def wait(seconds: float) -> None:
            threading.Event().wait(seconds)
            done()

        return watch(transport, window, wait)


def _confirm(change: Change, *, yes: bool, named: bool) -> bool:
    if yes:
        return named or change.rate > 0
    return click.confirm(f"{change.command}?")


def _apply(
    session: Session,
    transport: Transport,
    wanted: Sequence[Change],
    parts: Sequence[Observation],
    window: float,
    patience: float,
) -> None:
    """Make changes, wait for their effect, and say what was gained."""
    from meshtools.tune.live_mesh import Outcome, apply_setting, await_effect, rate_of

    for change in wanted:
        assert change.setting is not None
        apply_setting(transport, change.setting)
        session.tell(f"changed: {change.command}; back: {change.undo}")
    faster = [change for change in wanted if change.rate]
    with session.steps("until the loops are an epoch further"):
        settled = await_effect(transport, faster, patience, threading.Event().wait)
    _, later = _watch(session, transport, window)
    for change in wanted:
        outcome = Outcome(change, rate_of(parts, change.loops), rate_of(later, change.loops), settled)
        session.show(_outcome_text(outcome), **_outcome_record(outcome))


def _text(seen: Observation, advice: Advice, chosen: Sequence[Change]) -> str:
    lines = [f"{len(seen.nodes)} node{'s' * (len(seen.nodes) != 1)}, {seen.seconds:.0f} s"]
    for loop in seen.loops:
        stage = f", {loop.stage} {loop.stalls[loop.stage]:.0%}" if loop.wait_share >= 0.005 else ""
        lines.append(
            f"  {loop.name}: {loop.samples_per_second:,.0f} samples/s, waits {loop.wait_share:.0%}{stage}"
        )
    for number, change in enumerate(chosen, 1):
        gained = (
            f"{change.gain:.2f}×, {change.rate:,.0f} → {change.forecast:,.0f} samples/s"
            if change.rate
            else "safer, not faster"
        )
        live = "; can be applied live" if change.live else ""
        lines += [
            f"{number}. {change.kind} ({change.target}): {gained}{live}",
            f"   {change.why}",
            f"   {change.command}",
        ]
    if not chosen:
        lines.append("nothing to change")
    return "\n".join([*lines, *(f"note: {note}" for note in advice.notes)])


def _record(seen: Observation, advice: Advice, chosen: Sequence[Change]) -> dict[str, Any]:
    return {
        "seconds": round(seen.seconds, 3),
        "nodes": sorted(seen.nodes),
        "decoded_hits": seen.decoded_hits,
        "loops": [
            {
                "name": loop.name,
                "samples_per_second": round(loop.samples_per_second, 2),
                "wait_share": round(loop.wait_share, 4),
                "stalls": {stage: round(share, 4) for stage, share in loop.stalls.items()},
            }
            for loop in seen.loops
        ],
        "changes": [change.to_dict() for change in chosen],
        "notes": list(advice.notes),
    }


def _outcome_text(found: Outcome) -> str:
    change = found.change
    if not change.rate:
        return f"{change.kind} of {change.target}: changed; back: {change.undo}"
    rates = " → ".join(f"{rate.mean:,.0f} ± {rate.error:,.0f}" for rate in (found.before, found.after))
    text = f"{change.kind} of {change.target}: {rates} samples/s, {found.gain:.2f} ± {found.noise:.2f}×"
    text += f"; predicted {change.gain:.2f}×"
    if not found.certain:
        text += "; this is within the noise, a longer --window tells more"
    elif found.gain < 1:
        text += f"; slower: take it back with {change.undo}"
    return text if found.settled else f"{text}; measured before the loops were an epoch further"


def _outcome_record(found: Outcome) -> dict[str, Any]:
    return {
        "applied": found.change.kind,
        "target": found.change.target,
        "before": round(found.before.mean, 2),
        "before_error": round(found.before.error, 2),
        "after": round(found.after.mean, 2),
        "after_error": round(found.after.error, 2),
        "gain": round(found.gain, 4),
        "noise": round(found.noise, 4),
        "predicted": round(found.change.gain, 4),
        "certain": found.certain,
        "settled": found.settled,
        "undo": found.change.undo,
    }

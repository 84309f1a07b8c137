"""`mesh bad ls` and `mesh replay`: samples a plan could not prepare, and one position prepared again.

Law: read-only; a replay requests the frame of that single row, so it is the row the job received.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshsdk.cli.command_base import EXIT_FAILED, shared_options
from meshsdk.cli.documents import whole_hash
from meshsdk.client.native_api import bad_samples
from meshsdk.client.request import Request
from meshsdk.errors import ConfigurationError, InvalidPlanError
from meshsdk.loader.epoch_iterator import FrameAddress
from meshwire.frame import tensor_frame
from meshwire.frame.sample_frames import SampleFrame

if TYPE_CHECKING:
    from meshsdk.cli.command_base import Session
    from meshsdk.client.native_api import BadSample
    from meshsdk.client.s3_client import Client


@click.group("bad")
def bad() -> None:
    """Show the ledger of bad samples, one per plan, shared by its jobs."""


@bad.command("ls")
@click.argument("plan")
@shared_options
def list_bad(session: Session, plan: str) -> None:
    """List the bad samples of PLAN (`loader.plan.hash`).

    The first digits of the hash suffice; `mesh plans ls` prints them.

    \b
    mesh bad ls 4f1c09e2
    mesh bad ls 4f1c09e2 --json | jq -r .key
    """
    with session.make_client() as client:
        listed = bad_samples(client.transport, whole_hash(client, "plans", plan))
    if not listed:
        session.tell("no bad samples: every requested sample of this plan could be prepared")
    for entry in listed:
        session.show(
            f"{entry.key}  {entry.op}: {entry.error}  (epoch {entry.epoch}, position {entry.position}, "
            f"{entry.times}×)",
            key=entry.key,
            op=entry.op,
            error=entry.error,
            epoch=entry.epoch,
            position=entry.position,
            times=entry.times,
        )


@click.command()
@click.argument("plan")
@click.argument("position", type=click.IntRange(0))
@click.option("--epoch", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--save", type=click.Path(file_okay=False, path_type=Path), help="Folder for the sample's source bytes."
)
@shared_options
def replay(session: Session, plan: str, position: int, epoch: int, save: Path | None) -> int:
    """Prepare one POSITION of an epoch of PLAN again and report the result; exit code 1 if it is bad.

    \b
    mesh replay 4f1c09e2 1093 --epoch 2
    mesh replay 4f1c09e2 1093 --epoch 2 --save ./sample     # also save its stored files
    """
    with session.make_client() as client:
        address = FrameAddress(whole_hash(client, "plans", plan), epoch, 0, 0, 1, 1, origin=position)
        try:
            if save is not None:
                _save(session, client, address, save)
            arrays = tensor_frame.tensor_views(client.transport.text(address.request()))
            status = [tensor_frame.Status(value).name.lower() for value in arrays["__status"].tolist()]
        except InvalidPlanError as error:
            if (told := _past_end(error, position)) is None:
                raise
            raise told from error
        except (tensor_frame.FrameError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"the response is not a frame ({error}); check that the endpoint is a meshd"
            ) from error
        outcome = status[0] if status else "dropped"
        found = {
            name: f"{values.dtype} {list(values.shape[1:])}"
            for name, values in arrays.items()
            if not name.startswith("__")
        }
        reason = None if outcome == "ok" else _reason(client, address)
    text = f"position {position} of epoch {epoch}: {outcome}"
    if reason is not None:
        text += f"; {reason.key} failed in {reason.op}: {reason.error}"
    else:
        text += "".join(f"\n  {name}  {kind}" for name, kind in found.items())
    record: dict[str, Any] = {"position": position, "epoch": epoch, "status": outcome, "fields": found}
    if reason is not None:
        record |= {"key": reason.key, "op": reason.op, "error": reason.error}
    session.show(text, **record)
    return 0 if outcome == "ok" else EXIT_FAILED


def _past_end(error: InvalidPlanError, position: int) -> ConfigurationError | None:
    """Return the error for a position that the epoch does not have; None if that is not the reason."""
    positions = error.detail.get("positions")
    if not isinstance(positions, int) or position < positions:
        return None
    return ConfigurationError(
        f"position {position} is past the end: an epoch of this plan has {positions} positions, "
        f"0 to {positions - 1}"
    )


def _reason(client: Client, address: FrameAddress) -> BadSample | None:
    """Return the ledger's entry for the position, which was just written when the row was prepared."""
    entries = bad_samples(client.transport, address.plan)
    here = [entry for entry in entries if (entry.epoch, entry.position) == (address.epoch, address.origin)]
    return here[-1] if here else None


def _save(session: Session, client: Client, address: FrameAddress, folder: Path) -> None:
    query = f"batch=1&format=samples&origin={address.origin}"
    request = Request("GET", f"/-/plans/{address.plan}/{address.epoch}/0", query)
    frame = SampleFrame(client.transport.text(request))
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(frame):
        target = folder / file_name(frame.name(number), number)
        target.write_bytes(data)
        session.show(f"saved {target} ({len(data)} bytes)", saved=str(target), bytes=len(data))


def file_name(name: str | None, number: int) -> str:
    """Return a safe file name within one folder, whatever the key is."""
    last = (name or "").replace("\0", "").rpartition("/")[2]
    return f"{number}-{last[-200:]}" if last else str(number)

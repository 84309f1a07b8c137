"""What `mesh relayout` found and did, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshsdk.byte_sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshsdk.admin.jobs import JobInfo


def relayout_lines(found: JobInfo) -> Sequence[str]:
    """Return what a relayout costs and gains, or has done."""
    report, measured = found.report, bool(found.spec.get("dry_run"))
    lines = [f"  {node}: {why}" for node, why in sorted(report["refused"].items())]
    left = sorted(report["left_out"].items(), key=lambda item: (-item[1], item[0]))
    lines += [f"  {count:,} left where they are: {why}" for why, count in left]
    if not report["objects"]:
        return ["nothing to put in order", *lines]
    where = ", ".join(report["nodes"])
    lines.insert(0, f"{report['objects']:,} objects, {format_size(report['bytes'])}, on the disks of {where}")
    lines.append(f"  an epoch in order of key costs   {_cost(report['before'])}")
    if not report["to_move"]:
        return [*lines, "  they lie in order"]
    lines.append(f"  in order it would cost           {_cost(report['expected'])}")
    if report["after"] is not None:
        lines.append(f"  measured after it, it costs      {_cost(report['after'])}")
    size, count = format_size(report["to_move_bytes"]), report["to_move"]
    if measured:
        copies = report["objects"] / max(1, report["before"].get("objects", 0))
        each = sum(report[name].get("disk_seconds", 0.0) for name in ("before", "expected"))
        seconds = 2 * each * copies
        lines.append(
            f"  to move: {count:,} objects, {size}, which take {seconds:,.0f} s or more, at half of the "
            "disks' time, and that much free space for some minutes"
        )
    else:
        moved = format_size(report["moved_bytes"])
        lines.append(f"  moved: {report['moved']:,} of {count:,} objects, {moved} of {size}")
    return lines


def _cost(cost: Mapping[str, float]) -> str:
    seeks, seconds, media = (cost.get(name, 0.0) for name in ("seeks", "disk_seconds", "media_seconds"))
    share = seeks / max(1, cost.get("objects", 0))
    return f"{seeks:,.0f} seeks ({share:.2g} an object), {seconds:.1f} s of disk for {media:.1f} s of bytes"

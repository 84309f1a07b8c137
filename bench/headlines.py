"""The few ratios that the project's README shows, out of the figures that are kept.

Law: as in the report, nothing is typed in by hand; what was not measured has no line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench import checkpoints, rotational_report, rotational_row, shared_jobs, windows
from bench.gather_timing import BOTO_SIXTEEN, GATHER
from bench.loader_report import OURS, best_peer
from bench.rows import FULL, store_rows
from bench.store_report import metric_of
from bench.tables import number, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bench.results import RowResult

BEGIN: Final = "<!-- ratios: `python -m bench --report` writes them -->"
END: Final = "<!-- end -->"
_STORE: Final = ("get-10k", "get-1m", "put-10k", "put-64m", "list")


def headlines(rows: Mapping[str, RowResult]) -> str:
    """A table: what was done, how many times the peer's rate, the peer."""
    lines = [line for line in (*_loading(rows), *_stored(rows)) if line[1] is not None]
    return table(("", "times", "of"), [(what, _times(ratio), peer) for what, ratio, peer in lines])


def _times(ratio: float | None) -> str:
    """As exact as the report has it: 1.99 is not 2.0."""
    return number(ratio, 1 if ratio is not None and ratio >= 10 else 2, "×")


_Line = tuple[str, float | None, str]


def _loading(rows: Mapping[str, RowResult]) -> Iterator[_Line]:
    if disk := rows.get(rotational_row.NAME):
        best = rotational_report.ratio_to_best_peer(disk)
        what = f"First epoch over {disk.setup['rotational']:,} photographs on a rotational disk"
        yield what, best[1] if best else None, _short(best[0]) if best else ""
    if loaders := rows.get("loaders"):
        photographs = f"{loaders.setup['photographs']:,} photographs"
        yield _beside_best(f"First epoch over {photographs}, decoded and cropped", loaders, "first_rate")
        best, mine = best_peer(loaders, "second_rate"), loaders.value(OURS, "again_rate")
        if best and mine:
            yield "An epoch that some job has had before", mine / best[1], f"{_short(best[0])}'s next epoch"
    if shared := rows.get(shared_jobs.NAME):
        yield _beside_best("Four jobs of a sweep, sharing one pass", shared, "rate")
    if series := rows.get(windows.NAME):
        ratio = series.ratio(windows.OURS, windows.NAIVE, "rate")
        yield "Windows of a Zarr series", ratio, "zarr-python in a `DataLoader`"
    if saved := rows.get(checkpoints.NAME):
        ratio = saved.ratio(checkpoints.OURS, checkpoints.CONNECTOR, "load")
        yield "A checkpoint loaded", ratio, checkpoints.CONNECTOR


def _stored(rows: Mapping[str, RowResult]) -> Iterator[_Line]:
    for row in store_rows(FULL):
        if row.name in _STORE and row.name in rows:
            yield row.title, rows[row.name].ratio("meshd", "seaweedfs", metric_of(row)[0]), "SeaweedFS"
    if gathered := rows.get("gather-10k"):
        ratio = gathered.ratio(GATHER, BOTO_SIXTEEN, "rate")
        yield f"{gathered.title} objects in one request", ratio, "boto3, sixteen threads"


def _beside_best(what: str, result: RowResult, metric: str) -> _Line:
    best, mine = best_peer(result, metric), result.value(OURS, metric)
    return (what, mine / best[1], _short(best[0])) if best and mine else (what, None, "")


def _short(contender: str) -> str:
    return contender.partition(" from ")[0]


def placed(page: str, rows: Mapping[str, RowResult]) -> str:
    """The page with the table between its marks. Raises ValueError where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for ratios: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{headlines(rows)}\n{END}{after}"

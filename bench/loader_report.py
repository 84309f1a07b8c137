"""The loaders' part of docs/benchmarks.md.

Law: nothing is typed in by hand; every number is a median of the rows given. The best peer of a row is the
one that its bars are held against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench import accelerators, loader_cpu_cost, loader_timing, shared_jobs
from bench.tables import BARS_HEAD, number, percent, table, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.results import RowResult

LOADER_TEXT = """{photographs:,} photographs of about 500×375 (70 KB on average), in uint8 batches of
{batch} at 224×224 with a random crop and a flip. The peers use two worker processes, and the server runs on
the same two cores. The peers crop with Pillow as torchvision does on PIL images (`Image.resize(box=…)`
replaces crop and resize, which saves them a copy), because there is no build of torchvision for the
CPU-only torch used here. CPU is the client process with its workers. The next epoch has new crops for every
sample. *Same plan again* is a second job that requests the first epoch again: an unchanged plan, as in a
sweep or a restart. The loader is on the node's host and takes batches over as shared memory; *over TCP* it
receives them, as it does on any other host, and as all peers do. Grain reads single objects with boto3,
because it has no S3 client of its own. Every contender runs once uncounted before the rounds. The clock
starts in a script that has imported torch, after a garbage collection in Python (as before each later
epoch), when the script imports its loader's packages; the table below also gives the first epochs without
that import. `decode` is our latest version, which does not decode rows of a JPEG below the crop; the rows
it keeps are those of the whole image. Ours keep nothing decoded (`cache="off"`), except in *decoded once*:
there, the node could keep images in an epoch before (`cache="auto"`), and the epoch has new crops."""
SHARING_TEXT = """Four processes of one loader run at the same time; the rate is for all of them together,
until the last batch of the last process. Ours set `share=`, so each photograph is decoded once; the batches
are one piece of memory for all four, or come over TCP to each. The peers' copies have one worker process
each."""
DELIVERY_TEXT = """The loader's process alone: CPU seconds by getrusage, from the first import of our
packages to the last batch. Then passes over frames that are ready on the node, by turns with a bare
`recv_into` of as many bytes into slots of an arena of the same size, over as many loopback connections,
from a process that only calls sendfile. All of it runs over TCP (`MESH_LOCAL=off`). The loader also
verifies each tensor's crc32c."""
AU_TEXT = """Threads take a batch and then sleep for as long as an A100 would compute; the loader, its
workers and the server share two cores. Records, batches and steps are those of MLPerf Storage's ResNet-50,
U-Net3D and CosmoFlow (`configs/dlio/workload/*_a100.yaml` of github.com/mlcommons/storage); there is no
GPU. The figure is the number of such accelerators that are busy for at least 90, 90 and 70 % of the time
(AU). ResNet-50: {resnet}-byte records of tar shards, 400 per batch, 435 ms. U-Net3D: 146.6 MB arrays, read
whole, of which the model gets 2 MiB, 7 per batch, 636 ms. CosmoFlow: 2.8 MB objects, one per batch, 5.5 ms.
There are no hints: no cache node, and nothing is prefetched into the node; batches are taken over as shared
memory. Epochs repeat the few stored records, so that no epoch ends during a trial. Peers read from
SeaweedFS, with one worker process each."""
LOADER_HEAD = (
    "",
    "first epoch, samples/s",
    "next epoch",
    "decoded once",
    "same plan again",
    "client CPU s a 1,000",
    "next epoch",
    "first batch, s",
    "import, s",
)
SPEEDUP_BAR, CPU_BAR, AGAIN_BAR, LATER_BAR = 2.0, 0.1, 5.0, 8.0
KEPT_BAR, KEPT_OWN_BAR = 4.0, 2.5
OURS, OURS_TCP = "meshsdk from meshd", f"{loader_timing.TCP} from meshd"


def best_peer(result: RowResult, metric: str, *, least: bool = False) -> tuple[str, float] | None:
    """The peer with the best median, from whichever server it did best."""
    names = [name for name in result.contenders() if not name.startswith("meshsdk")]
    known = [(name, value) for name in names if (value := result.value(name, metric)) is not None]
    return (min if least else max)(known, key=lambda pair: pair[1]) if known else None


def loader_line(result: RowResult, name: str) -> list[str]:
    """One row of the loader table."""
    if problem := result.problem(name):
        return [name, f"failed: {problem}".replace("|", "/"), *([""] * (len(LOADER_HEAD) - 2))]
    rates = [number(result.value(name, f"{one}_rate"), 0) for one in ("first", "second", "kept", "again")]
    cpus = [number(result.value(name, f"{one}_cpu"), 3) for one in ("first", "second")]
    waits = [number(result.value(name, each), 2) for each in ("first_wait", "import_s")]
    return [name, *rates, *cpus, *waits]


def loader_repeats(result: RowResult) -> list[str]:
    """Who had to be run again."""
    counts = {
        name: sum(int(each.metrics.get("repeats", 0)) for each in result.figures if each.contender == name)
        for name in result.contenders()
    }
    said = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return [f"Runs that ended with an error and were repeated: {said}."] if said else []


def loader_bars(result: RowResult) -> list[list[str]]:
    """What the project asks of itself, and whether it holds."""
    rate, cpu = best_peer(result, "first_rate"), best_peer(result, "first_cpu", least=True)
    later = best_peer(result, "second_rate")
    mine, mine_cpu = result.value(OURS, "first_rate"), result.value(OURS, "first_cpu")
    repeated, again = result.value(OURS, "again_rate"), result.ratio_of(OURS, "again_rate", "first_rate")
    lines = []
    if rate and mine:
        ratio = mine / rate[1]
        bar = verdict(ratio, SPEEDUP_BAR)
        lines.append([f"first epoch ÷ best peer ({rate[0]})", number(ratio, 2, "×"), bar])
    if rate and (plain := result.value(OURS_TCP, "first_rate")):
        ratio = plain / rate[1]
        lines.append(["the same over TCP", number(ratio, 2, "×"), verdict(ratio, SPEEDUP_BAR)])
    loaded, mine_loaded = best_peer(result, "imported_rate"), result.value(OURS, "imported_rate")
    if loaded and mine_loaded:
        ratio = mine_loaded / loaded[1]
        text = f"without imports, best peer {loaded[0]}"
        lines.append([text, number(ratio, 2, "×"), ""])
    if later and repeated:
        ratio = repeated / later[1]
        bar = verdict(ratio, LATER_BAR)
        lines.append(
            [f"the same plan again ÷ best peer's next epoch ({later[0]})", number(ratio, 1, "×"), bar]
        )
    if cpu and mine_cpu is not None:
        share = mine_cpu / cpu[1]
        bar = verdict(share, CPU_BAR, at_most=True)
        lines.append([f"client CPU ÷ least of the peers ({cpu[0]})", number(share, 3, "×"), bar])
    kept = result.value(OURS, "kept_rate")
    if later and kept:
        ratio = kept / later[1]
        text = f"next epoch, decoded once ÷ best peer's next epoch ({later[0]})"
        lines.append([text, number(ratio, 2, "×"), verdict(ratio, KEPT_BAR)])
    if mine and kept:
        ratio = kept / mine
        lines.append(
            ["next epoch, decoded once ÷ the first", number(ratio, 2, "×"), verdict(ratio, KEPT_OWN_BAR)]
        )
    lines.append(["the same plan again ÷ its first pass", number(again, 1, "×"), verdict(again, AGAIN_BAR)])
    return lines


def loader_section(rows: Mapping[str, RowResult]) -> list[str]:
    """The loaders."""
    found = [rows[name] for name in loader_timing.ROWS if name in rows]
    if not found:
        return []
    lines = ["## Loaders, over the same photographs", LOADER_TEXT.format(**found[0].setup)]
    for result in found:
        lines.append(f"### {result.title}")
        lines.append(table(LOADER_HEAD, [loader_line(result, name) for name in result.contenders()]))
        lines += loader_repeats(result)
        lines.append(table(BARS_HEAD, loader_bars(result)))
    limits = rows.get("limits")
    if limits and found[0].comparable(limits) and (bound := limits.value("transform", "rate")):
        share = percent(found[0].value(OURS, "first_rate"), bound)
        alone = f"the same ops on both cores, without a server, reach {bound:,.0f} samples/s"
        lines.append(f"**The limit.** Reading and {alone}; the first epoch is {share} of it.")
    return [*lines, *sharing_lines(rows)]


def sharing_lines(rows: Mapping[str, RowResult]) -> list[str]:
    """Four jobs together."""
    result = rows.get(shared_jobs.NAME)
    if result is None:
        return []
    lines = [[name, number(result.value(name, "rate"), 0)] for name in result.contenders()]
    best, mine = best_peer(result, "rate"), result.value(OURS, "rate")
    ratio = mine / best[1] if best and mine else None
    title = f"four sharing jobs ÷ four copies of the best peer ({best[0] if best else 'none'})"
    bars = [[title, number(ratio, 1, "×"), verdict(ratio, shared_jobs.LEAST)]]
    if best and (plain := result.value(OURS_TCP, "rate")):
        ratio = plain / best[1]
        bars.append(["the same over TCP", number(ratio, 1, "×"), verdict(ratio, shared_jobs.LEAST)])
    head = ["", "samples/s, all together"]
    return [f"### {result.title}", SHARING_TEXT, table(head, lines), table(BARS_HEAD, bars)]


def delivery_section(rows: Mapping[str, RowResult]) -> list[str]:
    """What delivering costs."""
    result = rows.get(loader_cpu_cost.NAME)
    if result is None:
        return []
    lines = [
        [
            name,
            *(
                number(result.value(name, each), places)
                for each, places in (("rate", 0), ("gigabytes", 2), ("cpu", 3))
            ),
        ]
        for name in result.contenders()
    ]
    cpus = [(name, result.value(name, "cpu")) for name in (loader_cpu_cost.COLD, loader_cpu_cost.WARM)]
    ratio = result.ratio(loader_cpu_cost.WARM, loader_cpu_cost.BARE, "gigabytes")
    bars = [
        [
            f"{name}: client CPU s a 1,000",
            number(cpu, 3),
            verdict(cpu, loader_cpu_cost.CPU_MOST, at_most=True),
        ]
        for name, cpu in cpus
    ]
    bars.append(["warm ÷ bare recv_into", number(ratio, 2, "×"), verdict(ratio, loader_cpu_cost.RATIO_LEAST)])
    head = ["", "samples/s", "GB/s", "client CPU s a 1,000"]
    return [f"## {result.title}", DELIVERY_TEXT, table(head, lines), table(BARS_HEAD, bars)]


def accelerator_section(rows: Mapping[str, RowResult]) -> list[str]:
    """Emulated accelerators."""
    found = [rows[name] for name in accelerators.NAMES if name in rows]
    if not found:
        return []
    lines = [
        [
            result.title,
            name,
            number(result.value(name, "accelerators"), 0),
            number(result.value(name, "au_of_one"), 0),
        ]
        for result in found
        for name in result.contenders()
    ]
    problems = [
        f"- {result.title}, {name}: {result.problem(name)}"
        for result in found
        for name in result.contenders()
        if result.problem(name)
    ]
    text = AU_TEXT.format(resnet=f"{accelerators.WORKLOADS[0].record:,}")
    body = table(["", "", "accelerators busy", "AU of one, %"], lines)
    return ["## Emulated accelerators", text, body, *(["\n".join(problems)] if problems else [])]

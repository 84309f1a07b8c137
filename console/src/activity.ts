// The counters of the nodes (`/-/activity`) as rates over time.

import { useEffect, useRef, useState } from "preact/hooks";
import { json } from "./api";
import type { Point } from "./parts";
import type { Activity, NodeActivity } from "./schema";

export const HOUR = 3_600_000;
const STEP = 10_000;
const MOST = HOUR / STEP + 2;

/** Series by the name of a counter: its rate per second, summed over the nodes. */
export type Rates = Record<string, Point[]>;

const NAMES = ["requests", "bytes_in", "bytes_out", "rows", "frames_hit", "frames_joined", "frames_miss"];

/** Returns the rates of one node's history. A counter that decreased belongs to a restarted process and counts as 0. */
function ratesOf(history: Record<string, number[]>): Rates {
  const times = history.time ?? [];
  const rates: Rates = {};
  for (const name of NAMES) {
    const values = history[name] ?? [];
    rates[name] = times.slice(1).map((time, index) => ({
      time,
      value: Math.max(0, (values[index + 1]! - values[index]!) / ((time - times[index]!) / 1000)),
    }));
  }
  return rates;
}

/** Sums series whose points are at about the same times. */
function sum(series: Point[][]): Point[] {
  const found = new Map<number, number>();
  for (const points of series) {
    for (const { time, value } of points) {
      const slot = Math.round(time / STEP) * STEP;
      found.set(slot, (found.get(slot) ?? 0) + value);
    }
  }
  return [...found].map(([time, value]) => ({ time, value })).sort((left, right) => left.time - right.time);
}

/** Rates per second of the last seconds, by node and counter. */
export type NodeRates = Record<string, Record<string, number>>;

/** Returns the rates of the last hour, extended as documents arrive, and the present rates of each node. */
export function useRates(activity: Activity | undefined): { rates: Rates; now: NodeRates } {
  const [rates, setRates] = useState<Rates>({});
  const [now, setNow] = useState<NodeRates>({});
  const last = useRef<{ time: number; nodes: Record<string, NodeActivity> } | null>(null);
  useEffect(() => {
    const abort = new AbortController();
    json<Activity>("/-/activity?history=1", { signal: abort.signal }).then(
      ({ nodes }) => {
        const all = Object.values(nodes).map((node) => ratesOf(node.history ?? {}));
        setRates(Object.fromEntries(NAMES.map((name) => [name, sum(all.map((each) => each[name] ?? []))])));
      },
      () => {},
    );
    return () => abort.abort();
  }, []);
  useEffect(() => {
    if (!activity) return;
    const time = Math.max(...Object.values(activity.nodes).map((node) => node.time));
    const before = last.current;
    if (before && time - before.time < STEP) return;
    last.current = { time, nodes: activity.nodes };
    if (!before) return;
    // For each node: the total of a node that comes back must not count as traffic of this interval.
    const found: NodeRates = {};
    for (const [id, node] of Object.entries(activity.nodes)) {
      const earlier = before.nodes[id]?.totals;
      if (!earlier) continue;
      const rate = (name: string): number => Math.max(0, (node.totals[name] ?? 0) - (earlier[name] ?? 0)) / ((time - before.time) / 1000);
      found[id] = Object.fromEntries(NAMES.map((name) => [name, rate(name)]));
    }
    setNow(found);
    setRates((known) =>
      Object.fromEntries(
        NAMES.map((name) => {
          const value = Object.values(found).reduce((sum, node) => sum + node[name]!, 0);
          const points = [...(known[name] ?? []), { time, value }];
          return [name, points.slice(-MOST)]; // limits the memory of a page that stays open
        }),
      ),
    );
  }, [activity]);
  return { rates, now };
}

/** Returns the share of frames that were cached, or already being built, when they were requested. */
export function hitRatio(rates: Rates): Point[] {
  const hits = rates.frames_hit ?? [];
  return hits.flatMap((hit, index) => {
    const ready = hit.value + (rates.frames_joined?.[index]?.value ?? 0);
    const all = ready + (rates.frames_miss?.[index]?.value ?? 0);
    return all > 0 ? [{ time: hit.time, value: ready / all }] : [];
  });
}

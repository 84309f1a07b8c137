// Jobs: the training loops with their waiting times by cause, and the bulk jobs of the nodes.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { request } from "../api";
import { findPlan } from "../documents";
import { ago, bytes, count, counted, duration, percent, shownName } from "../format";
import { useLive } from "../live";
import { Empty, Heading, Loading, Meter, Problem, Table, useLoaded } from "../parts";
import type { Activity, Job, Jobs, LoaderActivity, PlanActivity } from "../schema";

const WATCHED = ["/-/activity", "/-/jobs"];
const WINDOW = 30_000;

export function JobsPage(): JSX.Element {
  const { documents, trouble } = useLive(WATCHED);
  const activity = documents["/-/activity"] as Activity | undefined;
  const jobs = (documents["/-/jobs"] as Partial<Jobs> | undefined)?.jobs;
  const loops = useLoops(activity);
  return (
    <>
      <Heading title="Jobs" />
      {trouble && (
        <p class="problem" role="alert">
          {trouble}
        </p>
      )}
      <section aria-label="Training">
        <h2>Training loops</h2>
        {!activity && <Loading />}
        {activity && loops.length === 0 && (
          <Empty>
            No training loop has reported yet. Give a loader a name to see it here: mesh.Loader(ds, …, report="resnet"), or
            set MESH_REPORT=resnet.
          </Empty>
        )}
        <div class="cards">
          {loops.map((loop) => (
            <LoopCard key={loop.name} loop={loop} />
          ))}
        </div>
      </section>
      <section aria-label="Bulk jobs">
        <h2>Bulk jobs</h2>
        {jobs?.length === 0 && <Empty>No bulk jobs. mesh shard, mesh extract and stored views run as jobs.</Empty>}
        {jobs && jobs.length > 0 && <JobTable jobs={jobs} />}
      </section>
    </>
  );
}

interface Loop {
  name: string;
  total: LoaderActivity;
  /** The change over the last half minute; null before the second document. */
  recent: LoaderActivity | null;
  /** The seconds over which `recent` was measured. */
  elapsed: number;
  nodes: string[];
  /** The positions of the loop and of the requests of its loader, in epochs. */
  epochs: number;
  requested: number;
  /** The first digits of its plan, and the user whose key it uses; empty if unknown. */
  plan: string;
  user: string;
  /** The cost of its plan to the nodes, over the same time as `recent` or since the nodes started. */
  cost: PlanActivity | null;
  /** Other loops that read the same plan. */
  others: string[];
}

type CostByPlan = Record<string, PlanActivity>;

/** Returns the loops, with their changes over the last half minute. */
function useLoops(activity: Activity | undefined): Loop[] {
  const kept = useRef<{ time: number; loops: Record<string, LoaderActivity>; parts: Parts; costs: CostByPlan }[]>([]);
  const [found, setFound] = useState<Loop[]>([]);
  useEffect(() => {
    if (!activity) return;
    const loops: Record<string, LoaderActivity> = {};
    const parts: Parts = {};
    const costs: CostByPlan = {};
    for (const [id, node] of Object.entries(activity.nodes)) {
      for (const [name, loader] of Object.entries(node.loaders ?? {})) {
        loops[name] = add(loops[name], loader, 1);
        (parts[name] ??= {})[id] = loader;
      }
      for (const [plan, cost] of Object.entries(node.plans ?? {})) costs[plan] = spent(costs[plan], cost, 1);
    }
    const now = Date.now();
    kept.current = [...kept.current.filter(({ time }) => time > now - WINDOW), { time: now, loops, parts, costs }];
    const { loops: before, parts: earlier, costs: spentBefore } = kept.current[0]!;
    const places = Object.fromEntries(Object.entries(parts).map(([name, each]) => [name, reached(each, earlier[name] ?? {})]));
    setFound(
      Object.entries(loops).map(([name, total]) => ({
        name,
        total,
        recent: before[name] && kept.current.length > 1 ? add(total, before[name], -1) : null,
        plan: places[name]!.plan,
        user: places[name]!.user,
        cost: costOf(costs, spentBefore, places[name]!.plan),
        others: Object.keys(loops).filter((each) => each !== name && places[each]!.plan && places[each]!.plan === places[name]!.plan),
        elapsed: (now - kept.current[0]!.time) / 1000,
        nodes: Object.keys(parts[name]!),
        epochs: places[name]!.epochs,
        requested: places[name]!.requested,
      })),
    );
  }, [activity]);
  return found;
}

type Parts = Record<string, Record<string, LoaderActivity>>;

/** Returns the position of a loop. Nodes without a recent report have an old position, perhaps that of an earlier run. */
function reached(
  now: Record<string, LoaderActivity>,
  before: Record<string, LoaderActivity>,
): { epochs: number; requested: number; plan: string; user: string } {
  const lately = Object.entries(now).filter(([id, loader]) => loader.seconds !== before[id]?.seconds);
  const told = lately.length ? lately.map(([, loader]) => loader) : Object.values(now);
  const epochs = Math.max(...told.map((loader) => loader.epochs));
  const requested = Math.max(epochs, ...told.map((loader) => loader.epochs_requested ?? 0));
  const named = told.find((loader) => loader.plan);
  return { epochs, requested, plan: named?.plan ?? "", user: named?.user ?? "" };
}

function spent(left: PlanActivity | undefined, right: PlanActivity, sign: 1 | -1): PlanActivity {
  const names = Object.keys(right) as (keyof PlanActivity)[];
  return Object.fromEntries(names.map((name) => [name, (left?.[name] ?? 0) + sign * right[name]])) as unknown as PlanActivity;
}

/** Returns the recent cost of a plan; if no row was built recently, its cost since the nodes started. */
function costOf(now: CostByPlan, before: CostByPlan, plan: string): PlanActivity | null {
  const whole = now[plan];
  if (!whole) return null;
  const lately = before[plan] ? spent(whole, before[plan], -1) : whole;
  return lately.rows > 0 ? lately : whole;
}

function add(left: LoaderActivity | undefined, right: LoaderActivity, sign: 1 | -1): LoaderActivity {
  const stalls = { ...left?.stalls };
  for (const [stage, seconds] of Object.entries(right.stalls ?? {})) stalls[stage] = (stalls[stage] ?? 0) + sign * seconds;
  return {
    samples: (left?.samples ?? 0) + sign * right.samples,
    seconds: (left?.seconds ?? 0) + sign * right.seconds,
    waited: (left?.waited ?? 0) + sign * right.waited,
    epochs: 0,
    epochs_requested: 0,
    plan: "",
    user: "",
    epoch_samples: Math.max(left?.epoch_samples ?? 0, right.epoch_samples),
    stalls,
  };
}

const STAGES: Record<string, string> = {
  network: "the network",
  preprocessing: "preprocessing on nodes",
  fetch: "reads on nodes",
};

function LoopCard({ loop }: { loop: Loop }): JSX.Element {
  const active = loop.recent !== null && loop.recent.seconds > 0;
  const shown = active ? loop.recent! : loop.total;
  const share = (seconds: number): number => (shown.seconds > 0 ? Math.min(1, Math.max(0, seconds) / shown.seconds) : 0);
  const stages = Object.entries(shown.stalls)
    .filter(([, seconds]) => seconds > 0)
    .sort((left, right) => right[1] - left[1]);
  const waiting = share(shown.waited);
  return (
    <article class="card" aria-label={`Loop ${loop.name}`}>
      <h3>
        <span class={`dot ${active ? "good" : ""}`} aria-hidden="true" />
        {loop.name}
        <span class={`tag ${active ? "good" : ""}`}>{active ? "running" : "no recent report"}</span>
      </h3>
      {loop.user && <p class="quiet">User: {loop.user}</p>}
      {loop.plan && <Subject plan={loop.plan} />}
      <p class="big">
        {shown.seconds > 0 ? count(shown.samples / shown.seconds) : "–"} <span class="quiet">samples/s</span>
      </p>
      <div
        class="bar split"
        role="img"
        aria-label={`Waiting ${percent(waiting)} of the time: ${stages.map(([stage, seconds]) => `${STAGES[stage] ?? stage} ${percent(share(seconds))}`).join(", ") || "for nothing"}`}
      >
        {stages.map(([stage, seconds]) => (
          <div key={stage} class={`fill stage-${stage}`} style={{ width: `${100 * share(seconds)}%` }} />
        ))}
      </div>
      {loop.total.epoch_samples > 0 && <Epoch loop={loop} active={active} />}
      <ul class="legend">
        <li>
          <span class="key training" aria-hidden="true" /> Training {percent(1 - waiting)}
        </li>
        {stages.map(([stage, seconds]) => (
          <li key={stage}>
            <span class={`key stage-${stage}`} aria-hidden="true" /> Waiting for {STAGES[stage] ?? stage}{" "}
            {percent(share(seconds))}
          </li>
        ))}
      </ul>
      {loop.cost && <Costs cost={loop.cost} others={loop.others} />}
      <p class="quiet">
        {active ? "Rates: last 30 seconds. " : "Rates: since the nodes started. "}
        {counted(loop.total.samples, "sample")} in total, from {loop.nodes.join(", ")}.
      </p>
    </article>
  );
}

/** The dataset and ops of a loop; nothing if the key may not read the plan. */
function Subject({ plan }: { plan: string }): JSX.Element | null {
  const { value } = useLoaded(() => findPlan(plan), [plan]);
  if (!value) return null;
  return (
    <p class="quiet">
      Dataset: <a href={`#/datasets/${value.snapshot}`}>{value.buckets.map((bucket) => `s3://${bucket}`).join(", ")}</a>, ops:{" "}
      {value.ops.join(" → ") || "none"}. <a href={`#/batches/${value.hash}`}>Show batches</a>
    </p>
  );
}

/** The cost of the plan of a loop to the nodes. */
function Costs({ cost, others }: { cost: PlanActivity; others: string[] }): JSX.Element {
  const each = (seconds: number): string => (cost.rows > 0 ? `${figure((1000 * seconds) / cost.rows)} ms` : "–");
  const asked = cost.made + cost.shared;
  const facts: [string, string][] = [
    ["CPU per sample", each(cost.cpu)],
    ["Read time per sample", each(cost.reading)],
  ];
  if (cost.read_ahead > 0) facts.push(["Seeks per sample", figure(cost.seeks / cost.read_ahead)]);
  if (asked > 0) facts.push(["Shared batches", percent(cost.shared / asked)]);
  return (
    <>
      <dl class="facts narrow" aria-label="Cost on the nodes">
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {others.length > 0 && <p>Shares the plan and these costs with {others.join(", ")}.</p>}
    </>
  );
}

/** Returns a number with two significant digits. */
function figure(value: number): string {
  return value >= 10 ? count(value) : String(Number(value.toPrecision(2)));
}

function Epoch({ loop, active }: { loop: Loop; active: boolean }): JSX.Element {
  const { epochs, requested } = loop;
  const samples = loop.total.epoch_samples;
  const share = epochs % 1;
  const ahead = Math.min(1, requested - Math.floor(epochs)) - share;
  const rate = active && loop.elapsed > 0 ? loop.recent!.samples / loop.elapsed : 0;
  const left = rate > 0 ? `, ${duration(((1 - share) * samples) / rate)} remaining` : "";
  const prefetched = ahead > 0.005 ? `, ${percent(ahead)} prefetched` : "";
  return (
    <Meter
      goal
      label={`Epoch ${Math.floor(epochs)}`}
      used={share}
      ahead={ahead}
      total={1}
      text={`${percent(share)} of ${counted(samples, "sample")}${prefetched}${left}`}
    />
  );
}

/** The source and the target of a job. */
function workOf({ source, target, plan }: Record<string, unknown>): JSX.Element | null {
  const from = String(source ?? (plan ? `plan ${String(plan).slice(0, 12)}` : ""));
  if (!from) return null;
  return (
    <p class="quiet long">
      {shownName(from)}
      {target ? ` → ${shownName(String(target))}` : ""}
    </p>
  );
}

function JobTable({ jobs }: { jobs: Job[] }): JSX.Element {
  const [error, setError] = useState<unknown>(null);
  const cancel = (job: Job): void => {
    request(`/-/jobs/${job.id}`, { method: "DELETE" }).then(() => setError(null), setError);
  };
  return (
    <>
      <Problem error={error} />
      <Table head={["Job", "State", "Progress", "Owner", "Created", ""]}>
        {jobs.map((job) => (
          <tr key={job.id}>
            <td>
              {job.kind} <span class="hash quiet">{job.id.slice(0, 8)}</span>
              {workOf(job.spec)}
            </td>
            <td>
              <span class={`tag ${job.state === "failed" ? "bad" : job.state === "done" ? "good" : ""}`}>{job.state}</span>
              {(job.error || job.failures[0]) && (
                <details>
                  <summary>{job.failed ? `${counted(job.failed, "source")} failed` : "Details"}</summary>
                  {job.error && <p>{job.error}</p>}
                  <ul>
                    {job.failures.slice(0, 5).map((failure) => (
                      <li key={failure.name}>
                        {failure.name}: {failure.error}
                      </li>
                    ))}
                  </ul>
                </details>
              )}
            </td>
            <td>
              <progress
                max={job.progress.bytes_total || 1}
                value={job.state === "done" ? job.progress.bytes_total || 1 : job.progress.bytes}
                aria-label={`Progress of ${job.kind} ${job.id.slice(0, 8)}`}
              />{" "}
              <span class="quiet">
                {bytes(job.progress.bytes)}
                {job.eta_s !== undefined && job.eta_s !== null && `, ${duration(job.eta_s)} remaining`}
              </span>
            </td>
            <td>{job.owner}</td>
            <td class="quiet">{ago(job.created_ms)}</td>
            <td class="actions">
              {["waiting", "running", "queued"].includes(job.state) && (
                <button type="button" class="plain" onClick={() => cancel(job)} aria-label={`Cancel ${job.kind} ${job.id.slice(0, 8)}`}>
                  Cancel
                </button>
              )}
            </td>
          </tr>
        ))}
      </Table>
    </>
  );
}

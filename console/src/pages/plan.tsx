// The details of a plan: its ops with their arguments, its settings, and its bad samples.

import type { JSX } from "preact";
import { json } from "../api";
import { ago, count, counted } from "../format";
import { Loading, Problem, Table, useLoaded } from "../parts";
import type { BadSample, PlanDescription, StoredPlan } from "../schema";

interface Op {
  op: string;
  field?: string | string[];
  args?: Record<string, unknown>;
}

export function loadBad(plan: string, signal: AbortSignal): Promise<BadSample[]> {
  return json<BadSample[]>(`/-/plans/${plan}/bad`, { signal });
}

async function load(plan: string, signal: AbortSignal): Promise<{ described: PlanDescription; bad: BadSample[] }> {
  const [described, bad] = await Promise.all([
    json<PlanDescription>(`/-/plans/${plan}`, { signal }),
    loadBad(plan, signal),
  ]);
  return { described, bad };
}

export function PlanDetails({ plan }: { plan: string }): JSX.Element {
  const { value, error } = useLoaded((signal) => load(plan, signal), [plan]);
  const bad = value?.bad.length ?? 0;
  return (
    <details class="plan">
      <summary>
        Plan details{bad > 0 && <span class="tag warn">{counted(bad, "bad sample")}</span>}
      </summary>
      <Problem error={error} />
      {!value && !error && <Loading />}
      {value && <Spec described={value.described} />}
      {value && bad > 0 && <BadSamples bad={value.bad} />}
    </details>
  );
}

function Spec({ described }: { described: PlanDescription }): JSX.Element {
  const { ops = [], ...rest } = described.spec as { ops?: Op[] } & Record<string, unknown>;
  return (
    <>
      <ol class="ops">
        {ops.map((each, index) => (
          <li key={index}>
            <strong>{each.op}</strong> <span class="quiet">{[each.field ?? []].flat().join(", ")}</span>{" "}
            <code>{argumentsOf(each.args)}</code>
          </li>
        ))}
      </ol>
      {ops.length === 0 && <p>No ops: the samples are delivered as they are stored.</p>}
      <dl class="facts">
        <div>
          <dt>Snapshot</dt>
          <dd class="hash">
            <a href={`#/datasets/${described.snapshot}`}>{described.snapshot}</a>
          </dd>
        </div>
        {Object.entries(rest).map(([name, setting]) => (
          <div key={name}>
            <dt>{name.replaceAll("_", " ")}</dt>
            <dd>
              <code>{short(setting)}</code>
            </dd>
          </div>
        ))}
      </dl>
    </>
  );
}

function argumentsOf(args: Record<string, unknown> | undefined): string {
  return Object.entries(args ?? {})
    .map(([name, value]) => `${name}=${short(value)}`)
    .join(", ");
}

function short(value: unknown): string {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 200 ? `${text.slice(0, 200)} …` : text;
}

/** Plans with links to their batches. */
export function PlanTable({ plans }: { plans: StoredPlan[] }): JSX.Element {
  return (
    <Table head={["Plan", "Dataset", "#Samples", "Ops", "Last used"]}>
      {plans.map((each) => (
        <tr key={each.hash}>
          <td>
            <a href={`#/batches/${each.hash}`} class="hash">
              {each.hash.slice(0, 12)}
            </a>
          </td>
          <td>
            <a href={`#/datasets/${each.snapshot}`}>{each.buckets.map((bucket) => `s3://${bucket}`).join(", ")}</a>
          </td>
          <td class="number">{count(each.samples)}</td>
          <td>{each.ops.join(" → ") || "as stored"}</td>
          <td class="quiet">{ago(each.used_ms)}</td>
        </tr>
      ))}
    </Table>
  );
}

const SHOWN = 100;

export function BadSamples({ bad }: { bad: BadSample[] }): JSX.Element {
  return (
    <>
      <h2>Bad samples</h2>
      <Table head={["Sample", "Op", "Error", "#Count"]}>
        {bad.slice(0, SHOWN).map((each) => (
          <tr key={`${each.key} ${each.op}`}>
            <td>{each.key}</td>
            <td>{each.op}</td>
            <td>{each.error}</td>
            <td class="number">{count(each.times)}</td>
          </tr>
        ))}
      </Table>
      {bad.length > SHOWN && <p class="quiet">The first {count(SHOWN)} of {count(bad.length)} are shown.</p>}
    </>
  );
}

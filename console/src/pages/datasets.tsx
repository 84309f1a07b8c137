// Datasets: the snapshots, each with its fields, classes, sizes, plans and bad samples.

import type { JSX } from "preact";
import { json } from "../api";
import { listPlans, listSnapshots } from "../documents";
import { ago, bytes, count, counted, percent } from "../format";
import { Empty, Heading, Loading, Problem, Table, useLoaded } from "../parts";
import type { BadSample, FieldStatistics, Statistics, StoredPlan } from "../schema";
import { BadSamples, loadBad, PlanTable } from "./plan";

export function DatasetsPage({ snapshot }: { snapshot: string }): JSX.Element {
  return snapshot ? <Dataset snapshot={snapshot} /> : <Datasets />;
}

function Datasets(): JSX.Element {
  const { value: snapshots, error } = useLoaded(listSnapshots, []);
  return (
    <>
      <Heading title="Datasets">
        <p class="quiet">A snapshot pins the samples of a dataset: the list of its objects and their contents.</p>
      </Heading>
      <Problem error={error} />
      {!snapshots && !error && <Loading />}
      {snapshots?.length === 0 && (
        <Empty>No datasets yet. mesh.open("s3://BUCKET/PREFIX", …) and mesh head s3://BUCKET/PREFIX create one.</Empty>
      )}
      {snapshots && snapshots.length > 0 && (
        <Table head={["Snapshot", "Source", "Kind", "Last used"]}>
          {snapshots.map((each) => (
            <tr key={each.hash}>
              <td>
                <a href={`#/datasets/${each.hash}`} class="hash">
                  {each.hash.slice(0, 12)}
                </a>
              </td>
              <td class="long">{each.source}</td>
              <td>{each.kind}</td>
              <td class="quiet">{ago(each.used_ms)}</td>
            </tr>
          ))}
        </Table>
      )}
    </>
  );
}

interface Known {
  plans: StoredPlan[];
  bad: { plan: string; samples: BadSample[] }[];
}

const MOST_PLANS = 20;

async function loadPlansOf(snapshot: string, signal: AbortSignal): Promise<Known> {
  const plans = (await listPlans()).filter((plan) => plan.snapshot === snapshot);
  const bad = plans.slice(0, MOST_PLANS).map(async ({ hash }) => ({ plan: hash, samples: await loadBad(hash, signal) }));
  return { plans, bad: (await Promise.all(bad)).filter(({ samples }) => samples.length > 0) };
}

function Dataset({ snapshot }: { snapshot: string }): JSX.Element {
  const { value, error } = useLoaded(
    (signal) => json<Statistics>(`/-/snapshots/${snapshot}/statistics`, { signal }),
    [snapshot],
  );
  const known = useLoaded((signal) => loadPlansOf(snapshot, signal), [snapshot]);
  return (
    <>
      <Heading title="Dataset" />
      <nav aria-label="Dataset" class="crumbs">
        <ol>
          <li>
            <a href="#/datasets">Datasets</a>
          </li>
          <li class="hash">{snapshot.slice(0, 16)}</li>
        </ol>
      </nav>
      <Problem error={error} />
      {!value && !error && <Loading />}
      {value && (
        <>
          <p class="long">{value.source}</p>
          <section aria-label="Figures" class="tiles">
            <Tile title="Samples" value={count(value.samples)} note={`${value.kind === "objects" ? "" : `${value.kind}, `}in ${counted(value.objects, "object")}`} />
            <Tile title="Size" value={bytes(value.bytes)} note={`${bytes(value.bytes / (value.samples || 1))} per sample`} />
            <Tile title="Shards" value={count(value.shards)} note="shuffled as units" />
          </section>
          {Object.entries(value.fields).map(([name, field]) => (
            <section key={name} aria-label={`Field ${name}`}>
              <h2>
                {name} <code>{typeOf(field)}</code>
              </h2>
              {field.counts && <Classes name={name} counts={field.counts} classes={field.classes ?? 0} total={value.samples} />}
              {field.histogram && <Sizes name={name} field={field} />}
            </section>
          ))}
        </>
      )}
      <section aria-label="Plans">
        <h2>Plans</h2>
        <Problem error={known.error} />
        {!known.value && !known.error && <Loading />}
        {known.value?.plans.length === 0 && <Empty>No plan uses this snapshot.</Empty>}
        {known.value && known.value.plans.length > 0 && <PlanTable plans={known.value.plans} />}
        {known.value?.bad.map(({ plan, samples }) => (
          <section key={plan} aria-label={`Bad samples of plan ${plan.slice(0, 12)}`}>
            <p class="quiet">
              Plan <span class="hash">{plan.slice(0, 12)}</span>
            </p>
            <BadSamples bad={samples} />
          </section>
        ))}
      </section>
    </>
  );
}

function typeOf(field: FieldStatistics): string {
  if (field.kind === "label") return `label, ${counted(field.classes ?? 0, "class", "classes")}`;
  return field.dtype ? `${field.dtype}[${(field.shape ?? []).join("×")}]` : "bytes";
}

function Tile({ title, value, note }: { title: string; value: string; note: string }): JSX.Element {
  return (
    <div class="tile">
      <span class="quiet">{title}</span>
      <strong>{value}</strong>
      <span class="quiet">{note}</span>
    </div>
  );
}

function Classes({ name, counts, classes, total }: {
  name: string;
  counts: [string, number][];
  classes: number;
  total: number;
}): JSX.Element {
  return (
    <>
      <Bars
        label={`Samples of each class of ${name}`}
        rows={counts.map(([text, samples]) => ({ text, samples, note: percent(samples / (total || 1)) }))}
      />
      {classes > counts.length && (
        <p class="quiet">
          The {count(counts.length)} largest of {count(classes)} classes.
        </p>
      )}
    </>
  );
}

function Sizes({ name, field }: { name: string; field: FieldStatistics }): JSX.Element {
  const { histogram = [], least = 0, most = 0 } = field;
  return (
    <>
      <p class="quiet">
        {least === most ? `Each value has ${bytes(least)}.` : `Values from ${bytes(least)} to ${bytes(most)}, ${bytes(field.bytes ?? 0)} in total.`}
      </p>
      {least !== most && (
        <Bars
          label={`Samples by the size of ${name}`}
          rows={histogram.map(([lowest, samples]) => ({
            text: lowest ? `${bytes(lowest)} to ${bytes(2 * lowest)}` : "0 B",
            samples,
            note: "",
          }))}
        />
      )}
    </>
  );
}

/** Numbers of samples as a bar chart, which is a table for screen readers. */
function Bars({ label, rows }: { label: string; rows: { text: string; samples: number; note: string }[] }): JSX.Element {
  const top = Math.max(1, ...rows.map(({ samples }) => samples));
  return (
    <div class="bars" tabIndex={0} role="region" aria-label={label}>
      <table aria-label={label}>
        <tbody>
          {rows.map(({ text, samples, note }, index) => (
            <tr key={index}>
              <th scope="row" title={text}>
                {text}
              </th>
              <td class="number">{count(samples)}</td>
              <td class="amount">
                <div class="fill" style={{ width: `${(100 * samples) / top}%` }} />
              </td>
              <td class="quiet">{note}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

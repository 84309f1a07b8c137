// Batches: the plans, and the batch of a rank at any step. Two addresses can be compared side by side.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { NUMBERS, readAddress, type Address, type Name } from "../address";
import { listPlans } from "../documents";
import { ago, count } from "../format";
import { Empty, Heading, Loading, Problem, useLoaded } from "../parts";
import { readRoute } from "../route";
import { BatchView } from "./batch";
import { PlanDetails, PlanTable } from "./plan";

export function InspectorPage({ plan, query }: { plan: string; query: URLSearchParams }): JSX.Element {
  return plan ? <Inspector plan={plan} query={query} /> : <Plans />;
}

function Plans(): JSX.Element {
  const { value: plans, error } = useLoaded(listPlans, []);
  return (
    <>
      <Heading title="Batches">
        <p class="quiet">A plan is a snapshot with ops, a seed and an order. Choose a plan to see its batches.</p>
      </Heading>
      <Problem error={error} />
      {!plans && !error && <Loading />}
      {plans?.length === 0 && (
        <Empty>No plans yet. A training job registers a plan when it creates a loader: mesh.Loader(ds, …).</Empty>
      )}
      {plans && plans.length > 0 && <PlanTable plans={plans} />}
    </>
  );
}

const SECOND = "b.";

interface Shown {
  address: Address;
  /** The second one, side by side. */
  other: Address | null;
}

function readShown(plan: string, query: URLSearchParams): Shown {
  const otherPlan = query.get(`${SECOND}plan`) ?? "";
  return { address: readAddress(plan, query), other: otherPlan ? readAddress(otherPlan, query, SECOND) : null };
}

/** The addresses in the browser's URL. Changes start from these, since the rendered ones may lack the change before. */
function latestShown(): Shown {
  const { path, query } = readRoute();
  return readShown(path[1] ?? "", query);
}

function Inspector({ plan, query }: { plan: string; query: URLSearchParams }): JSX.Element {
  const { address, other } = readShown(plan, query);
  const [steps, setSteps] = useState<number | null>(null);
  const go = (first: Address, second: Address | null): void => {
    const next = new URLSearchParams();
    for (const name of NUMBERS) next.set(name, String(first[name]));
    if (second) {
      next.set(`${SECOND}plan`, second.plan);
      for (const name of NUMBERS) next.set(SECOND + name, String(second[name]));
    }
    location.hash = `/batches/${first.plan}?${next.toString()}`;
  };
  const move = (name: Name, by: number): void => {
    const most = (of: Address): number => (name === "rank" ? of.world - 1 : Infinity);
    const moved = (of: Address): Address => ({ ...of, [name]: Math.min(Math.max(0, of[name] + by), most(of)) });
    const latest = latestShown();
    const next = moved(latest.address);
    if (name === "step" && steps !== null && next.step >= steps) return;
    go(next, latest.other && moved(latest.other));
  };
  const change = (numbers: Partial<Address>): void => {
    const latest = latestShown();
    go({ ...latest.address, ...numbers }, latest.other);
  };
  const changeOther = (numbers: Partial<Address>): void => {
    const latest = latestShown();
    go(latest.address, latest.other && { ...latest.other, ...numbers });
  };
  const toggleOther = (): void => {
    const latest = latestShown();
    go(latest.address, latest.other ? null : { ...latest.address, epoch: latest.address.epoch + 1 });
  };
  useEffect(() => {
    const key = (event: KeyboardEvent): void => {
      const at = event.target as HTMLElement;
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(at.tagName)) return;
      if (document.querySelector("dialog[open]")) return;
      const moves: Record<string, [Name, number]> = {
        ArrowRight: [event.shiftKey ? "epoch" : "step", 1],
        ArrowLeft: [event.shiftKey ? "epoch" : "step", -1],
        "]": ["rank", 1],
        "[": ["rank", -1],
      };
      const found = moves[event.key];
      if (!found) return;
      event.preventDefault();
      move(...found);
    };
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  });
  return (
    <>
      <Heading title="Batches">
        <button type="button" onClick={toggleOther} aria-pressed={other !== null}>
          {other ? "Single batch" : "Side by side"}
        </button>
      </Heading>
      <nav aria-label="Plan" class="crumbs">
        <ol>
          <li>
            <a href="#/batches">Plans</a>
          </li>
          <li class="hash">{plan.slice(0, 16)}</li>
        </ol>
      </nav>
      <PlanDetails plan={plan} />
      <p class="quiet keys">
        <kbd>←</kbd> <kbd>→</kbd> step · <kbd>Shift</kbd>+<kbd>←</kbd> <kbd>→</kbd> epoch · <kbd>[</kbd> <kbd>]</kbd> rank
      </p>
      <div class={other ? "side-by-side" : ""}>
        <section aria-label={other ? "First batch" : "Batch"}>
          <AddressForm address={address} steps={steps} withPlan={other !== null} onChange={change} />
          <BatchView address={address} onSteps={setSteps} />
        </section>
        {other && (
          <section aria-label="Second batch">
            <AddressForm address={other} steps={null} withPlan onChange={changeOther} />
            <BatchView address={other} onSteps={() => {}} />
          </section>
        )}
      </div>
    </>
  );
}

const MOST_CHOICES = 200;

function PlanChoice({ plan, onChange }: { plan: string; onChange(plan: string): void }): JSX.Element {
  const { value: plans = [] } = useLoaded(listPlans, []);
  const known = plans.slice(0, MOST_CHOICES).map(({ hash, buckets, ops, used_ms }) => ({
    hash,
    words: `${hash.slice(0, 12)} ${buckets.map((bucket) => `s3://${bucket}`).join(", ")}: ${ops.join(" → ") || "as stored"}; used ${ago(used_ms)}`,
  }));
  if (!known.some(({ hash }) => hash === plan)) known.unshift({ hash: plan, words: plan.slice(0, 12) });
  return (
    <label class="wide-label">
      Plan
      <select value={plan} onChange={(event) => onChange(event.currentTarget.value)}>
        {known.map(({ hash, words }) => (
          <option key={hash} value={hash}>
            {words}
          </option>
        ))}
      </select>
    </label>
  );
}

const LEAST: Record<Name, number> = { epoch: 0, step: 0, rank: 0, world: 1, batch: 1 };
const WORDS: Record<Name, string> = {
  epoch: "Epoch",
  step: "Step",
  rank: "Rank",
  world: "World size",
  batch: "Global batch size",
};

function AddressForm({ address, steps, withPlan, onChange }: {
  address: Address;
  steps: number | null;
  withPlan?: boolean;
  onChange(change: Partial<Address>): void;
}): JSX.Element {
  return (
    <form class="address" onSubmit={(event) => event.preventDefault()}>
      {withPlan && <PlanChoice plan={address.plan} onChange={(plan) => onChange({ plan })} />}
      {NUMBERS.map((name) => (
        <label key={name}>
          <span>
            {WORDS[name]}
            {name === "step" && steps !== null && <span class="quiet"> of {count(steps)}</span>}
          </span>
          <input
            type="number"
            min={LEAST[name]}
            value={address[name]}
            onChange={(event) => {
              const value = Math.max(LEAST[name], Math.trunc(event.currentTarget.valueAsNumber));
              if (Number.isSafeInteger(value)) onChange({ [name]: value });
            }}
          />
        </label>
      ))}
    </form>
  );
}

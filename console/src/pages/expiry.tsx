// The lifecycle rules of a bucket in words, and a form for new rules that describes the rule and counts what it would
// remove now.

import type { JSX, TargetedEvent } from "preact";
import { useEffect, useState } from "preact/hooks";
import { ifThere } from "../api";
import { bytes, count } from "../format";
import { addRule, draftWords, loadRules, removeRule, ruleWords, switchRule, type Action, type Draft } from "../lifecycle";
import { countDue, type Due } from "../lifecycle_due";
import { Problem, useLoaded } from "../parts";

export function Expiry({ bucket }: { bucket: string }): JSX.Element {
  const { value, error, reload } = useLoaded(() => ifThere(loadRules(bucket), "NoSuchLifecycleConfiguration"), [bucket]);
  const [failure, setFailure] = useState<unknown>(null);
  const change = (work: Promise<void>): void => {
    work.then(() => {
      setFailure(null);
      reload();
    }, setFailure);
  };
  const rules = ruleWords(value ?? null);
  return (
    <section aria-label="Lifecycle rules">
      <h3>Lifecycle rules</h3>
      <Problem error={error} />
      <Problem error={failure} />
      {value !== undefined && rules.length === 0 && <p>No lifecycle rules: nothing expires.</p>}
      {rules.length > 0 && (
        <ul class="words">
          {rules.map(({ id, enabled, text }, at) => (
            <li key={`${id} ${text}`}>
              {!enabled && <span class="tag warn">disabled</span>} {text} {id && <span class="quiet">{id}</span>}{" "}
              <button type="button" class="link" aria-label={`${enabled ? "Disable" : "Enable"} rule ${at + 1}`} onClick={() => change(switchRule(bucket, value!, at, !enabled))}>
                {enabled ? "Disable" : "Enable"}
              </button>{" "}
              <button type="button" class="link" aria-label={`Remove rule ${at + 1}`} onClick={() => change(removeRule(bucket, value!, at))}>
                Remove
              </button>
            </li>
          ))}
        </ul>
      )}
      {value !== undefined && (
        <details>
          <summary>Add a rule</summary>
          <RuleForm key={rules.length} bucket={bucket} onAdd={(draft) => change(addRule(bucket, value ?? null, draft))} />
        </details>
      )}
    </section>
  );
}

const ACTIONS: Record<Action, string> = {
  days: "Delete objects after a number of days",
  date: "Delete objects on a date",
  versions: "Remove earlier versions after a number of days",
  markers: "Remove delete markers without other versions",
  uploads: "Abort incomplete multipart uploads",
};
const EMPTY: Draft = { action: "days", prefix: "", tags: [], larger: null, smaller: null, days: 30, date: "", keep: null };

function RuleForm({ bucket, onAdd }: { bucket: string; onAdd(draft: Draft): void }): JSX.Element {
  const [given, setGiven] = useState<Draft>(EMPTY);
  const set = (more: Partial<Draft>): void => setGiven({ ...given, ...more });
  const whole = ["markers", "uploads"].includes(given.action); // these actions do not filter by tags or size
  const draft = whole ? { ...given, tags: [], larger: null, smaller: null } : given;
  const ready = draft.action === "date" ? draft.date !== "" : draft.action === "markers" || draft.days >= 1;
  const submit = (event: TargetedEvent<HTMLFormElement, SubmitEvent>): void => {
    event.preventDefault();
    onAdd(draft);
  };
  const number = (name: "days" | "keep" | "larger" | "smaller", label: string, min: number, max?: number): JSX.Element => (
    <label>
      {label}
      <input
        name={name}
        type="number"
        min={min}
        max={max}
        required={name === "days"}
        value={draft[name] ?? ""}
        onInput={({ currentTarget: { valueAsNumber: value } }) => set({ [name]: Number.isFinite(value) ? value : name === "days" ? 0 : null })}
      />
    </label>
  );
  return (
    <form class="filters expiry" onSubmit={submit}>
      <label class="wide-label">
        Action
        <select name="action" value={draft.action} onChange={(event) => set({ action: event.currentTarget.value as Action })}>
          {Object.entries(ACTIONS).map(([action, words]) => (
            <option key={action} value={action}>
              {words}
            </option>
          ))}
        </select>
      </label>
      {["days", "versions", "uploads"].includes(draft.action) && number("days", "Days", 1, 36500)}
      {draft.action === "date" && (
        <label>
          Date
          <input name="date" type="date" required value={draft.date} onInput={(event) => set({ date: event.currentTarget.value })} />
        </label>
      )}
      {draft.action === "versions" && number("keep", "Versions to keep", 1, 100)}
      <label>
        Prefix
        <input name="prefix" placeholder="all objects" autocapitalize="none" spellcheck={false} value={draft.prefix} onInput={(event) => set({ prefix: event.currentTarget.value })} />
      </label>
      {!whole && (
        <>
          <label>
            Tags
            <input name="tags" placeholder="name=value, …" autocapitalize="none" spellcheck={false} onInput={(event) => set({ tags: readTags(event.currentTarget.value) })} />
          </label>
          {number("larger", "Larger than (bytes)", 0)}
          {number("smaller", "Smaller than (bytes)", 1)}
        </>
      )}
      <div class="wide-label">
        {ready && <p aria-label="Rule in words">{draftWords(draft)}</p>}
        {ready && <DryRun key={JSON.stringify(draft)} bucket={bucket} draft={draft} />}
        {draft.prefix === "" && draft.tags.length === 0 && <p class="warn">This rule applies to the whole bucket.</p>}
        <button type="submit">Add rule</button>
      </div>
    </form>
  );
}

function readTags(text: string): [string, string][] {
  return text
    .split(",")
    .map((pair) => pair.trim())
    .filter((pair) => pair.includes("="))
    .map((pair) => [pair.slice(0, pair.indexOf("=")).trim(), pair.slice(pair.indexOf("=") + 1).trim()]);
}

const NOUNS: Record<Action, [string, string]> = {
  days: ["object", "objects"],
  date: ["object", "objects"],
  versions: ["earlier version", "earlier versions"],
  markers: ["delete marker", "delete markers"],
  uploads: ["upload", "uploads"],
};

/** Counts what the rule would remove now. */
function DryRun({ bucket, draft }: { bucket: string; draft: Draft }): JSX.Element {
  const [running, setRunning] = useState<AbortController | null>(null);
  const [due, setDue] = useState<Due | null>(null);
  const [error, setError] = useState<unknown>(null);
  useEffect(() => () => running?.abort(), [running]);
  const run = (): void => {
    const abort = new AbortController();
    setRunning(abort);
    countDue(bucket, draft, abort.signal)
      .then(setDue, (why: unknown) => !abort.signal.aborted && setError(why))
      .finally(() => setRunning(null));
  };
  if (error) return <Problem error={error} />;
  if (!due) {
    return (
      <button type="button" disabled={running !== null} onClick={run}>
        {running ? "Counting …" : "What would it remove now?"}
      </button>
    );
  }
  const noun = NOUNS[draft.action][due.count === 1 ? 0 : 1];
  return (
    <p role="status">
      If it were applied now, it would remove {due.count > 0 && draft.tags.length > 0 && "at most "}
      {count(due.count)} {noun}
      {due.bytes > 0 && `, ${bytes(due.bytes)}`}
      {due.more && `, among the first ${count(due.looked)} that were checked`}
      {draft.tags.length > 0 && due.count > 0 && "; tags are not checked"}.
    </p>
  );
}

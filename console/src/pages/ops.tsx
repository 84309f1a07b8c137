// Ops: trials of ops on an object, the modules that users pushed, and the library.

import type { JSX, TargetedEvent } from "preact";
import { useState } from "preact/hooks";
import { json } from "../api";
import { ago, bytes } from "../format";
import { isNpy, parseNpy } from "../npy";
import { Empty, Heading, Loading, Problem, Table, useLoaded } from "../parts";
import type { Module, Modules as PushedModules, Ops, Trial as TrialReply, TrialResult as TrialRow } from "../schema";
import { ArrayPreview, textOf } from "./preview";

export function OpsPage(): JSX.Element {
  const ops = useLoaded((signal) => json<Ops>("/-/ops", { signal }), []);
  const modules = useLoaded((signal) => json<PushedModules>("/-/modules", { signal }), []);
  const [wanted, setWanted] = useState("");
  const found = ops.value?.ops.filter(({ op, summary }) => `${op} ${summary}`.toLowerCase().includes(wanted.toLowerCase()));
  return (
    <>
      <Heading title="Ops" />
      <section aria-label="Trial">
        <h2>Try ops on an object</h2>
        <Trial names={ops.value?.ops.map(({ op }) => op) ?? []} />
      </section>
      <section aria-label="Modules">
        <h2>User modules</h2>
        <Problem error={modules.error} />
        {modules.value?.modules.length === 0 && <Empty>No modules yet. Push one with mesh op push FILE.</Empty>}
        {modules.value && modules.value.modules.length > 0 && <Modules modules={modules.value.modules} />}
      </section>
      <section aria-label="Library">
        <h2>Library</h2>
        <Problem error={ops.error} />
        {!ops.value && !ops.error && <Loading />}
        <label class="search">
          Search by name or description
          <input type="search" value={wanted} onInput={(event) => setWanted(event.currentTarget.value)} />
        </label>
        {found && (
          <Table head={["Op", "What it does", "Arguments"]}>
            {found.map((op) => (
              <tr key={op.op}>
                <td>
                  <strong>{op.op}</strong>
                </td>
                <td>
                  <WithCode text={op.summary} />
                  {op.takes && (
                    <p class="quiet">
                      <WithCode text={`${op.takes} → ${op.gives}`} />
                    </p>
                  )}
                </td>
                <td>{op.arguments.join(", ")}</td>
              </tr>
            ))}
          </Table>
        )}
      </section>
    </>
  );
}

/** Text whose words in backticks are code. */
function WithCode({ text }: { text: string }): JSX.Element {
  return <>{text.split("`").map((part, index) => (index % 2 ? <code key={index}>{part}</code> : part))}</>;
}

function Modules({ modules }: { modules: Module[] }): JSX.Element {
  return (
    <Table head={["Module", "Ops", "Build", "Pushed"]}>
      {modules.flatMap(({ module, version, builds }) =>
        builds.map((build) => (
          <tr key={`${module} ${build.version}`}>
            <td>
              {module} {build.version === version && <span class="tag good">latest</span>}
              {build.draft && <span class="tag">draft</span>}
            </td>
            <td>{build.ops.join(", ")}</td>
            <td class="hash">{build.version.replace("sha256:", "").slice(0, 12)}</td>
            <td class="quiet">
              {ago(build.pushed_ms)} by {build.pushed_by}
            </td>
          </tr>
        )),
      )}
    </Table>
  );
}

const EXAMPLE = '[{"op": "decode"}, {"op": "resize", "args": {"size": 128}}]';

function Trial({ names }: { names: string[] }): JSX.Element {
  const [tried, setTrialReply] = useState<TrialReply | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const submit = (event: TargetedEvent<HTMLFormElement, SubmitEvent>): void => {
    event.preventDefault();
    const form = event.currentTarget.elements;
    const value = (name: string): string => (form.namedItem(name) as HTMLInputElement).value.trim();
    let ops: unknown;
    try {
      ops = JSON.parse(value("ops"));
    } catch {
      setError(new Error(`The ops must be a JSON list, such as ${EXAMPLE}.`));
      return;
    }
    setBusy(true);
    setError(null);
    const body = JSON.stringify({ ops, samples: [value("sample")], seed: Number(value("seed")) || 0, results: true });
    json<TrialReply>("/-/modules/test", { method: "POST", body })
      .then(setTrialReply, setError)
      .finally(() => setBusy(false));
  };
  return (
    <form onSubmit={submit} class="trial">
      <label>
        Object
        <input name="sample" required pattern="s3://.+/.+" placeholder="s3://BUCKET/KEY" autocapitalize="none" spellcheck={false} />
      </label>
      <label>
        Ops (JSON list)
        <textarea name="ops" rows={3} spellcheck={false} defaultValue={EXAMPLE} />
      </label>
      <label>
        Seed
        <input name="seed" type="number" min={0} defaultValue="0" />
      </label>
      <p class="quiet">
        Nothing is stored. Each op runs in the same kind of process as for a plan. {names.length > 0 && `${names.length} ops are available.`}
      </p>
      <div class="buttons start">
        <button type="submit" class="primary" disabled={busy}>
          {busy ? "Running …" : "Run"}
        </button>
      </div>
      <Problem error={error} />
      {tried?.results.map((result) => <TrialResult key={result.sample} output={tried.output} result={result} />)}
    </form>
  );
}

function TrialResult({ output, result }: { output: string; result: TrialRow }): JSX.Element {
  if (result.error !== undefined) {
    return (
      <p class="problem" role="alert">
        {result.op}: {result.error}
      </p>
    );
  }
  const data = Uint8Array.from(atob(result.result ?? ""), (char) => char.charCodeAt(0));
  const shown = textOf(data, false);
  return (
    <section aria-label="Result">
      <p role="status">
        {output}, {bytes(result.size ?? 0)} in {(result.seconds ?? 0).toFixed(3)} s;{" "}
        {result.repeats === false ? <span class="tag warn">a second run returned another result</span> : "a second run returned the same result"}
      </p>
      {isNpy(data) && <ArrayPreview array={parseNpy(data)} name="the result" />}
      {!isNpy(data) && data.length > 0 && (
        <pre class="preview" tabIndex={0} aria-label="The result">
          {shown.kind === "text" ? shown.text : shown.kind === "bytes" ? shown.hex : ""}
        </pre>
      )}
    </section>
  );
}

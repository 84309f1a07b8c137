// Deletion: a dry run counts the objects, then exactly these are deleted.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { bytes, count, counted } from "../format";
import { Dialog, Problem } from "../parts";
import { deleteObjects, list, type Failure } from "../s3";

const MOST = 100_000;
const BATCH = 1000;

interface Plan {
  keys: string[];
  size: number;
  /** Whether there are more objects than one deletion removes. */
  cut: boolean;
}

/** Returns the objects with these names, and all objects in these folders. */
async function plan(bucket: string, names: string[], signal: AbortSignal, tell: (found: number) => void): Promise<Plan> {
  const result: Plan = { keys: [], size: 0, cut: false };
  for (const name of names) {
    if (!name.endsWith("/")) {
      const { entries } = await list({ bucket, prefix: name, after: "", folders: true, signal });
      const found = entries.find((entry) => entry.key === name);
      if (found) {
        result.keys.push(name);
        result.size += found.size;
      }
      continue;
    }
    for (let after = ""; ; ) {
      const page = await list({ bucket, prefix: name, after, folders: false, signal });
      for (const { key, size } of page.entries) {
        if (result.keys.length >= MOST) return { ...result, cut: true };
        result.keys.push(key);
        result.size += size;
      }
      tell(result.keys.length);
      if (!page.next) break;
      after = page.next;
    }
  }
  return result;
}

export function DeleteDialog({ bucket, names, onClose, onDone }: {
  bucket: string;
  names: string[];
  onClose(): void;
  onDone(): void;
}): JSX.Element {
  const [found, setFound] = useState(0);
  const [planned, setPlanned] = useState<Plan | null>(null);
  const [deleted, setDeleted] = useState<number | null>(null);
  const [failures, setFailures] = useState<Failure[]>([]);
  const [error, setError] = useState<unknown>(null);
  useEffect(() => {
    const abort = new AbortController();
    plan(bucket, names, abort.signal, setFound).then(setPlanned, (why: unknown) => {
      if (!abort.signal.aborted) setError(why);
    });
    return () => abort.abort();
  }, []);
  const ended = planned !== null && deleted === planned.keys.length;
  const remove = async (): Promise<void> => {
    if (!planned) return;
    setDeleted(0);
    try {
      for (let start = 0; start < planned.keys.length; start += BATCH) {
        const keys = planned.keys.slice(start, start + BATCH);
        const failed = await deleteObjects(bucket, keys);
        setFailures((before) => [...before, ...failed].slice(0, BATCH));
        setDeleted(start + keys.length);
      }
    } catch (why) {
      setError(why);
    }
    onDone();
  };
  return (
    <Dialog title={ended ? "Objects deleted" : "Delete objects"} onClose={onClose}>
      {!planned && !error && <p role="status">Counting objects: {count(found)} so far …</p>}
      {planned && deleted === null && (
        <>
          <p>
            This deletes <strong>{count(planned.keys.length)}</strong>{" "}
            {planned.keys.length === 1 ? "object" : "objects"} from s3://{bucket}, <strong>{bytes(planned.size)}</strong>.
            Nothing has been deleted yet.
          </p>
          {planned.cut && <p>There are more objects. This deletes the first {count(MOST)}; delete again for the rest.</p>}
          <ul class="dry-run">
            {planned.keys.slice(0, 8).map((key) => (
              <li key={key}>{key}</li>
            ))}
            {planned.keys.length > 8 && <li class="quiet">and {count(planned.keys.length - 8)} more</li>}
          </ul>
          <p class="quiet">If the bucket has versioning, earlier versions are kept.</p>
        </>
      )}
      {planned && deleted !== null && (
        <p role="status">
          {count(deleted - failures.length)} of {count(planned.keys.length)} deleted.
        </p>
      )}
      {failures.length > 0 && (
        <div class="problem" role="alert">
          <p>{count(failures.length)} could not be deleted:</p>
          <ul>
            {failures.slice(0, 8).map(({ key, message }) => (
              <li key={key}>
                {key}: {message}
              </li>
            ))}
          </ul>
        </div>
      )}
      <Problem error={error} />
      <div class="buttons">
        <button type="button" onClick={onClose}>
          {deleted === null ? "Cancel" : "Close"}
        </button>
        {planned && planned.keys.length > 0 && deleted === null && (
          <button type="button" class="danger" onClick={() => void remove()}>
            Delete {counted(planned.keys.length, "object")}
          </button>
        )}
      </div>
    </Dialog>
  );
}

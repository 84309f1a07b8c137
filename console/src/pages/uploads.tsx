// Uploads of dropped or selected files and folders, two at a time, each with its progress.

import type { JSX } from "preact";
import { useEffect, useReducer, useRef } from "preact/hooks";
import { bytes, percent } from "../format";
import { sentenceOf } from "../parts";
import { abandon, upload, type Progress } from "../upload";

const AT_ONCE = 2;
const SHOWN = 50;

interface Wanted {
  file: File;
  key: string;
}

interface Running extends Wanted {
  progress: Progress;
  abort: AbortController;
}

export interface Uploads {
  all: Running[];
  add(files: Wanted[]): void;
  addDropped(data: DataTransfer, prefix: string): Promise<void>;
  stop(item: Running): void;
  retry(item: Running): void;
  clear(): void;
}

export function useUploads(bucket: string, onDone: () => void): Uploads {
  const [, update] = useReducer((times: number) => times + 1, 0);
  const items = useRef<Running[]>([]);
  const done = useRef(onDone);
  done.current = onDone;
  useEffect(() => {
    const ask = (event: BeforeUnloadEvent): void => {
      if (items.current.some(({ progress }) => ["running", "waiting", "retrying"].includes(progress.state))) {
        event.preventDefault();
      }
    };
    addEventListener("beforeunload", ask);
    return () => {
      removeEventListener("beforeunload", ask);
      for (const item of items.current) item.abort.abort();
    };
  }, []);
  const next = (): void => {
    const active = items.current.filter(({ progress }) => ["running", "retrying"].includes(progress.state));
    const waiting = items.current.find(({ progress }) => progress.state === "waiting");
    if (!waiting || active.length >= AT_ONCE) return;
    run(waiting);
    next();
  };
  const run = (item: Running): void => {
    const report = (change: Partial<Progress>): void => {
      Object.assign(item.progress, change);
      update(undefined);
    };
    report({ state: "running", message: "" });
    upload(bucket, item.key, item.file, item.abort.signal, report)
      .then(
        () => report({ state: "done", sent: item.file.size }),
        (error: unknown) => {
          const stopped = error instanceof DOMException && error.name === "AbortError";
          report({ state: "failed", message: stopped ? "Stopped. Continue resumes the upload." : sentenceOf(error) });
        },
      )
      .finally(() => {
        next();
        if (!items.current.some(({ progress }) => progress.state === "running")) done.current();
      });
  };
  const add = (files: Wanted[]): void => {
    for (const { file, key } of files) {
      const progress: Progress = { sent: 0, size: file.size, state: "waiting", message: "", resumed: false };
      items.current.push({ file, key, progress, abort: new AbortController() });
    }
    update(undefined);
    next();
  };
  return {
    all: items.current,
    add,
    addDropped: async (data, prefix) => add(await droppedFiles(data, prefix)),
    stop: (item) => item.abort.abort(),
    retry: (item) => {
      item.abort = new AbortController();
      item.progress.state = "waiting";
      next();
    },
    clear: () => {
      for (const { progress, key, file } of items.current) {
        if (progress.state === "failed") void abandon(bucket, key, file).catch(() => {});
      }
      items.current = items.current.filter(({ progress }) => !["done", "failed"].includes(progress.state));
      update(undefined);
    },
  };
}

/** Returns the dropped files, including those in folders, with their keys. */
async function droppedFiles(data: DataTransfer, prefix: string): Promise<Wanted[]> {
  const roots = [...data.items].map((item) => item.webkitGetAsEntry()).filter((entry) => entry !== null);
  const found: Wanted[] = [];
  const walk = async (entry: FileSystemEntry): Promise<void> => {
    if (entry.isFile) {
      const file = await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject));
      found.push({ file, key: prefix + entry.fullPath.replace(/^\//, "") });
      return;
    }
    const reader = (entry as FileSystemDirectoryEntry).createReader();
    for (;;) {
      const entries = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
      if (entries.length === 0) return;
      for (const each of entries) await walk(each);
    }
  };
  for (const root of roots) await walk(root);
  return found;
}

export function UploadPanel({ uploads }: { uploads: Uploads }): JSX.Element | null {
  const { all } = uploads;
  if (all.length === 0) return null;
  const done = all.filter(({ progress }) => progress.state === "done").length;
  const ended = all.every(({ progress }) => ["done", "failed"].includes(progress.state));
  return (
    <section class="uploads" aria-label="Uploads">
      <header>
        <h2>
          Uploads{" "}
          <span class="quiet" role="status">
            {done} of {all.length} done
          </span>
        </h2>
        {ended && (
          <button type="button" class="plain" onClick={uploads.clear}>
            Clear
          </button>
        )}
      </header>
      <ul>
        {all.slice(-SHOWN).map((item) => (
          <UploadRow key={item.key} item={item} uploads={uploads} />
        ))}
      </ul>
    </section>
  );
}

function UploadRow({ item, uploads }: { item: Running; uploads: Uploads }): JSX.Element {
  const { sent, size, state, message, resumed } = item.progress;
  const share = size ? Math.min(1, sent / size) : Number(state === "done");
  return (
    <li>
      <span class="name">{item.key}</span>
      <span class="quiet">
        {state === "done" ? bytes(size) : `${bytes(sent)} of ${bytes(size)}, ${percent(share)}`}
        {resumed && state !== "done" && ", resumed"}
      </span>
      <progress max={1} value={share} aria-label={`Progress of ${item.key}`} />
      {state === "running" && (
        <button type="button" class="plain" onClick={() => uploads.stop(item)}>
          Stop
        </button>
      )}
      {state === "failed" && (
        <button type="button" class="plain" onClick={() => uploads.retry(item)}>
          Continue
        </button>
      )}
      {message && <span class={state === "failed" ? "problem" : "quiet"}>{message}</span>}
    </li>
  );
}

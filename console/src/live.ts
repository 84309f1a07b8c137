// The event stream of a page: each watched document, first whole and then as changes. Stores the last version of each.

import { apiHeaders, errorOf, reportSessionEnd, type ApiError } from "./api";
import { useEffect, useState } from "preact/hooks";

type Json = null | boolean | number | string | Json[] | { [name: string]: Json };

export type Documents = Record<string, unknown>;

function isObject(value: unknown): value is Record<string, Json> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Applies a merge patch (RFC 7396) and returns the new document; the old one stays as it is. */
export function applyPatch(document: unknown, patch: unknown): unknown {
  if (!isObject(patch)) return patch;
  const result: Record<string, unknown> = isObject(document) ? { ...document } : {};
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete result[name];
    else result[name] = applyPatch(result[name], value);
  }
  return result;
}

const FIRST_WAIT = 500;
const LONGEST_WAIT = 4_000;

export interface Live {
  documents: Documents;
  /** Why the stream is closed; empty while it is open. */
  trouble: string;
}

/** Watches documents of the native API while the component is shown. */
export function useLive(targets: readonly string[]): Live {
  const [documents, setDocuments] = useState<Documents>({});
  const [trouble, setTrouble] = useState("");
  const query = targets.map((target) => `watch=${encodeURIComponent(target)}`).join("&");
  useEffect(() => {
    const abort = new AbortController();
    void (async () => {
      for (let wait = FIRST_WAIT; !abort.signal.aborted; ) {
        try {
          await follow(query, abort.signal, (change) => {
            wait = FIRST_WAIT;
            setTrouble("");
            setDocuments(change);
          });
        } catch (error) {
          if (abort.signal.aborted) return;
          setTrouble((error as ApiError).sentence ?? "The node does not respond.");
        }
        await new Promise((resolve) => setTimeout(resolve, wait));
        wait = Math.min(2 * wait, LONGEST_WAIT);
      }
    })();
    return () => abort.abort();
  }, [query]);
  return { documents, trouble };
}

type Update = (change: (before: Documents) => Documents) => void;

async function follow(query: string, signal: AbortSignal, update: Update): Promise<void> {
  const response = await fetch(`/-/console/events?${query}`, { headers: apiHeaders(), signal, cache: "no-store" });
  if (!response.ok || !response.body) {
    const error = await errorOf(response);
    reportSessionEnd(error);
    throw error;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop() ?? "";
    for (const event of events) handle(event, update);
  }
}

function handle(event: string, update: Update): void {
  const name = /^event: (\w+)$/m.exec(event)?.[1];
  const data = /^data: (.*)$/m.exec(event)?.[1];
  if (!name || !data) return;
  const message = JSON.parse(data) as { target: string; document?: unknown; patch?: unknown };
  if (name === "document") update((before) => ({ ...before, [message.target]: message.document }));
  if (name === "patch") {
    update((before) => ({ ...before, [message.target]: applyPatch(before[message.target], message.patch) }));
  }
}

// Documents that the mesh stores: plans and snapshots that the key may see.

import { json } from "./api";

interface Stored {
  hash: string;
  buckets: string[];
  bytes: number;
  /** Milliseconds since 1970; null if it does not expire. */
  used_ms: number;
  expires_ms: number | null;
  kept_by: string[];
}

export interface Plan extends Stored {
  snapshot: string;
  samples: number;
  ops: string[];
}

export interface Snapshot extends Stored {
  source: string;
  kind: string;
}

const MOST = 5000;

async function listed<T extends Stored>(kind: "plans" | "snapshots"): Promise<T[]> {
  const found: T[] = [];
  for (let after = ""; found.length < MOST; ) {
    const page = await json<Record<string, T[]> & { next: string }>(
      `/-/documents/${kind}?limit=1000${after && `&after=${after}`}`,
    );
    found.push(...page[kind]!);
    if (!page.next) break;
    after = page.next;
  }
  return found.sort((left, right) => right.used_ms - left.used_ms);
}

/** Returns the plans, those used last first; at most 5,000. */
export const listPlans = (): Promise<Plan[]> => listed<Plan>("plans");

/** Returns the snapshots, those used last first; at most 5,000. */
export const listSnapshots = (): Promise<Snapshot[]> => listed<Snapshot>("snapshots");

// The stored plans and snapshots that the key may read.

import { json } from "./api";
import type { StoredDocument, StoredPlan, StoredSnapshot } from "./schema";

const MOST = 5000;

async function listed<T extends StoredDocument>(kind: "plans" | "snapshots"): Promise<T[]> {
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

/** Returns at most 5,000 plans, the most recently used first. */
export const listPlans = (): Promise<StoredPlan[]> => listed<StoredPlan>("plans");

/** Returns the plan whose hash begins with these digits; null if the key may not read it. */
export async function findPlan(digits: string): Promise<StoredPlan | null> {
  const page = await json<{ plans: StoredPlan[] }>(`/-/documents/plans?limit=1&after=${digits.padEnd(64, "0")}`);
  return page.plans.find(({ hash }) => hash.startsWith(digits)) ?? null;
}

/** Returns at most 5,000 snapshots, the most recently used first. */
export const listSnapshots = (): Promise<StoredSnapshot[]> => listed<StoredSnapshot>("snapshots");

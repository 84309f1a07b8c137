// The address of a batch: a plan, and the numbers that select the rows of one rank.

import { json, request } from "./api";
import { openFrame, type Frame, type ReadPart } from "./frame";
import type { Draws, Sources } from "./schema";

export interface Address {
  plan: string;
  epoch: number;
  step: number;
  rank: number;
  world: number;
  batch: number;
}

export const NUMBERS = ["epoch", "step", "rank", "world", "batch"] as const;
export type Name = (typeof NUMBERS)[number];

const DEFAULTS: Record<Name, number> = { epoch: 0, step: 0, rank: 0, world: 1, batch: 32 };

/** Reads an address from a query; the names of a second one have a prefix. */
export function readAddress(plan: string, query: URLSearchParams, prefix = ""): Address {
  const numbers = Object.fromEntries(
    NUMBERS.map((name) => {
      const value = Number.parseInt(query.get(prefix + name) ?? "", 10);
      return [name, Number.isSafeInteger(value) && value >= 0 ? value : DEFAULTS[name]];
    }),
  ) as Record<Name, number>;
  return { plan, ...numbers };
}

export function target({ plan, epoch, step, rank, world, batch }: Address, more = ""): string {
  return `/-/plans/${plan}/${epoch}/${step}${more}?rank=${rank}&world=${world}&batch=${batch}`;
}

export interface Loaded {
  address: Address;
  frame: Frame;
  /** Whether the node had the frame: hit, joined or miss. */
  result: string;
  /** Milliseconds from the request to the parsed frame. */
  took: number;
}

export interface Batch {
  loaded: Loaded;
  sources: Sources | null;
  /** The error if there are no sources. */
  trouble: unknown;
}

async function loadFrame(address: Address, rows: number, signal: AbortSignal): Promise<Loaded> {
  const begin = performance.now();
  let result = "";
  const read: ReadPart = async (start, end, until) => {
    const response = await request(target(address), { headers: { range: `bytes=${start}-${end - 1}` }, signal: until });
    result ||= response.headers.get("x-mesh-frame") ?? "";
    const data = await response.arrayBuffer();
    const total = /\/(\d+)$/.exec(response.headers.get("content-range") ?? "")?.[1];
    // A node of an earlier release ignores the range.
    return { data: total === undefined ? data.slice(start, end) : data, total: Number(total ?? data.byteLength) };
  };
  const frame = await openFrame(read, rows, signal);
  return { address, frame, result, took: performance.now() - begin };
}

/** Loads a batch with its first `rows` rows, and their sources. Throws ApiError. */
async function load(address: Address, rows: number, signal: AbortSignal): Promise<Batch> {
  const sources = json<Sources>(target(address, "/sources"), { signal }).then(
    (found) => ({ sources: found, trouble: null as unknown }),
    (trouble: unknown) => ({ sources: null, trouble }),
  );
  return { loaded: await loadFrame(address, rows, signal), ...(await sources) };
}

/** The prefetched batch: the one after the last step, in the same direction. */
let ahead: { key: string; batch: Promise<Batch>; abort: AbortController } | null = null;

/** Returns the batch at an address: the prefetched one if it has this address. */
export function loadBatch(address: Address, rows: number, signal: AbortSignal): Promise<Batch> {
  const key = JSON.stringify(address);
  const found = ahead;
  ahead = null;
  if (found?.key !== key) {
    found?.abort.abort();
    return load(address, rows, signal);
  }
  signal.addEventListener("abort", () => found.abort.abort());
  return found.batch.catch((error: unknown) => {
    if (signal.aborted) throw error;
    return load(address, rows, signal);
  });
}

/** Prefetches a batch; replaces an earlier prefetch. */
export function fetchAhead(address: Address, rows: number): void {
  const abort = new AbortController();
  const batch = load(address, rows, abort.signal);
  batch.catch(() => {}); // loadBatch reports the error
  ahead?.abort.abort();
  ahead = { key: JSON.stringify(address), batch, abort };
}

/** Drops the prefetched batch. */
export function forgetAhead(): void {
  ahead?.abort.abort();
  ahead = null;
}

export function loadDraws(address: Address, row: number, signal: AbortSignal): Promise<Draws> {
  return json<Draws>(`${target(address, "/draws")}&row=${row}`, { signal });
}

// The address of a batch: a plan, and the numbers that choose the rows of one rank.

import { json, request } from "./api";
import { parseFrame, type Frame } from "./frame";
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
  /** How the node had the frame: hit, joined or miss. */
  result: string;
  /** Milliseconds from the request to the parsed frame. */
  took: number;
}

export async function loadFrame(address: Address, signal: AbortSignal): Promise<Loaded> {
  const begin = performance.now();
  const response = await request(target(address), { signal });
  const frame = parseFrame(await response.arrayBuffer());
  const result = response.headers.get("x-mesh-frame") ?? "";
  return { address, frame, result, took: performance.now() - begin };
}

export function loadSources(address: Address, signal: AbortSignal): Promise<Sources> {
  return json<Sources>(target(address, "/sources"), { signal });
}

export function loadDraws(address: Address, row: number, signal: AbortSignal): Promise<Draws> {
  return json<Draws>(`${target(address, "/draws")}&row=${row}`, { signal });
}

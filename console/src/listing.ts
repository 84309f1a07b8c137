// A listing of any length. Only the pages near the visible rows are in memory; of the others, the key before them is.

import { useEffect, useMemo, useReducer, useRef } from "preact/hooks";
import { list, type Entry } from "./s3";

const HELD = 6;

interface ListingPage {
  after: string;
  count: number;
  entries: Entry[] | null;
  used: number;
}

export interface Rows {
  /** The number of rows listed so far. */
  count: number;
  /** Whether the bucket has more rows. */
  more: boolean;
  error: unknown;
  loading: boolean;
  entry(index: number): Entry | undefined;
  /** Loads these rows, and the next page if they are near the end. */
  show(first: number, last: number): void;
  reload(): void;
}

/** Lists the keys of `bucket` with `prefix`, after the key `after`. */
export function useListing(bucket: string, prefix: string, after: string, folders: boolean): Rows {
  const [, update] = useReducer((times: number) => times + 1, 0);
  const [times, reload] = useReducer((before: number) => before + 1, 0);
  const state = useRef<PagedListing | null>(null);
  const listing = useMemo(
    () => new PagedListing(bucket, prefix, after, folders, () => update(undefined)),
    [bucket, prefix, after, folders, times],
  );
  state.current = listing;
  useEffect(() => {
    listing.show(0, 0);
    return () => listing.close();
  }, [listing]);
  return {
    count: listing.count,
    more: listing.more,
    error: listing.error,
    loading: listing.loading,
    entry: (index) => listing.entry(index),
    show: (first, last) => listing.show(first, last),
    reload: () => reload(undefined),
  };
}

export class PagedListing {
  private readonly pages: ListingPage[] = [];
  private readonly abort = new AbortController();
  private readonly pending = new Set<string>();
  private next: string | null;
  private clock = 0;
  error: unknown = null;

  constructor(
    private readonly bucket: string,
    private readonly prefix: string,
    after: string,
    private readonly folders: boolean,
    private readonly changed: () => void,
  ) {
    this.next = after;
  }

  get count(): number {
    return this.pages.reduce((sum, page) => sum + page.count, 0);
  }

  get more(): boolean {
    return this.next !== null;
  }

  get loading(): boolean {
    return this.pending.size > 0;
  }

  /** The number of entries in memory. */
  get held(): number {
    return this.pages.reduce((sum, page) => sum + (page.entries?.length ?? 0), 0);
  }

  entry(index: number): Entry | undefined {
    for (const page of this.pages) {
      if (index < page.count) return page.entries?.[index];
      index -= page.count;
    }
    return undefined;
  }

  show(first: number, last: number): void {
    let start = 0;
    for (const page of this.pages) {
      if (start <= last && start + page.count > first) {
        page.used = ++this.clock;
        if (!page.entries) void this.load(page.after, page);
      }
      start += page.count;
    }
    if (last >= start - 200 && this.next !== null && !this.error) void this.load(this.next, null);
  }

  close(): void {
    this.abort.abort();
  }

  private async load(after: string, page: ListingPage | null): Promise<void> {
    if (this.pending.has(after)) return;
    this.pending.add(after);
    try {
      const found = await list({
        bucket: this.bucket,
        prefix: this.prefix,
        after,
        folders: this.folders,
        signal: this.abort.signal,
      });
      if (page) {
        page.entries = found.entries;
        page.count = found.entries.length;
      } else {
        this.pages.push({ after, count: found.entries.length, entries: found.entries, used: ++this.clock });
        this.next = found.next || null;
      }
      this.forget();
    } catch (error) {
      if (this.abort.signal.aborted) return;
      this.error = error;
    } finally {
      this.pending.delete(after);
    }
    this.changed();
  }

  /** Drops the entries of the pages that were shown least recently. */
  private forget(): void {
    const held = this.pages.filter((page) => page.entries).sort((left, right) => right.used - left.used);
    for (const page of held.slice(HELD)) page.entries = null;
  }
}

// The dry run of a lifecycle rule: counts in listings what the rule would remove now. Removes nothing.

import { xml } from "./api";
import { type Draft, matches } from "./lifecycle";
import { decodeName } from "./s3";
import type { XmlElement } from "./xml";

const DAY = 86_400_000;
const MOST = 100_000;

export interface Due {
  /** What the rule would remove, and the number of entries that were checked. */
  count: number;
  bytes: number;
  looked: number;
  /** Whether the bucket has more entries than were checked. */
  more: boolean;
}

/** The time when an item has this age, as S3 counts: the midnight (UTC) after its last full day. */
const dueTime = (since: number, days: number): number => (Math.floor(since / DAY) + days + 1) * DAY;

/** Counts what a rule would remove if it were applied now; ignores tags. */
export async function countDue(bucket: string, draft: Draft, signal: AbortSignal): Promise<Due> {
  const due: Due = { count: 0, bytes: 0, looked: 0, more: false };
  const uploads = draft.action === "uploads";
  const expires = (since: number): boolean =>
    (draft.action === "date" ? Date.parse(draft.date) : dueTime(since, draft.days)) <= Date.now();
  const found = (size: number): void => {
    due.count += 1;
    due.bytes += size;
  };
  let key = "";
  let noncurrent = 0;
  let replaced = 0;
  let lone = false; // the last key has a delete marker and, so far, no other version
  const look = (entry: XmlElement): void => {
    const name = decodeName(entry.text("Key"));
    const size = entry.number("Size");
    const marker = entry.name === "DeleteMarker";
    const since = Date.parse(entry.text(uploads ? "Initiated" : "LastModified"));
    if (name !== key) {
      if (lone && draft.action === "markers") found(0);
      [key, noncurrent, lone] = [name, 0, marker && entry.text("IsLatest") === "true"];
    } else lone = false;
    const latest = uploads || entry.text("IsLatest") === "true";
    if (!latest) {
      const old = draft.action === "versions" && noncurrent >= (draft.keep ?? 0) && expires(replaced);
      if (old && matches(draft, marker ? null : size)) found(size);
      noncurrent += 1;
    } else if (["days", "date", "uploads"].includes(draft.action) && !marker && expires(since) && matches(draft, uploads ? null : size)) {
      found(size);
    }
    replaced = since;
  };
  const query = new URLSearchParams({ "encoding-type": "url", prefix: draft.prefix, [uploads ? "max-uploads" : "max-keys"]: "1000" });
  for (;;) {
    const text = query.toString().replaceAll("+", "%20");
    const page = await xml(`/${bucket}?${uploads ? "uploads" : "versions"}&${text}`, { signal });
    const entries = page.children.filter(({ name }) => ["Version", "DeleteMarker", "Upload"].includes(name));
    entries.forEach(look);
    due.looked += entries.length;
    const more = page.text("IsTruncated") === "true";
    if (!more || due.looked >= MOST) {
      if (lone && draft.action === "markers" && !more) found(0);
      return { ...due, more };
    }
    query.set("key-marker", decodeName(page.text("NextKeyMarker")));
    const [marker, next] = uploads ? ["upload-id-marker", "NextUploadIdMarker"] : ["version-id-marker", "NextVersionIdMarker"];
    query.set(marker!, page.text(next!));
  }
}

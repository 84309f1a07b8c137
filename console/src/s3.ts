// Operations of S3, as the pages need them.

import { encodeKey, request, xml } from "./api";

export interface Bucket {
  name: string;
  created: string;
}

export interface Entry {
  /** The whole key; of a folder, with the slash at its end. */
  key: string;
  folder: boolean;
  size: number;
  modified: string;
  etag: string;
}

export interface Page {
  entries: Entry[];
  /** The last name of the page if there are more; else empty. */
  next: string;
}

export const PAGE = 1000;

export async function listBuckets(): Promise<Bucket[]> {
  const found = await xml("/");
  const buckets = found.children.find((child) => child.name === "Buckets")?.all("Bucket") ?? [];
  return buckets.map((bucket) => ({ name: bucket.text("Name"), created: bucket.text("CreationDate") }));
}

export async function createBucket(name: string): Promise<void> {
  await request(`/${encodeURIComponent(name)}`, { method: "PUT" });
}

export async function deleteBucket(name: string): Promise<void> {
  await request(`/${encodeURIComponent(name)}`, { method: "DELETE" });
}

/** Keys are encoded in listings, because XML cannot carry every character of them. */
export function decodeName(text: string): string {
  return decodeURIComponent(text.replaceAll("+", " "));
}

export interface Listing {
  bucket: string;
  prefix: string;
  after: string;
  /** Whether what is below the next slash is one folder. */
  folders: boolean;
  signal?: AbortSignal;
}

export async function list(asked: Listing): Promise<Page> {
  const query = new URLSearchParams({
    "list-type": "2",
    "encoding-type": "url",
    "max-keys": String(PAGE),
    prefix: asked.prefix,
  });
  if (asked.folders) query.set("delimiter", "/");
  if (asked.after) query.set("start-after", asked.after);
  const text = query.toString().replaceAll("+", "%20"); // a signature knows no plus for a space
  const found = await xml(`/${asked.bucket}?${text}`, asked.signal ? { signal: asked.signal } : {});
  const entries = [
    ...found.all("CommonPrefixes").map((each) => folder(decodeName(each.text("Prefix")))),
    ...found.all("Contents").map((each) => ({
      key: decodeName(each.text("Key")),
      folder: false,
      size: each.number("Size"),
      modified: each.text("LastModified"),
      etag: each.text("ETag").replaceAll('"', ""),
    })),
  ].sort((left, right) => compareKeys(left.key, right.key));
  const last = entries[entries.length - 1];
  const more = found.text("IsTruncated") === "true" && last !== undefined;
  // A page after a folder begins behind everything in it.
  return { entries, next: more ? (last.folder ? `${last.key}\u{10ffff}` : last.key) : "" };
}

function folder(key: string): Entry {
  return { key, folder: true, size: 0, modified: "", etag: "" };
}

function compareKeys(left: string, right: string): number {
  return left < right ? -1 : left > right ? 1 : 0;
}

export interface ObjectHead {
  size: number;
  type: string;
  modified: string;
  etag: string;
  version: string;
  metadata: [string, string][];
}

export async function head(bucket: string, key: string): Promise<ObjectHead> {
  const { headers } = await request(`/${bucket}/${encodeKey(key)}`, { method: "HEAD" });
  const metadata: [string, string][] = [];
  headers.forEach((value, name) => {
    if (name.startsWith("x-amz-meta-")) metadata.push([name.slice("x-amz-meta-".length), value]);
  });
  return {
    size: Number(headers.get("content-length") ?? 0),
    type: headers.get("content-type") ?? "",
    modified: headers.get("last-modified") ?? "",
    etag: (headers.get("etag") ?? "").replaceAll('"', ""),
    version: headers.get("x-amz-version-id") ?? "",
    metadata,
  };
}

export interface Version {
  id: string;
  /** Whether it says that the object was deleted. */
  marker: boolean;
  latest: boolean;
  size: number;
  modified: string;
}

const VERSIONS = 200;

/** Returns the versions of an object, the latest first; at most 200. */
export async function listVersions(bucket: string, key: string): Promise<Version[]> {
  const query = `versions&encoding-type=url&max-keys=${VERSIONS}&prefix=${encodeURIComponent(key)}`;
  const found = await xml(`/${bucket}?${query}`);
  return found.children
    .filter((each) => ["Version", "DeleteMarker"].includes(each.name) && decodeName(each.text("Key")) === key)
    .map((each) => ({
      id: each.text("VersionId"),
      marker: each.name === "DeleteMarker",
      latest: each.text("IsLatest") === "true",
      size: each.number("Size"),
      modified: each.text("LastModified"),
    }));
}

export async function listTags(bucket: string, key: string): Promise<[string, string][]> {
  const found = await xml(`/${bucket}/${encodeKey(key)}?tagging`);
  const set = found.children.find((each) => each.name === "TagSet");
  return (set?.all("Tag") ?? []).map((tag) => [tag.text("Key"), tag.text("Value")]);
}

/** Returns the first bytes of an object, or these bytes of it. */
export async function read(bucket: string, key: string, start: number, end: number): Promise<ArrayBuffer> {
  const response = await request(`/${bucket}/${encodeKey(key)}`, {
    headers: { range: `bytes=${start}-${end - 1}` },
  });
  return response.arrayBuffer();
}

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, index) => {
  let value = index;
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
  return value;
});

/** Returns the CRC-32 of bytes in Base64, as `x-amz-checksum-crc32` has it. */
export function crc32(data: Uint8Array): string {
  let crc = 0xffffffff;
  for (const byte of data) crc = CRC_TABLE[(crc ^ byte) & 255]! ^ (crc >>> 8);
  crc = ~crc;
  return btoa(String.fromCharCode((crc >>> 24) & 255, (crc >>> 16) & 255, (crc >>> 8) & 255, crc & 255));
}

export function escapeXml(text: string): string {
  return text.replace(/[<>&"'\u0000-\u001f]/g, (char) => `&#${char.charCodeAt(0)};`);
}

export interface Failure {
  key: string;
  message: string;
}

/** Deletes at most 1,000 objects; returns those that could not be deleted. */
export async function deleteObjects(bucket: string, keys: string[]): Promise<Failure[]> {
  const objects = keys.map((key) => `<Object><Key>${escapeXml(key)}</Key></Object>`).join("");
  const body = new TextEncoder().encode(`<Delete><Quiet>true</Quiet>${objects}</Delete>`);
  const found = await xml(`/${bucket}?delete`, {
    method: "POST",
    headers: { "content-type": "application/xml", "x-amz-checksum-crc32": crc32(body) },
    body,
  });
  return found.all("Error").map((error) => ({ key: error.text("Key"), message: error.text("Message") }));
}

// The S3 operations that the pages use.

import { encodeKey, request, xml } from "./api";

export interface Bucket {
  name: string;
  created: string;
}

export interface Entry {
  /** The full key; that of a folder ends with a slash. */
  key: string;
  folder: boolean;
  size: number;
  modified: string;
  etag: string;
}

export interface Page {
  entries: Entry[];
  /** The key to continue after; empty at the end. */
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

/** Decodes a key of a listing. Keys are encoded there, because XML cannot represent every character. */
export function decodeName(text: string): string {
  return decodeURIComponent(text.replaceAll("+", " "));
}

export interface Listing {
  bucket: string;
  prefix: string;
  after: string;
  /** Whether keys are grouped into folders by the next slash. */
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
  const text = query.toString().replaceAll("+", "%20"); // a signature requires %20 for a space
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
  // After a folder, the next page starts after all keys in it.
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
  /** Whether it is a delete marker. */
  marker: boolean;
  latest: boolean;
  size: number;
  modified: string;
}

const VERSIONS = 200;

/** Returns at most 200 versions of an object, the latest first. */
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

/** Returns the bytes of an object from `start` to before `end`. */
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

/** Returns the CRC-32 in Base64, for `x-amz-checksum-crc32`. */
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

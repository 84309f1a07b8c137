// Uploads: in one request, or for larger files in parts, several at a time. A multipart upload can be resumed, even after
// the page was closed: the browser stores its ID, and the node has the parts.

import { apiHeaders, apiUrl, ApiError, encodeKey, readError, request, xml } from "./api";
import { escapeXml } from "./s3";

const PART = 8 << 20;
const MANY = 10_000;
const AT_ONCE = 3;
const ATTEMPTS = 6;
const FIRST_WAIT = 1000;

export interface Progress {
  sent: number;
  size: number;
  state: "waiting" | "running" | "retrying" | "done" | "failed";
  /** The error, as a sentence. */
  message: string;
  resumed: boolean;
}

type Report = (progress: Partial<Progress>) => void;

interface Part {
  number: number;
  etag: string;
}

export function partSize(size: number): number {
  return Math.max(PART, Math.ceil(size / MANY / PART) * PART);
}

function note(bucket: string, key: string, file: File): string {
  return `upload\n${bucket}\n${key}\n${file.size}\n${file.lastModified}`;
}

/** Uploads a file and reports its progress. Throws ApiError, and DOMException AbortError. */
export async function upload(
  bucket: string,
  key: string,
  file: File,
  signal: AbortSignal,
  report: Report,
): Promise<void> {
  const target = `/${bucket}/${encodeKey(key)}`;
  const type = file.type || "application/octet-stream";
  report({ state: "running" });
  if (file.size <= 2 * PART) {
    await again(signal, report, () =>
      send("PUT", target, file, { "content-type": type }, signal, (sent) => report({ sent })),
    );
    return;
  }
  await uploadParts(bucket, key, file, type, signal, report);
}

async function uploadParts(
  bucket: string,
  key: string,
  file: File,
  type: string,
  signal: AbortSignal,
  report: Report,
): Promise<void> {
  const target = `/${bucket}/${encodeKey(key)}`;
  const place = note(bucket, key, file);
  const size = partSize(file.size);
  const done = new Map<number, Part>();
  let id = localStorage.getItem(place) ?? "";
  if (id) {
    try {
      for (const part of await listParts(target, id)) done.set(part.number, part);
      report({ resumed: done.size > 0 });
    } catch (error) {
      if (!(error instanceof ApiError) || error.code !== "NoSuchUpload") throw error;
      id = "";
    }
  }
  if (!id) {
    const begun = await xml(`${target}?uploads`, { method: "POST", headers: { "content-type": type }, signal });
    id = begun.text("UploadId");
    localStorage.setItem(place, id);
  }
  const count = Math.ceil(file.size / size);
  const running = new Map<number, number>();
  const length = (number: number): number => Math.min(size, file.size - (number - 1) * size);
  const tell = (): void => {
    let sent = 0;
    for (const number of done.keys()) sent += length(number);
    for (const bytes of running.values()) sent += bytes;
    report({ sent });
  };
  tell();
  const missing = Array.from({ length: count }, (_, index) => index + 1).filter((number) => !done.has(number));
  await Promise.all(
    Array.from({ length: AT_ONCE }, async () => {
      for (let number = missing.shift(); number !== undefined; number = missing.shift()) {
        const current = number;
        const start = (current - 1) * size;
        const etag = await again(signal, report, () =>
          send(
            "PUT",
            `${target}?partNumber=${current}&uploadId=${encodeURIComponent(id)}`,
            file.slice(start, start + size),
            {},
            signal,
            (bytes) => {
              running.set(current, bytes);
              tell();
            },
          ),
        );
        running.delete(current);
        done.set(current, { number: current, etag });
        tell();
      }
    }),
  );
  const parts = [...done.values()].sort((left, right) => left.number - right.number);
  const listed = parts
    .map(({ number, etag }) => `<Part><PartNumber>${number}</PartNumber><ETag>${escapeXml(etag)}</ETag></Part>`)
    .join("");
  const finished = await again(signal, report, () =>
    xml(`${target}?uploadId=${encodeURIComponent(id)}`, {
      method: "POST",
      headers: { "content-type": "application/xml" },
      body: `<CompleteMultipartUpload>${listed}</CompleteMultipartUpload>`,
    }),
  );
  // S3 may report an error after it has sent status 200.
  if (finished.name === "Error") throw new ApiError(500, finished.text("Code"), finished.text("Message"));
  localStorage.removeItem(place);
}

async function listParts(target: string, id: string): Promise<Part[]> {
  const parts: Part[] = [];
  for (let after = "0"; ; ) {
    const query = `uploadId=${encodeURIComponent(id)}&part-number-marker=${after}`;
    const found = await xml(`${target}?${query}`);
    parts.push(...found.all("Part").map((part) => ({ number: part.number("PartNumber"), etag: part.text("ETag") })));
    if (found.text("IsTruncated") !== "true") return parts;
    after = found.text("NextPartNumberMarker");
  }
}

/** Aborts an interrupted upload, so that its parts take no space. */
export async function abandon(bucket: string, key: string, file: File): Promise<void> {
  const place = note(bucket, key, file);
  const id = localStorage.getItem(place);
  if (!id) return;
  localStorage.removeItem(place);
  await request(`/${bucket}/${encodeKey(key)}?uploadId=${encodeURIComponent(id)}`, { method: "DELETE" });
}

/** Retries after errors that may be temporary. */
async function again<T>(signal: AbortSignal, report: Report, work: () => Promise<T>): Promise<T> {
  for (let attempt = 1; ; attempt += 1) {
    try {
      const result = await work();
      if (attempt > 1) report({ state: "running", message: "" });
      return result;
    } catch (error) {
      const passing = error instanceof ApiError && (error.status === 0 || error.status >= 500);
      if (!passing || attempt === ATTEMPTS || signal.aborted) throw error;
      report({ state: "retrying", message: error.sentence });
      await new Promise((resolve) => setTimeout(resolve, FIRST_WAIT * 2 ** (attempt - 1)));
    }
  }
}

/** Sends a body with progress reports, which fetch does not have; returns the ETag. */
function send(
  method: string,
  target: string,
  body: Blob,
  headers: Record<string, string>,
  signal: AbortSignal,
  progress: (sent: number) => void,
): Promise<string> {
  return new Promise((resolve, reject) => {
    const sending = new XMLHttpRequest();
    const stop = (): void => sending.abort();
    const end = (): void => signal.removeEventListener("abort", stop);
    sending.open(method, apiUrl(target));
    for (const [name, value] of Object.entries({ ...headers, ...apiHeaders() })) sending.setRequestHeader(name, value);
    sending.upload.onprogress = (event) => progress(event.loaded);
    sending.onload = () => {
      end();
      if (sending.status < 300) resolve(sending.getResponseHeader("etag") ?? "");
      else reject(readError(sending.status, sending.responseText));
    };
    sending.onerror = () => {
      end();
      reject(new ApiError(0, "Unreachable", "the node does not respond; check the network, then continue the upload"));
    };
    sending.onabort = () => {
      end();
      reject(new DOMException("stopped", "AbortError"));
    };
    signal.addEventListener("abort", stop);
    sending.send(body);
  });
}

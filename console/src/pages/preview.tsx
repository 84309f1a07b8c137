// Preview of an object: images, audio, arrays, tables, archives, text and JSON. The bytes of the object determine the kind,
// not its content type. Markup is shown as text: the browser never opens an object as a document.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { downloadUrl, encodeKey, json } from "../api";
import { bytes, count, counted, shownName, time } from "../format";
import { picture, wave } from "../frame";
import { isArchive, isTable, pictureType, soundType } from "../magic";
import { isNpy, parseNpy, type Npy } from "../npy";
import { Picture, Wave } from "../tensors";
import { arrayOf, readChunk } from "../zarr";
import { Dialog, Loading, Problem, sentenceOf, Table, useLoaded } from "../parts";
import type { TablePreview as TablePreviewed } from "../schema";
import { numbers } from "./row";
import { head, listTags, listVersions, read, type Entry, type ObjectHead } from "../s3";

const MEDIA_LIMIT = 32 << 20;
const ARRAY_LIMIT = 4 << 20;
const MEMBERS = 200;
const TEXT_LIMIT = 128 << 10;
const HEX_LIMIT = 256;

type Content =
  | { kind: "picture" | "sound"; blob: Blob }
  | { kind: "array"; array: Npy }
  | { kind: "table"; table: TablePreviewed }
  | { kind: "archive"; members: Members }
  | { kind: "text"; text: string; cut: boolean }
  | { kind: "bytes"; hex: string; why?: unknown }
  | { kind: "note"; text: string };

interface Members {
  kind: string;
  count: number;
  members: { name: string; size: number }[];
}

async function load(bucket: string, entry: Entry): Promise<{ head: ObjectHead; content: Content }> {
  const told = await head(bucket, entry.key);
  if (!told.size) return { head: told, content: { kind: "note", text: "The object is empty." } };
  const first = new Uint8Array(await read(bucket, entry.key, 0, Math.min(told.size, TEXT_LIMIT)));
  return { head: told, content: await contentOf(bucket, entry.key, told.size, first) };
}

async function contentOf(bucket: string, key: string, size: number, first: Uint8Array<ArrayBuffer>): Promise<Content> {
  const upTo = async (most: number): Promise<ArrayBuffer> =>
    Math.min(size, most) <= first.length ? first.buffer : read(bucket, key, 0, Math.min(size, most));
  const chunk = await chunkOf(bucket, key, size);
  if (chunk) return chunk;
  const picture = pictureType(first);
  const type = picture || soundType(first);
  if (type) {
    if (size > MEDIA_LIMIT) {
      return { kind: "note", text: `The ${picture ? "image" : "audio file"} is larger than ${bytes(MEDIA_LIMIT)}: download it to open it.` };
    }
    return { kind: picture ? "picture" : "sound", blob: new Blob([await upTo(MEDIA_LIMIT)], { type }) };
  }
  if (isNpy(first)) return { kind: "array", array: parseNpy(new Uint8Array(await upTo(ARRAY_LIMIT))) };
  try {
    if (isTable(first)) {
      const query = `bucket=${encodeURIComponent(bucket)}&key=${encodeURIComponent(key)}`;
      return { kind: "table", table: await json<TablePreviewed>(`/-/preview?${query}`) };
    }
    if (isArchive(first)) {
      const target = `/${bucket}/${encodeKey(key)}?members&max-keys=${MEMBERS}`;
      return { kind: "archive", members: await json<Members>(target) };
    }
  } catch (why) {
    return { kind: "bytes", hex: hexOf(first.subarray(0, HEX_LIMIT)), why };
  }
  return textOf(first, size > first.length);
}

/** Lets the node decode a chunk of a Zarr array; null if the object is not a chunk. */
async function chunkOf(bucket: string, key: string, size: number): Promise<Content | null> {
  const array = await arrayOf(bucket, key);
  if (array === null) return null;
  return readChunk(bucket, array, key, size).then(
    (found): Content => ({ kind: "array", array: found }),
    (why: unknown): Content => ({ kind: "note", text: `This chunk of ${array.place} cannot be shown: ${sentenceOf(why)}` }),
  );
}

export function textOf(data: Uint8Array, cut: boolean): Content {
  // A character may be cut at the end of what was read.
  const text = new TextDecoder("utf-8").decode(data);
  const strange = (text.match(/[\0-\x08\x0e-\x1f\ufffd]/g) ?? []).length;
  if (strange > 1 + text.length / 200) return { kind: "bytes", hex: hexOf(data.subarray(0, HEX_LIMIT)) };
  if (!cut && /^\s*[[{]/.test(text)) {
    try {
      return { kind: "text", text: JSON.stringify(JSON.parse(text), null, 2), cut };
    } catch {
      // Not JSON after all.
    }
  }
  return { kind: "text", text, cut };
}

function hexOf(data: Uint8Array): string {
  const lines: string[] = [];
  for (let start = 0; start < data.length; start += 16) {
    const part = [...data.subarray(start, start + 16)];
    const hex = part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const text = part.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${start.toString(16).padStart(6, "0")}  ${hex.padEnd(48)} ${text}`);
  }
  return lines.join("\n");
}

export function PreviewDialog({ bucket, entry, onClose }: {
  bucket: string;
  entry: Entry;
  onClose(): void;
}): JSX.Element {
  const { value, error } = useLoaded(() => load(bucket, entry), [bucket, entry.key]);
  let link = "";
  try {
    link = downloadUrl(bucket, entry.key);
  } catch {
    // The request of the object shows the error.
  }
  return (
    <Dialog title={shownName(entry.key)} onClose={onClose} wide>
      <Problem error={error} />
      {!value && !error && <Loading />}
      {value && <Preview content={value.content} bucket={bucket} name={entry.key} />}
      {value && <Facts head={value.head} />}
      {value && <More bucket={bucket} name={entry.key} />}
      <div class="buttons">
        {link && (
          <a class="button primary" href={link} download={entry.key.split("/").pop() ?? ""}>
            Download
          </a>
        )}
      </div>
    </Dialog>
  );
}

function Preview({ content, bucket, name }: { content: Content; bucket: string; name: string }): JSX.Element {
  switch (content.kind) {
    case "sound":
      return <SoundPreview blob={content.blob} name={name} />;
    case "array":
      return <ArrayPreview array={content.array} name={name} />;
    case "table":
      return <TablePreview table={content.table} name={name} />;
    case "archive":
      return <ArchivePreview found={content.members} bucket={bucket} name={name} />;
    case "picture":
      return <PicturePreview blob={content.blob} name={name} />;
    case "text":
      return (
        <>
          <pre class="preview" tabIndex={0} aria-label={`Content of ${name}`}>
            {content.text}
          </pre>
          {content.cut && <p class="quiet">The first {bytes(TEXT_LIMIT)} are shown.</p>}
        </>
      );
    case "bytes":
      return (
        <>
          <Problem error={content.why} />
          <pre class="preview hex" tabIndex={0} aria-label={`First bytes of ${name}`}>
            {content.hex}
          </pre>
        </>
      );
    default:
      return <p class="quiet">{content.text}</p>;
  }
}

function useBlob(blob: Blob): string {
  const [url, setUrl] = useState("");
  useEffect(() => {
    const made = URL.createObjectURL(blob);
    setUrl(made);
    return () => URL.revokeObjectURL(made);
  }, [blob]);
  return url;
}

function PicturePreview({ blob, name }: { blob: Blob; name: string }): JSX.Element {
  const url = useBlob(blob);
  const [extent, setExtent] = useState("");
  return (
    <figure class="preview picture">
      {url && (
        <img
          src={url}
          alt={name}
          onLoad={(event) => setExtent(`${event.currentTarget.naturalWidth} × ${event.currentTarget.naturalHeight}`)}
          onError={() => setExtent("The browser cannot decode this image.")}
        />
      )}
      <figcaption class="quiet">
        {blob.type.slice("image/".length).toUpperCase()} {extent}
      </figcaption>
    </figure>
  );
}

function SoundPreview({ blob, name }: { blob: Blob; name: string }): JSX.Element {
  const url = useBlob(blob);
  const [note, setNote] = useState("");
  return (
    <figure class="preview">
      {url && (
        <audio
          controls
          src={url}
          aria-label={name}
          onLoadedMetadata={(event) => setNote(`${event.currentTarget.duration.toFixed(1)} s`)}
          onError={() => setNote("The browser cannot play this audio.")}
        />
      )}
      <figcaption class="quiet">
        {blob.type.slice("audio/".length).toUpperCase()} {note}
      </figcaption>
    </figure>
  );
}

export function ArrayPreview({ array, name }: { array: Npy; name: string }): JSX.Element {
  const { dtype, shape, first, note } = array;
  const shown = first && picture(first);
  return (
    <figure class="preview">
      {first && shown && <Picture tensor={first} name={name} large />}
      {first && !shown && wave(first, 1) && <Wave tensor={first} name={name} />}
      {first && !shown && !wave(first, 1) && <p class="numbers">{numbers(first, 256)}</p>}
      <figcaption class="quiet">
        {`${dtype}[${shape.join("×")}]. ${note} ${shown?.scaling ?? ""}`}
      </figcaption>
    </figure>
  );
}

function TablePreview({ table, name }: { table: TablePreviewed; name: string }): JSX.Element {
  return (
    <>
      <div class="preview sheet" tabIndex={0} role="region" aria-label={`First rows of ${name}`}>
        <table class="list">
          <thead>
            <tr>
              {table.columns.map(([column, type]) => (
                <th key={column} scope="col">
                  {column} <code>{type}</code>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {table.rows.map((row, index) => (
              <tr key={index}>
                {row.map((cell, at) => (
                  <td key={at}>{cell ?? <span class="quiet">null</span>}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="quiet">
        The first {counted(table.rows.length, "row")}
        {table.hidden > 0 && `; ${counted(table.hidden, "more column is", "more columns are")} not shown`}.
      </p>
    </>
  );
}

function ArchivePreview({ found, bucket, name }: { found: Members; bucket: string; name: string }): JSX.Element {
  return (
    <>
      <div class="preview sheet" tabIndex={0} role="region" aria-label={`Files in ${name}`}>
        <Table head={["File", "#Size"]}>
          {found.members.map((member) => (
            <tr key={member.name}>
              <td>
                <Member bucket={bucket} archive={name} name={member.name} />
              </td>
              <td class="number">{bytes(member.size)}</td>
            </tr>
          ))}
        </Table>
      </div>
      <p class="quiet">
        {found.kind}: {counted(found.count, "file")}
        {found.count > found.members.length && `; the first ${count(found.members.length)} are shown`}.
      </p>
    </>
  );
}

function Member({ bucket, archive, name }: { bucket: string; archive: string; name: string }): JSX.Element {
  try {
    const link = downloadUrl(bucket, `${archive}/-/${name}`);
    return (
      <a href={link} download={name.split("/").pop() ?? ""}>
        {name}
      </a>
    );
  } catch {
    return <>{name}</>; // a browser cannot request "." and ".."
  }
}

function Facts({ head: told }: { head: ObjectHead }): JSX.Element {
  return (
    <dl class="facts">
      <Fact name="Size" value={`${bytes(told.size)} (${told.size.toLocaleString("en")} bytes)`} />
      <Fact name="Type" value={told.type} />
      <Fact name="Modified" value={time(told.modified)} />
      <Fact name="ETag" value={told.etag} />
      {told.version && <Fact name="Version" value={told.version} />}
      {told.metadata.map(([name, value]) => (
        <Fact key={name} name={`Metadata: ${name}`} value={value} />
      ))}
    </dl>
  );
}

/** Tags and versions, loaded when they are opened. */
function More({ bucket, name }: { bucket: string; name: string }): JSX.Element {
  const [open, setOpen] = useState(false);
  return (
    <details class="more" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Tags and versions</summary>
      {open && <TagsAndVersions bucket={bucket} name={name} />}
    </details>
  );
}

function TagsAndVersions({ bucket, name }: { bucket: string; name: string }): JSX.Element {
  const tags = useLoaded(() => listTags(bucket, name), [bucket, name]);
  const versions = useLoaded(() => listVersions(bucket, name), [bucket, name]);
  return (
    <>
      <Problem error={tags.error} />
      {tags.value?.length === 0 && <p class="quiet">The object has no tags.</p>}
      <p>
        {tags.value?.map(([tag, value]) => (
          <span class="tag" key={tag}>
            {tag}: {value}
          </span>
        ))}
      </p>
      <Problem error={versions.error} />
      {versions.value && (
        <Table head={["Version", "Modified", "#Size", ""]}>
          {versions.value.map((version) => (
            <tr key={version.id}>
              <td>
                <span class="hash">{version.id}</span>{" "}
                {version.latest && <span class="tag good">latest</span>}
                {version.marker && <span class="tag warn">delete marker</span>}
              </td>
              <td class="quiet">{time(version.modified)}</td>
              <td class="number">{version.marker ? "" : bytes(version.size)}</td>
              <td class="actions">
                {!version.marker && (
                  <a
                    href={downloadUrl(bucket, name, version.id)}
                    download={name.split("/").pop() ?? ""}
                    aria-label={`Download version ${version.id}`}
                  >
                    Download
                  </a>
                )}
              </td>
            </tr>
          ))}
        </Table>
      )}
    </>
  );
}

function Fact({ name, value }: { name: string; value: string }): JSX.Element {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

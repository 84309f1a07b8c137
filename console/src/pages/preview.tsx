// Preview of an object: pictures, text and JSON. What it is follows from its bytes, never from the type that
// somebody gave it, and markup is shown as text: no object is ever a document of the browser.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { downloadUrl } from "../api";
import { bytes, time } from "../format";
import { pictureType } from "../magic";
import { Dialog, Loading, Problem, useLoaded } from "../parts";
import { head, listTags, listVersions, read, type Entry, type ObjectHead } from "../s3";

const PICTURE_LIMIT = 32 << 20;
const TEXT_LIMIT = 128 << 10;
const HEX_LIMIT = 256;

type Content =
  | { kind: "picture"; blob: Blob }
  | { kind: "text"; text: string; cut: boolean }
  | { kind: "bytes"; hex: string }
  | { kind: "note"; text: string };

async function load(bucket: string, entry: Entry): Promise<{ head: ObjectHead; content: Content }> {
  const told = await head(bucket, entry.key);
  if (!told.size) return { head: told, content: { kind: "note", text: "The object is empty." } };
  const first = new Uint8Array(await read(bucket, entry.key, 0, Math.min(told.size, TEXT_LIMIT)));
  const type = pictureType(first);
  if (type) {
    if (told.size > PICTURE_LIMIT) {
      return { head: told, content: { kind: "note", text: "The picture is too large to be shown; download it." } };
    }
    const whole = told.size <= first.length ? first.buffer : await read(bucket, entry.key, 0, told.size);
    return { head: told, content: { kind: "picture", blob: new Blob([whole], { type }) } };
  }
  return { head: told, content: textOf(first, told.size > first.length) };
}

function textOf(data: Uint8Array, cut: boolean): Content {
  // A character may be cut at the end of what was read.
  const text = new TextDecoder("utf-8").decode(data);
  const strange = (text.match(/[\0-\x08\x0e-\x1f\ufffd]/g) ?? []).length;
  if (strange > 1 + text.length / 200) return { kind: "bytes", hex: hexOf(data.subarray(0, HEX_LIMIT)) };
  if (!cut && /^\s*[[{]/.test(text)) {
    try {
      return { kind: "text", text: JSON.stringify(JSON.parse(text), null, 2), cut };
    } catch {
      // It only begins like JSON.
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
    // The request of the object has told why.
  }
  return (
    <Dialog title={entry.key} onClose={onClose} wide>
      <Problem error={error} />
      {!value && !error && <Loading />}
      {value && <Preview content={value.content} name={entry.key} />}
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

function Preview({ content, name }: { content: Content; name: string }): JSX.Element {
  switch (content.kind) {
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
        <pre class="preview hex" tabIndex={0} aria-label={`First bytes of ${name}`}>
          {content.hex}
        </pre>
      );
    default:
      return <p class="quiet">{content.text}</p>;
  }
}

function PicturePreview({ blob, name }: { blob: Blob; name: string }): JSX.Element {
  const [url, setUrl] = useState("");
  const [extent, setExtent] = useState("");
  useEffect(() => {
    const made = URL.createObjectURL(blob);
    setUrl(made);
    return () => URL.revokeObjectURL(made);
  }, [blob]);
  return (
    <figure class="preview picture">
      {url && (
        <img
          src={url}
          alt={name}
          onLoad={(event) => setExtent(`${event.currentTarget.naturalWidth} × ${event.currentTarget.naturalHeight}`)}
          onError={() => setExtent("The browser cannot decode this picture.")}
        />
      )}
      <figcaption class="quiet">
        {blob.type.slice("image/".length).toUpperCase()} {extent}
      </figcaption>
    </figure>
  );
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

/** Tags and versions, requested when somebody wants them. */
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
      {tags.value?.length === 0 && <p class="quiet">No tags.</p>}
      <p>
        {tags.value?.map(([tag, value]) => (
          <span class="tag" key={tag}>
            {tag}: {value}
          </span>
        ))}
      </p>
      <Problem error={versions.error} />
      {versions.value && (
        <table class="list">
          <thead>
            <tr>
              <th scope="col">Version</th>
              <th scope="col">Modified</th>
              <th scope="col" class="number">
                Size
              </th>
              <th scope="col">
                <span class="hidden">Actions</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {versions.value.map((version) => (
              <tr key={version.id}>
                <td>
                  <span class="hash">{version.id}</span>{" "}
                  {version.latest && <span class="tag good">latest</span>}
                  {version.marker && <span class="tag warn">deleted</span>}
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
          </tbody>
        </table>
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

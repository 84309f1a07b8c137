// One batch: its rows as pictures, text or numbers, with the objects that they were made of.

import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { loadFrame, loadSources, type Address, type Loaded, type RowSource, type Sources } from "../address";
import { picture, range, text, type Field, type Tensor } from "../frame";
import { bytes, count, scalar } from "../format";
import { pictureType } from "../magic";
import { Dialog, Loading, Problem } from "../parts";
import { read } from "../s3";

const SHOWN = 128;
const STATUS = ["", "replaced", "masked", "padding", "failed"];

interface Shown {
  loaded: Loaded;
  sources: Sources | null;
  trouble: unknown;
}

export function BatchView({ address, onSteps }: { address: Address; onSteps(steps: number): void }): JSX.Element {
  const [shown, setShown] = useState<Shown | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [opened, setOpened] = useState<number | null>(null);
  const [all, setAll] = useState(false);
  const key = JSON.stringify(address);
  useEffect(() => {
    const abort = new AbortController();
    setError(null);
    setAll(false);
    const sources = loadSources(address, abort.signal).then(
      (found) => ({ found, trouble: null as unknown }),
      (trouble: unknown) => ({ found: null, trouble }),
    );
    loadFrame(address, abort.signal)
      .then(async (loaded) => {
        const { found, trouble } = await sources;
        if (abort.signal.aborted) return;
        setShown({ loaded, sources: found, trouble });
        if (found) onSteps(found.steps);
      })
      .catch((why: unknown) => {
        if (abort.signal.aborted) return;
        setShown(null);
        setError(why);
      });
    return () => abort.abort();
  }, [key]);
  if (error) return <Problem error={error} />;
  if (!shown) return <Loading />;
  const { frame, result, took } = shown.loaded;
  const stale = JSON.stringify(shown.loaded.address) !== key;
  const rows = Math.min(frame.rows, all ? frame.rows : SHOWN);
  return (
    <div class={stale ? "stale" : ""} data-batch={stale ? undefined : key}>
      <p class="quiet" role="status">
        {batchNote(frame.rows, frame.bytes, result, took)}
      </p>
      <p class="fields">
        {frame.fields.map((field) => (
          <span class="tag" key={field.name}>
            {field.name} <code>{typeOf(field)}</code>
          </span>
        ))}
      </p>
      {shown.trouble !== null && <Problem error={shown.trouble} />}
      <ol class="rows" start={0}>
        {Array.from({ length: rows }, (_, index) => (
          <Row
            key={index}
            index={index}
            fields={frame.fields}
            status={frame.status[index] ?? 0}
            source={shown.sources?.rows[index]}
            onOpen={() => setOpened(index)}
          />
        ))}
      </ol>
      {rows < frame.rows && (
        <button type="button" onClick={() => setAll(true)}>
          Show all {count(frame.rows)} rows
        </button>
      )}
      {opened !== null && opened < frame.rows && (
        <RowDialog
          index={opened}
          fields={frame.fields}
          position={frame.positions[opened]}
          source={shown.sources?.rows[opened]}
          onClose={() => setOpened(null)}
        />
      )}
    </div>
  );
}

function batchNote(rows: number, size: number, result: string, took: number): string {
  const how: Record<string, string> = { hit: "was ready", joined: "was being made for another reader", miss: "was made now" };
  return `${count(rows)} rows, ${bytes(size)}; the frame ${how[result] ?? "arrived"}, ${Math.round(took)} ms to here`;
}

function typeOf(field: Field): string {
  return typeName(field.dtype, field.rowShape);
}

function typeName(dtype: string, shape: number[] | null): string {
  const extents = shape === null ? "[…]" : shape.length ? `[${shape.join("×")}]` : "";
  return dtype.toLowerCase() + extents;
}

function Row({ index, fields, status, source, onOpen }: {
  index: number;
  fields: Field[];
  status: number;
  source: RowSource | undefined;
  onOpen(): void;
}): JSX.Element {
  const note = STATUS[status] ?? "";
  const title = source?.name ?? `Row ${index}`;
  return (
    <li class="row">
      <button type="button" class="row-button" onClick={onOpen}>
        <span class="hidden">Row {index}</span>
        {fields.map((field) => (
          <FieldView key={field.name} field={field} index={index} source={source} />
        ))}
      </button>
      <span class="row-name" title={title}>
        {title}
      </span>
      {note && <span class="tag warn">{note}</span>}
    </li>
  );
}

function FieldView({ field, index, source }: {
  field: Field;
  index: number;
  source: RowSource | undefined;
}): JSX.Element {
  const tensor = field.row(index);
  if (picture(tensor)) return <Picture tensor={tensor} name={`${field.name} of row ${index}`} />;
  const label = source?.labels[field.name];
  const words = text(tensor);
  return (
    <span class="value">
      <span class="quiet">{field.name}</span> {label?.class || (words ?? numbers(tensor, 8))}
    </span>
  );
}

function numbers(tensor: Tensor, most: number): string {
  const shown = Array.from({ length: Math.min(most, tensor.data.length) }, (_, index) => scalar(tensor.data[index]!));
  return shown.join(", ") + (tensor.data.length > most ? ` … (${count(tensor.data.length)})` : "");
}

function Picture({ tensor, name, large }: { tensor: Tensor; name: string; large?: boolean }): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const found = picture(tensor)!;
  // Before the browser paints: a picture never stands above the name of another row.
  useLayoutEffect(() => {
    const context = canvas.current?.getContext("2d");
    context?.putImageData(new ImageData(found.pixels, found.width, found.height), 0, 0);
  });
  return (
    <canvas
      ref={canvas}
      width={found.width}
      height={found.height}
      class={large ? "large" : ""}
      role="img"
      aria-label={`${name}, ${found.width} by ${found.height} pixels`}
    />
  );
}

function RowDialog({ index, fields, position, source, onClose }: {
  index: number;
  fields: Field[];
  position: number | undefined;
  source: RowSource | undefined;
  onClose(): void;
}): JSX.Element {
  return (
    <Dialog title={source?.name ?? `Row ${index}`} onClose={onClose} wide>
      <p class="quiet">
        Row {index} of this rank
        {position !== undefined && `, position ${count(position)} of the epoch`}
        {source && `, sample ${count(source.sample)} of the dataset`}
      </p>
      {fields.map((field) => (
        <FieldDetail key={field.name} field={field} index={index} source={source} />
      ))}
    </Dialog>
  );
}

function FieldDetail({ field, index, source }: {
  field: Field;
  index: number;
  source: RowSource | undefined;
}): JSX.Element {
  const tensor = field.row(index);
  const shown = picture(tensor);
  const { min, max, mean } = range(tensor.data);
  const label = source?.labels[field.name];
  const place = source?.sources[field.name];
  const words = text(tensor);
  return (
    <section class="field">
      <h3>
        {field.name} <code>{typeName(tensor.dtype, tensor.shape)}</code>
      </h3>
      <div class="pair">
        {shown && (
          <figure>
            <Picture tensor={tensor} name={field.name} large />
            <figcaption>What the rank gets{shown.scaling && ` (${shown.scaling})`}</figcaption>
          </figure>
        )}
        {shown && place && <SourcePicture bucket={place.bucket} name={place.key} offset={place.offset} length={place.length} />}
      </div>
      {!shown && (words !== null ? <pre class="preview">{words}</pre> : <p class="numbers">{numbers(tensor, 256)}</p>)}
      {label?.class && <p>Class: {label.class}</p>}
      {tensor.data.length > 1 && (
        <p class="quiet">
          {scalar(min)} … {scalar(max)}, mean {scalar(mean)}
        </p>
      )}
      {place && (
        <p>
          Made of{" "}
          <a href={`#/buckets/${encodeURIComponent(place.bucket)}?prefix=${encodeURIComponent(place.key)}`}>
            s3://{place.bucket}/{place.key}
          </a>{" "}
          <span class="quiet">
            {place.length === place.size
              ? bytes(place.length)
              : `bytes ${place.offset.toLocaleString("en")} to ${(place.offset + place.length).toLocaleString("en")}`}
          </span>
        </p>
      )}
    </section>
  );
}

const PICTURE_LIMIT = 32 << 20;

function SourcePicture({ bucket, name, offset, length }: {
  bucket: string;
  name: string;
  offset: number;
  length: number;
}): JSX.Element | null {
  const [url, setUrl] = useState("");
  const [extent, setExtent] = useState("");
  useEffect(() => {
    let made = "";
    let gone = false;
    if (length > PICTURE_LIMIT) return;
    read(bucket, name, offset, offset + length).then(
      (data) => {
        const type = pictureType(new Uint8Array(data));
        if (!type || gone) return;
        made = URL.createObjectURL(new Blob([data], { type }));
        setUrl(made);
      },
      () => {},
    );
    return () => {
      gone = true;
      URL.revokeObjectURL(made);
    };
  }, [bucket, name, offset, length]);
  if (!url) return null;
  return (
    <figure>
      <img
        src={url}
        alt={`Source ${name}`}
        onLoad={(event) => setExtent(`${event.currentTarget.naturalWidth} × ${event.currentTarget.naturalHeight}`)}
      />
      <figcaption>The source, {extent}</figcaption>
    </figure>
  );
}

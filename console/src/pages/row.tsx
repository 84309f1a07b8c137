// One row of a batch: each field as the rank receives it, its source, and the random values that the ops drew.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { loadDraws, type Address } from "../address";
import { picture, range, text, wave, type Field, type Tensor } from "../frame";
import { bytes, count, scalar } from "../format";
import { pictureType } from "../magic";
import { Dialog, Problem, useLoaded } from "../parts";
import { read } from "../s3";
import type { DrawnOp, Draws, Movement, RowSource, ShownPart } from "../schema";
import { Picture, Wave } from "../tensors";

export function typeName(dtype: string, shape: number[] | null): string {
  const extents = shape === null ? "[…]" : shape.length ? `[${shape.join("×")}]` : "";
  return dtype.toLowerCase() + extents;
}

export function numbers(tensor: Tensor, most: number): string {
  const shown = Array.from({ length: Math.min(most, tensor.data.length) }, (_, index) => scalar(tensor.data[index]!));
  return shown.join(", ") + (tensor.data.length > most ? ` … (${count(tensor.data.length)})` : "");
}

export function RowDialog({ address, index, fields, replaced, position, source, onClose }: {
  address: Address;
  index: number;
  fields: Field[];
  /** Whether another sample replaces a bad one. */
  replaced: boolean;
  position: number | undefined;
  source: RowSource | undefined;
  onClose(): void;
}): JSX.Element {
  const known = source !== undefined && !replaced;
  const draws = useLoaded(
    (signal) => (known ? loadDraws(address, index, signal) : Promise.resolve(null)),
    [JSON.stringify(address), index, known],
  );
  return (
    <Dialog title={source?.name ?? `Row ${index}`} onClose={onClose} wide>
      <p class="quiet">
        Row {index} of this rank
        {position !== undefined && `, position ${count(position)} of the epoch`}
        {source && `, sample ${count(source.sample)} of the dataset`}
      </p>
      {replaced && <p>This sample is bad: the row shows the sample that replaces it.</p>}
      <Problem error={draws.error} />
      {fields.map((field) => (
        <FieldDetail key={field.name} field={field} index={index} source={source} draws={draws.value ?? null} />
      ))}
    </Dialog>
  );
}

function FieldDetail({ field, index, source, draws }: {
  field: Field;
  index: number;
  source: RowSource | undefined;
  draws: Draws | null;
}): JSX.Element {
  const tensor = field.row(index);
  const shown = picture(tensor);
  const { min, max, mean } = range(tensor.data);
  const label = source?.labels[field.name];
  const place = source?.sources[field.name];
  const words = text(tensor);
  const image = draws?.images[field.name];
  const ops = draws?.ops.filter((op) => op.field === field.name) ?? [];
  const series = !shown && wave(tensor, 1) !== null;
  return (
    <section class="field">
      <h3>
        {field.name} <code>{typeName(tensor.dtype, tensor.shape)}</code>
      </h3>
      <div class="pair">
        {shown && (
          <figure>
            <Picture tensor={tensor} name={field.name} large />
            <figcaption>What the rank receives{shown.scaling && ` (${shown.scaling})`}</figcaption>
          </figure>
        )}
        {shown && place && (
          <SourcePicture bucket={place.bucket} name={place.key} offset={place.offset} length={place.length} image={image} />
        )}
      </div>
      {series && <Wave tensor={tensor} name={field.name} />}
      {!shown && !series && (words !== null ? <pre class="preview">{words}</pre> : <p class="numbers">{numbers(tensor, 256)}</p>)}
      {ops.length > 0 && (
        <ol class="ops" aria-label={`What the ops drew for ${field.name}`}>
          {ops.map((op) => (
            <li key={op.index}>
              <strong>{op.op}</strong> {wordsOf(op)}
            </li>
          ))}
        </ol>
      )}
      {label?.class && <p>Class: {label.class}</p>}
      {tensor.data.length > 1 && (
        <p class="quiet">
          Minimum {scalar(min)}, maximum {scalar(max)}, mean {scalar(mean)}
        </p>
      )}
      {place && (
        <p>
          Source:{" "}
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

type Corner = [number, number];

function wordsOf({ moved, drawn, note }: DrawnOp): string {
  const parts = [
    moved === null ? "not applied" : moved ? motionOf(moved) : "",
    Object.entries(drawn ?? {})
      .map(([name, value]) => `${name} ${typeof value === "number" ? value.toFixed(3) : [value].flat().join(", ")}`)
      .join(", "),
    note ? `(${note})` : "",
  ];
  return parts.filter(Boolean).join(" ");
}

function motionOf({ corners, height, width, mirrored, degrees }: Movement): string {
  const [first, second, , last] = corners as [Corner, Corner, Corner, Corner];
  if (mirrored) {
    if (second[1] !== first[1]) return "mirrored and rotated";
    return second[0] < first[0] ? "mirrored left to right" : "mirrored top to bottom";
  }
  if (degrees) return `rotated by ${degrees}°`;
  const across = second[0] - first[0];
  const down = last[1] - first[1];
  const whole = (value: number): string => value.toLocaleString("en", { maximumFractionDigits: 1 });
  const scaled = across === width && down === height ? "" : `, scaled to ${width} × ${height}`;
  return `cropped ${whole(across)} × ${whole(down)} pixels at (${whole(first[0])}, ${whole(first[1])})${scaled}`;
}

const PICTURE_LIMIT = 32 << 20;

function SourcePicture({ bucket, name, offset, length, image }: {
  bucket: string;
  name: string;
  offset: number;
  length: number;
  /** The part of the image that the row shows, if it is known. */
  image: ShownPart | undefined;
}): JSX.Element | null {
  const [url, setUrl] = useState("");
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
  const { height = 0, width = 0 } = image?.source ?? {};
  const points = image?.corners.map((corner) => corner.join(",")).join(" ") ?? "";
  return (
    <figure>
      <div class="marked">
        <img src={url} alt={`Source ${name}`} />
        {image && (
          <svg viewBox={`0 0 ${width} ${height}`} role="img" aria-label="The part of the source that the row shows">
            <polygon points={points} class="outline" vector-effect="non-scaling-stroke" />
            <polygon points={points} class="part" vector-effect="non-scaling-stroke" data-part={JSON.stringify(image.corners)} />
          </svg>
        )}
      </div>
      <figcaption>
        Source{image && `, ${width} × ${height} pixels; the outline marks the part that the row shows`}
      </figcaption>
    </figure>
  );
}

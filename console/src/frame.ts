// Frames as a rank gets them: safetensors, read into rows of fields. Nothing is computed again or resized.

export interface Tensor {
  dtype: string;
  shape: number[];
  data: ArrayLike<number>;
}

/** A field of a batch: dense, or with rows of unequal lengths. */
export interface Field {
  name: string;
  dtype: string;
  rows: number;
  /** The shape of a row; null if rows differ. */
  rowShape: number[] | null;
  row(index: number): Tensor;
}

export interface Frame {
  bytes: number;
  rows: number;
  fields: Field[];
  status: ArrayLike<number>;
  positions: ArrayLike<number>;
  metadata: Record<string, string>;
}

interface Entry {
  dtype: string;
  shape: number[];
  data_offsets: [number, number];
}

function half(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** Returns the elements of a tensor at its place in the frame; 64-bit integers become numbers. */
export function elements(dtype: string, buffer: ArrayBuffer, start: number, end: number): ArrayLike<number> {
  if (dtype === "BOOL" || dtype === "U8") return new Uint8Array(buffer, start, end - start);
  const view = buffer.slice(start, end); // others must begin at a multiple of their size
  switch (dtype) {
    case "I8":
      return new Int8Array(view);
    case "U16":
      return new Uint16Array(view);
    case "I16":
      return new Int16Array(view);
    case "U32":
      return new Uint32Array(view);
    case "I32":
      return new Int32Array(view);
    case "F32":
      return new Float32Array(view);
    case "F64":
      return new Float64Array(view);
    case "I64":
      return Float64Array.from(new BigInt64Array(view), Number);
    case "U64":
      return Float64Array.from(new BigUint64Array(view), Number);
    case "F16":
      return Float32Array.from(new Uint16Array(view), half);
    case "BF16":
      return new Float32Array(Uint32Array.from(new Uint16Array(view), (bits) => bits << 16).buffer);
    default:
      throw new Error(`elements of the type ${dtype} cannot be shown`);
  }
}

function part(data: ArrayLike<number>, start: number, end: number): ArrayLike<number> {
  return (data as Float32Array).subarray(start, end);
}

const product = (shape: number[]): number => shape.reduce((left, right) => left * right, 1);

/** Reads a frame. Throws Error if it is cut off or of another form. */
export function parseFrame(buffer: ArrayBuffer): Frame {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const { __metadata__: metadata = {}, ...entries } = JSON.parse(
    new TextDecoder().decode(new Uint8Array(buffer, 8, length)),
  ) as { __metadata__?: Record<string, string> };
  const tensors = new Map<string, Tensor>();
  for (const [name, entry] of Object.entries(entries as Record<string, Entry>)) {
    if (name.startsWith("__pad.")) continue;
    const [start, end] = entry.data_offsets;
    if (8 + length + end > buffer.byteLength) throw new Error("the frame is cut off");
    const data = elements(entry.dtype, buffer, 8 + length + start, 8 + length + end);
    tensors.set(name, { dtype: entry.dtype, shape: entry.shape, data });
  }
  const status = tensors.get("__status")?.data ?? new Uint8Array();
  const fields: Field[] = [];
  for (const [name, tensor] of tensors) {
    if (name.startsWith("__") || name.endsWith(".offsets") || name.endsWith(".shapes")) continue;
    const offsets = tensors.get(name.replace(/\.data$/, ".offsets"));
    fields.push(
      name.endsWith(".data") && offsets
        ? ragged(name.slice(0, -".data".length), tensor, offsets, tensors)
        : dense(name, tensor),
    );
  }
  // What a person looks at comes first: pictures, then what is said about them.
  const dimensions = ({ rowShape }: Field): number => rowShape?.length ?? 1;
  fields.sort((left, right) => dimensions(right) - dimensions(left) || left.name.localeCompare(right.name));
  return {
    bytes: buffer.byteLength,
    rows: status.length,
    fields,
    status,
    positions: tensors.get("__pos")?.data ?? [],
    metadata,
  };
}

function dense(name: string, tensor: Tensor): Field {
  const rowShape = tensor.shape.slice(1);
  const size = product(rowShape);
  return {
    name,
    dtype: tensor.dtype,
    rows: tensor.shape[0] ?? 0,
    rowShape,
    row: (index) => ({
      dtype: tensor.dtype,
      shape: rowShape,
      data: part(tensor.data, index * size, (index + 1) * size),
    }),
  };
}

function ragged(name: string, tensor: Tensor, offsets: Tensor, tensors: Map<string, Tensor>): Field {
  const shapes = tensors.get(`${name}.shapes`);
  const dimensions = shapes?.shape[1] ?? 1;
  return {
    name,
    dtype: tensor.dtype,
    rows: offsets.data.length - 1,
    rowShape: null,
    row: (index) => {
      const start = offsets.data[index]!;
      const end = offsets.data[index + 1]!;
      const shape = shapes
        ? Array.from(part(shapes.data, index * dimensions, (index + 1) * dimensions))
        : [end - start];
      return { dtype: tensor.dtype, shape, data: part(tensor.data, start, end) };
    },
  };
}

export interface Picture {
  width: number;
  height: number;
  channels: number;
  /** RGBA, as a canvas takes it. */
  pixels: Uint8ClampedArray<ArrayBuffer>;
  /** How values became colours, if they were not bytes. */
  scaling: string;
}

/** Returns the layout of a tensor that is a picture: its extents and the distances between elements; null if
 * it is none. */
function layout(shape: number[]): { h: number; w: number; c: number; strides: [number, number, number] } | null {
  const [first = 0, second = 0, third = 0] = shape;
  const colour = (extent: number): boolean => extent === 1 || extent === 3 || extent === 4;
  if (shape.length === 2 && first >= 4 && second >= (first > 4096 ? 16 : 4)) return { h: first, w: second, c: 1, strides: [second, 1, 0] };
  if (shape.length !== 3) return null;
  if (colour(first) && second >= 2 && third >= 2) {
    return { h: second, w: third, c: first, strides: [third, 1, second * third] };
  }
  if (colour(third) && first >= 2 && second >= 2) {
    return { h: first, w: second, c: third, strides: [second * third, third, 1] };
  }
  return null;
}

const MOST_PIXELS = 1 << 24;

/** Whether a tensor has the shape of a picture, or of a map of colours. */
export function isPicture({ shape, data }: Tensor): boolean {
  const found = layout(shape);
  return found !== null && data.length > 0 && found.h * found.w <= MOST_PIXELS;
}

/** Returns a tensor as a picture, pixel for pixel, or an array of two dimensions as a map of colours; null if its
 * shape is not one of a picture. */
export function picture(tensor: Tensor): Picture | null {
  if (!isPicture(tensor)) return null;
  const { h, w, c, strides } = layout(tensor.shape)!;
  if (tensor.dtype === "U8") {
    return { width: w, height: h, channels: c, pixels: colours(tensor.data as Uint8Array, h, w, c, strides), scaling: "" };
  }
  const { min, max } = range(tensor.data);
  const unit = min >= 0 && max <= 1;
  const offset = unit ? 0 : min;
  const scale = 255 / (unit ? 1 : max - min || 1);
  const heat = tensor.shape.length === 2;
  const shownAs = heat ? "blue to yellow" : "0…255";
  const scaling = unit ? `0…1 shown as ${shownAs}` : `${min.toPrecision(3)}…${max.toPrecision(3)} shown as ${shownAs}`;
  const pixels = new Uint8ClampedArray(4 * w * h);
  for (let y = 0, at = 0; y < h; y += 1) {
    for (let x = 0; x < w; x += 1, at += 4) {
      const place = y * strides[0] + x * strides[1];
      if (heat) {
        pixels.set(heatColour((tensor.data[place]! - offset) * scale), at);
        continue;
      }
      for (let channel = 0; channel < 3; channel += 1) {
        const value = tensor.data[place + (c === 1 ? 0 : channel) * strides[2]]!;
        pixels[at + channel] = (value - offset) * scale;
      }
      pixels[at + 3] = c === 4 ? (tensor.data[place + 3 * strides[2]]! - offset) * scale : 255;
    }
  }
  return { width: w, height: h, channels: c, pixels, scaling };
}

/** Bytes as RGBA, a pixel at a time: a batch has millions of them. */
function colours(
  data: Uint8Array,
  h: number,
  w: number,
  c: number,
  [down, right, deep]: [number, number, number],
): Uint8ClampedArray<ArrayBuffer> {
  const words = new Uint32Array(w * h);
  const green = c === 1 ? 0 : deep;
  for (let y = 0, at = 0; y < h; y += 1) {
    for (let x = 0, place = y * down; x < w; x += 1, place += right, at += 1) {
      const alpha = c === 4 ? data[place + 3 * deep]! : 255;
      words[at] = (alpha << 24) | (data[place + 2 * green]! << 16) | (data[place + green]! << 8) | data[place]!;
    }
  }
  return new Uint8ClampedArray(words.buffer);
}

/** The colours of viridis at even distances. */
const HEAT = [
  [68, 1, 84],
  [59, 82, 139],
  [33, 145, 140],
  [94, 201, 98],
  [253, 231, 37],
] as const;

/** Returns the colour of a value from 0 to 255: RGBA. What is no number is transparent. */
function heatColour(value: number): [number, number, number, number] {
  if (!Number.isFinite(value)) return [0, 0, 0, 0];
  const place = (Math.min(255, Math.max(0, value)) / 255) * (HEAT.length - 1);
  const low = Math.min(HEAT.length - 2, Math.floor(place));
  const mixed = (channel: 0 | 1 | 2): number =>
    HEAT[low]![channel] + (HEAT[low + 1]![channel] - HEAT[low]![channel]) * (place - low);
  return [mixed(0), mixed(1), mixed(2), 255];
}

const LEAST_WAVE = 64;

/** Returns the least and the largest value of each of at most `columns` parts of a series of floats, such as a
 * sound (the first channel of it); null if the tensor is no series. */
export function wave(tensor: Tensor, columns: number): { low: number; high: number }[] | null {
  const { dtype, shape, data } = tensor;
  const [length = 0, channels = 1] = shape;
  if (!/^B?F/.test(dtype) || shape.length > 2 || channels > 8 || length < LEAST_WAVE) return null;
  const parts = Math.min(columns, length);
  return Array.from({ length: parts }, (_, part) => {
    let low = Infinity;
    let high = -Infinity;
    const end = Math.floor(((part + 1) * length) / parts);
    for (let index = Math.floor((part * length) / parts); index < end; index += 1) {
      const value = data[index * channels]!;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    return { low, high };
  });
}

export function range(data: ArrayLike<number>): { min: number; max: number; mean: number } {
  let min = Infinity;
  let max = -Infinity;
  let sum = 0;
  for (let index = 0; index < data.length; index += 1) {
    const value = data[index]!;
    if (value < min) min = value;
    if (value > max) max = value;
    sum += value;
  }
  return { min, max, mean: sum / (data.length || 1) };
}

/** Returns a row of bytes as text, if it is UTF-8 without control characters; null otherwise. */
export function text(tensor: Tensor): string | null {
  if (tensor.dtype !== "U8" || tensor.shape.length !== 1 || !tensor.data.length) return null;
  try {
    const found = new TextDecoder("utf-8", { fatal: true }).decode(tensor.data as Uint8Array);
    return /[\0-\x08\x0e-\x1f]/.test(found) ? null : found;
  } catch {
    return null;
  }
}

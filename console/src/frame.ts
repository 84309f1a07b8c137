// Frames as a rank receives them: safetensors, parsed into rows of fields. Values are neither recomputed nor resized.

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
  /** Returns a row. If it is not loaded, the tensor has no elements. */
  row(index: number): Tensor;
}

export interface Frame {
  bytes: number;
  rows: number;
  fields: Field[];
  status: ArrayLike<number>;
  positions: ArrayLike<number>;
  metadata: Record<string, string>;
  /** The number of rows, from the first, whose fields are all loaded. */
  loaded: number;
  /** Loads the missing parts of the first `rows` rows. */
  load(rows: number, signal: AbortSignal): Promise<void>;
}

/** Reads a part of the frame; returns it with the size of the frame. At the end, or for the whole frame, it may be shorter or longer. */
export type ReadPart = (start: number, end: number, signal: AbortSignal) => Promise<{ data: ArrayBuffer; total: number }>;

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

const FIRST = 256 << 10; // bytes; a smaller frame is read at once
const SMALL = 64 << 10; // bytes; a smaller tensor is read whole
const GAP = 32 << 10; // bytes between parts that are read together

interface Piece {
  from: number;
  to: number;
  /** The number of the first of its elements in the tensor. */
  base: number;
  data: ArrayLike<number>;
}

/** A tensor whose first rows are loaded. `end`: the number of elements before a row. */
interface Stored extends Entry {
  pieces: Piece[];
  loaded: number;
  end(row: number): number;
}

/** Opens a frame; reads its small tensors and its first `rows` rows. Throws Error if it is incomplete or malformed. */
export async function openFrame(read: ReadPart, rows: number, signal: AbortSignal): Promise<Frame> {
  const { data: first, total } = await read(0, FIRST, signal);
  const length = Number(new DataView(first).getBigUint64(0, true));
  const begin = 8 + length;
  const header = begin <= first.byteLength ? first : (await read(0, begin, signal)).data;
  const { __metadata__: metadata = {}, ...entries } = JSON.parse(
    new TextDecoder().decode(new Uint8Array(header, 8, length)),
  ) as { __metadata__?: Record<string, string> };
  const tensors = new Map<string, Stored>();
  for (const [name, entry] of Object.entries(entries as Record<string, Entry>)) {
    if (name.startsWith("__pad.")) continue;
    if (begin + entry.data_offsets[1] > total) throw new Error("the batch is incomplete; load the page again");
    const size = product(entry.shape.slice(1));
    tensors.set(name, { ...entry, pieces: [], loaded: 0, end: (row) => row * size });
  }
  const count = (tensor: Stored): number => tensor.shape[0] ?? 1;
  const extend = async (wanted: [Stored, number][], until: AbortSignal): Promise<void> => {
    const missing = wanted.flatMap(([tensor, to]) => {
      if (to <= tensor.loaded) return [];
      const [start, end] = tensor.data_offsets;
      const width = (end - start) / (product(tensor.shape) || 1);
      const at = (row: number): number => begin + start + tensor.end(row) * width;
      return [{ tensor, from: tensor.loaded, to, start: at(tensor.loaded), end: at(to) }];
    });
    const parts: { start: number; end: number }[] = [];
    for (const { start, end } of [...missing].sort((left, right) => left.start - right.start)) {
      const last = parts[parts.length - 1];
      if (end <= first.byteLength || start === end) continue;
      if (last && start - last.end <= GAP) last.end = Math.max(last.end, end);
      else parts.push({ start, end });
    }
    const found = [
      { start: 0, end: first.byteLength, data: first },
      ...(await Promise.all(parts.map(async (part) => ({ ...part, data: (await read(part.start, part.end, until)).data })))),
    ];
    for (const { tensor, from, to, start, end } of missing) {
      const part = found.find((each) => each.start <= start && end <= each.end) ?? found[0]!;
      if (end > start && end - part.start > part.data.byteLength) throw new Error("the batch is incomplete; load the page again");
      const data = end > start ? elements(tensor.dtype, part.data, start - part.start, end - part.start) : new Uint8Array();
      tensor.pieces.push({ from, to, base: tensor.end(from), data });
      tensor.loaded = to;
    }
  };
  const small = [...tensors].flatMap(([name, tensor]): [Stored, number][] => {
    const whole = tensor.data_offsets[1] - tensor.data_offsets[0] <= SMALL || name.startsWith("__") || /\.(offsets|shapes)$/.test(name);
    return whole && !offsetsOf(name, tensors) ? [[tensor, count(tensor)]] : [];
  });
  const whole = (name: string): ArrayLike<number> => tensors.get(name)?.pieces[0]?.data ?? [];
  const status = tensors.get("__status");
  const all = status ? count(status) : 0;
  const large = [...tensors.values()].filter((tensor) => !small.some(([each]) => each === tensor));
  const ragged = [...tensors].flatMap(([name, tensor]) => {
    const offsets = offsetsOf(name, tensors);
    return offsets ? [{ tensor, offsets }] : [];
  });
  const upTo = (to: number): [Stored, number][] => large.map((tensor) => [tensor, to]);
  // The row ends of ragged tensors are among the small tensors.
  await extend(ragged.length ? small : [...small, ...upTo(Math.min(rows, all))], signal);
  for (const { tensor, offsets } of ragged) tensor.end = (row) => offsets.pieces[0]!.data[row] ?? 0;
  const fields: Field[] = [];
  for (const [name, tensor] of tensors) {
    if (name.startsWith("__") || name.endsWith(".offsets") || name.endsWith(".shapes")) continue;
    const offsets = offsetsOf(name, tensors);
    fields.push(offsets ? raggedField(name.slice(0, -".data".length), tensor, offsets, tensors) : denseField(name, tensor));
  }
  // Images come first, then the fields that describe them.
  const dimensions = ({ rowShape }: Field): number => rowShape?.length ?? 1;
  fields.sort((left, right) => dimensions(right) - dimensions(left) || left.name.localeCompare(right.name));
  let loading = Promise.resolve(); // sequential: each load starts after the loaded rows
  const frame: Frame = {
    bytes: total,
    rows: all,
    fields,
    status: whole("__status"),
    positions: whole("__pos"),
    metadata,
    loaded: large.length ? 0 : all,
    load: (to, until) => {
      const most = Math.min(to, all);
      const work = loading.then(async () => {
        await extend(upTo(most), until);
        frame.loaded = Math.max(frame.loaded, most);
      });
      loading = work.catch(() => {});
      return work;
    },
  };
  await frame.load(total <= FIRST ? all : rows, signal);
  return frame;
}

/** The tensor with the row ends of a ragged tensor. */
function offsetsOf(name: string, tensors: Map<string, Stored>): Stored | undefined {
  return name.endsWith(".data") ? tensors.get(name.replace(/\.data$/, ".offsets")) : undefined;
}

function rowOf({ pieces, end }: Stored, index: number): ArrayLike<number> {
  const piece = pieces.find(({ from, to }) => from <= index && index < to);
  return piece ? part(piece.data, end(index) - piece.base, end(index + 1) - piece.base) : [];
}

function denseField(name: string, tensor: Stored): Field {
  const rowShape = tensor.shape.slice(1);
  return {
    name,
    dtype: tensor.dtype,
    rows: tensor.shape[0] ?? 0,
    rowShape,
    row: (index) => ({ dtype: tensor.dtype, shape: rowShape, data: rowOf(tensor, index) }),
  };
}

function raggedField(name: string, tensor: Stored, offsets: Stored, tensors: Map<string, Stored>): Field {
  const shapes = tensors.get(`${name}.shapes`);
  return {
    name,
    dtype: tensor.dtype,
    rows: (offsets.shape[0] ?? 1) - 1,
    rowShape: null,
    row: (index) => {
      const data = rowOf(tensor, index);
      const shape = shapes ? Array.from(rowOf(shapes, index)) : [tensor.end(index + 1) - tensor.end(index)];
      return { dtype: tensor.dtype, shape, data };
    },
  };
}

export interface Picture {
  width: number;
  height: number;
  channels: number;
  /** RGBA, in the order of a canvas. */
  pixels: Uint8ClampedArray<ArrayBuffer>;
  /** How values were mapped to colours; empty for bytes. */
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

/** The height and width of a tensor that has the shape of a picture, or of a map of colours; null of others. */
export function extentOf(shape: number[]): { h: number; w: number } | null {
  const found = layout(shape);
  return found !== null && found.h * found.w <= MOST_PIXELS ? found : null;
}

export function isPicture({ shape, data }: Tensor): boolean {
  return data.length > 0 && extentOf(shape) !== null;
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

/** Bytes as RGBA, one pixel per write: a batch has millions of pixels. */
function colours(
  data: Uint8Array,
  h: number,
  w: number,
  c: number,
  [down, right, deep]: [number, number, number],
): Uint8ClampedArray<ArrayBuffer> {
  const words = new Int32Array(w * h);
  const green = c === 1 ? 0 : deep;
  const blue = 2 * green;
  const opaque = 255 << 24;
  for (let y = 0, at = 0; y < h; y += 1) {
    for (let end = at + w, place = y * down; at < end; at += 1, place += right) {
      words[at] = opaque | (data[place + blue]! << 16) | (data[place + green]! << 8) | data[place]!;
    }
  }
  if (c === 4) {
    const alphas = new Uint8Array(words.buffer);
    for (let y = 0, at = 3; y < h; y += 1) {
      for (let x = 0, place = y * down + 3 * deep; x < w; x += 1, place += right, at += 4) alphas[at] = data[place]!;
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

/** Returns the colour of a value from 0 to 255 as RGBA; NaN is transparent. */
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

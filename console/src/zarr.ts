// Chunks of Zarr arrays (versions 2 and 3), decoded by the node: one chunk, or the first plane of a shard.

import { ApiError, json } from "./api";
import type { Tensor } from "./frame";
import { parseNpy, planeOf, type Npy } from "./npy";
import { head, read } from "./s3";
import type { Trial } from "./schema";

const METADATA_LIMIT = 1 << 20;
const INDEX_LIMIT = 4 << 20;
const PIECES_LIMIT = 8 << 20;
const MOST_PIECES = 64; // of one request
const MISSING = 0xffff_ffff_ffff_ffffn;

interface Sharding {
  chunk_shape: number[];
  index_location?: "start" | "end";
  index_codecs?: { name: string }[];
}

/** The metadata of version 3. */
interface Metadata {
  fill_value: number | string | boolean;
  chunk_grid: { configuration: { chunk_shape: number[] } };
  codecs: { name: string; configuration?: Sharding }[];
}

/** An object, or a byte range of it. */
type Sample = string | { url: string; offset: number; length: number };

const product = (shape: number[]): number => shape.reduce((left, right) => left * right, 1);

/** An array: the prefix of its chunks, with the slash, and the key of its metadata. */
export interface ZarrArray {
  place: string;
  metadata: string;
}

const MOST_AXES = 8;

/** Returns the array that an object is a chunk of; null if its key is not that of a chunk. */
export async function arrayOf(bucket: string, key: string): Promise<ZarrArray | null> {
  const third = /^(.*\/)?c(?:[./]\d+)+$/.exec(key);
  const found = await Promise.all(
    [...(third ? [`${third[1] ?? ""}zarr.json`] : []), ...placesOfVersion2(key).map((place) => `${place}.zarray`)].map((metadata) =>
      head(bucket, metadata).then(
        () => metadata,
        () => "",
      ),
    ),
  );
  const metadata = found.find(Boolean);
  return metadata === undefined ? null : { place: metadata.slice(0, metadata.lastIndexOf("/") + 1), metadata };
}

/** The prefixes of the arrays that a key may be a chunk of: `a/0.1`, or `a/0/1`, where `0` may belong to the array's name. */
function placesOfVersion2(key: string): string[] {
  const parts = key.split("/");
  const last = parts.pop()!;
  if (!/^\d+(?:\.\d+)*$/.test(last)) return [];
  const place = (): string => parts.map((part) => `${part}/`).join("");
  const places = [place()];
  while (!last.includes(".") && places.length < MOST_AXES && /^\d+$/.test(parts.pop() ?? "")) places.push(place());
  return places;
}

/** Returns the chunk, or the first plane of the shard. Throws Error if it cannot be shown. */
export async function readChunk(bucket: string, { metadata }: ZarrArray, key: string, size: number): Promise<Npy> {
  const text = new TextDecoder().decode(await read(bucket, metadata, 0, METADATA_LIMIT));
  const told = JSON.parse(text) as Partial<Metadata>;
  const decode = async (samples: Sample[]): Promise<Npy[]> => {
    const ops = [{ op: "zarr_chunk", args: { metadata: `s3://${bucket}/${metadata}` } }];
    const body = JSON.stringify({ ops, samples, results: true });
    const { results } = await json<Trial>("/-/modules/test", { method: "POST", body });
    return results.map(({ result, error }) => {
      if (result === undefined) throw new ApiError(0, "Chunk", error ?? "the decoded chunk is too large for a preview");
      return parseNpy(Uint8Array.from(atob(result), (char) => char.charCodeAt(0)));
    });
  };
  const url = `s3://${bucket}/${key}`;
  const codec = told.codecs?.[0];
  if (!told.chunk_grid || codec?.name !== "sharding_indexed") return (await decode([url]))[0]!;
  const outer = told.chunk_grid.configuration.chunk_shape;
  const sharding = codec.configuration!;
  const inner = sharding.chunk_shape;
  const grid = outer.map((extent, axis) => extent / inner[axis]!);
  const pieces = await readIndex(bucket, key, size, sharding, product(grid));
  const stored = pieces.flatMap((piece, index) => (piece ? [index] : []));
  const note = `A shard of ${grid.join(" × ")} chunks of ${inner.join(" × ")}, of which ${stored.length.toLocaleString("en")} are stored.`;
  if (!stored.length) return { dtype: "no chunk", shape: outer, first: null, note };
  const corner = visible(grid, planeOf(inner).length, PIECES_LIMIT / (product(inner) * 8));
  const shown = corner.numbers.some((index) => pieces[index]) ? corner : { rows: 1, columns: 1, numbers: [stored[0]!] };
  const wanted = shown.numbers.filter((index) => pieces[index]);
  const found = await decode(wanted.map((index) => ({ url, ...pieces[index]! })));
  const tensors = new Map(wanted.map((index, at) => [index, found[at]!.first!]));
  const first = joined(found[0]!.first!, shown, tensors, Number(told.fill_value));
  const part = shown.numbers.length === 1 ? " One chunk is shown." : ` The first ${shown.rows} × ${shown.columns} chunks are shown.`;
  return { dtype: found[0]!.dtype, shape: outer, first, note: note + (shown.numbers.length < product(grid) ? part : "") };
}

type Piece = { offset: number; length: number } | null;

async function readIndex(bucket: string, key: string, size: number, sharding: Sharding, count: number): Promise<Piece[]> {
  const checked = sharding.index_codecs?.some(({ name }) => name === "crc32c") ?? false;
  const length = 16 * count + (checked ? 4 : 0);
  if (length > size) throw new ApiError(0, "Index", `a shard of ${size} bytes is too small for its index of ${length} bytes`);
  if (length > INDEX_LIMIT) throw new ApiError(0, "Index", `a shard of ${count.toLocaleString("en")} chunks is too large for a preview`);
  const start = sharding.index_location === "start" ? 0 : size - length;
  const view = new DataView(await read(bucket, key, start, start + length));
  return Array.from({ length: count }, (_, index) => {
    const offset = view.getBigUint64(16 * index, true);
    return offset === MISSING ? null : { offset: Number(offset), length: Number(view.getBigUint64(16 * index + 8, true)) };
  });
}

interface Visible {
  rows: number;
  columns: number;
  /** The numbers of the chunks, row by row. */
  numbers: number[];
}

/** Chooses the chunks of the first plane, whose shape has `axes` extents; at most `most`, and at least one. */
function visible(grid: number[], axes: number, most: number): Visible {
  const limit = Math.max(1, Math.min(MOST_PIECES, Math.floor(most)));
  const down = axes > 1 ? grid.length - axes : -1;
  const across = axes > 1 ? down + 1 : grid.length - 1;
  const columns = Math.min(grid[across] ?? 1, limit);
  const rows = Math.min(grid[down] ?? 1, Math.floor(limit / columns));
  const distance = (axis: number): number => product(grid.slice(axis + 1));
  const place = (index: number): number => Math.floor(index / columns) * distance(down) + (index % columns) * distance(across);
  return { rows, columns, numbers: Array.from({ length: rows * columns }, (_, index) => place(index)) };
}

/** Joins the planes of chunks; chunks that are not stored have the fill value. */
function joined(like: Tensor, { rows, columns, numbers }: Visible, tensors: Map<number, Tensor>, fill: number): Tensor {
  const [height, width, ...rest] = like.shape.length > 1 ? (like.shape as [number, number]) : ([1, like.shape[0] ?? 1] as const);
  const line = width * product(rest);
  const Elements = like.data.constructor as Float64ArrayConstructor;
  const data = new Elements(rows * height * columns * line).fill(fill);
  numbers.forEach((index, at) => {
    const tensor = tensors.get(index);
    const [row, column] = [Math.floor(at / columns), at % columns];
    for (let y = 0; tensor && y < height; y += 1) {
      const source = (tensor.data as Float64Array).subarray(y * line, (y + 1) * line);
      data.set(source, ((row * height + y) * columns + column) * line);
    }
  });
  const shape = like.shape.length > 1 ? [rows * height, columns * width, ...rest] : [columns * width];
  return { dtype: like.dtype, shape, data };
}

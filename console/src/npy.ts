// Arrays in NumPy's format: the header, and the complete rows at the beginning.

import { elements, type Tensor } from "./frame";

const TYPES: Record<string, string> = {
  "|b1": "BOOL",
  "|u1": "U8",
  "|i1": "I8",
  "<u2": "U16",
  "<i2": "I16",
  "<u4": "U32",
  "<i4": "I32",
  "<u8": "U64",
  "<i8": "I64",
  "<f2": "F16",
  "<f4": "F32",
  "<f8": "F64",
};

export interface Npy {
  /** As in the header, such as `<f4`. */
  dtype: string;
  shape: number[];
  /** The first plane, row or value; null if it cannot be shown. */
  first: Tensor | null;
  note: string;
}

const MAGIC = [0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59];

export function isNpy(data: Uint8Array): boolean {
  return MAGIC.every((byte, index) => data[index] === byte);
}

/** Parses the beginning of a file. Of a first plane that is cut off, the result has the complete rows. */
export function parseNpy(data: Uint8Array): Npy {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const long = data[6]! > 1;
  const start = long ? 12 : 10;
  const end = start + (long ? view.getUint32(8, true) : view.getUint16(8, true));
  const header = new TextDecoder("latin1").decode(data.subarray(start, end));
  const dtype = /'descr':\s*'([^']*)'/.exec(header)?.[1];
  const extents = /'shape':\s*\(([^)]*)\)/.exec(header)?.[1];
  if (dtype === undefined || extents === undefined) {
    return { dtype: "records", shape: [], first: null, note: "Structured arrays (records) have no preview." };
  }
  const shape = extents.split(",").map((part) => part.trim()).filter(Boolean).map(Number);
  const type = TYPES[dtype];
  if (!type) return { dtype, shape, first: null, note: "Elements of this type have no preview." };
  if (/'fortran_order':\s*True/.test(header)) return { dtype, shape, first: null, note: "Arrays in Fortran (column-major) order have no preview." };
  const width = Number(dtype.slice(2));
  const plane = planeOf(shape);
  const row = plane.slice(1).reduce((left, right) => left * right, 1);
  const rows = Math.min(plane[0] ?? 1, Math.floor((data.length - end) / (width * row)));
  const found = plane.length ? [rows, ...plane.slice(1)] : [];
  const count = plane.length ? rows * row : 1;
  const first: Tensor = { dtype: type, shape: found, data: elements(type, data.slice(end, end + count * width).buffer, 0, count * width) };
  const notes = [
    plane.length < shape.length ? "The first plane is shown." : "",
    rows < (plane[0] ?? 1) ? `The first ${rows.toLocaleString("en")} rows are shown.` : "",
  ];
  return { dtype, shape, first, note: notes.filter(Boolean).join(" ") };
}

/** Returns the last dimensions that form an image, a matrix or a series. */
export function planeOf(shape: number[]): number[] {
  const last = shape[shape.length - 1] ?? 0;
  const colours = shape.length > 2 && (last === 1 || last === 3 || last === 4);
  return shape.slice(-(colours ? 3 : 2));
}

// What bytes are, by how they begin: a type that somebody gave an object may be wrong, or a trick.

const MAGIC: [string, (data: Uint8Array) => boolean][] = [
  ["image/png", (data) => startsWith(data, 0x89, 0x50, 0x4e, 0x47)],
  ["image/jpeg", (data) => startsWith(data, 0xff, 0xd8, 0xff)],
  ["image/gif", (data) => startsWith(data, 0x47, 0x49, 0x46, 0x38)],
  ["image/webp", (data) => ascii(data, 0, 4) === "RIFF" && ascii(data, 8, 12) === "WEBP"],
  ["image/avif", (data) => /^ftypavi[fs]$/.test(ascii(data, 4, 12))],
  ["image/bmp", (data) => startsWith(data, 0x42, 0x4d)],
];

function startsWith(data: Uint8Array, ...expected: number[]): boolean {
  return expected.every((byte, index) => data[index] === byte);
}

function ascii(data: Uint8Array, start: number, end: number): string {
  return String.fromCharCode(...data.subarray(start, end));
}

/** Returns what the first bytes of a picture say that it is; empty if it is none that a browser decodes. */
export function pictureType(data: Uint8Array): string {
  return MAGIC.find(([, matches]) => matches(data))?.[0] ?? "";
}

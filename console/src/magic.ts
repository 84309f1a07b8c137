// The type of an object by its first bytes. The stored content type is not used: it may be wrong or hostile.

const MAGIC: [string, (data: Uint8Array) => boolean][] = [
  ["image/png", (data) => startsWith(data, 0x89, 0x50, 0x4e, 0x47)],
  ["image/jpeg", (data) => startsWith(data, 0xff, 0xd8, 0xff)],
  ["image/gif", (data) => startsWith(data, 0x47, 0x49, 0x46, 0x38)],
  ["image/webp", (data) => ascii(data, 0, 4) === "RIFF" && ascii(data, 8, 12) === "WEBP"],
  ["image/avif", (data) => /^ftypavi[fs]$/.test(ascii(data, 4, 12))],
  ["image/bmp", (data) => startsWith(data, 0x42, 0x4d)],
];

const SOUNDS: [string, (data: Uint8Array) => boolean][] = [
  ["audio/wav", (data) => ascii(data, 0, 4) === "RIFF" && ascii(data, 8, 12) === "WAVE"],
  ["audio/flac", (data) => ascii(data, 0, 4) === "fLaC"],
  ["audio/ogg", (data) => ascii(data, 0, 4) === "OggS"],
  ["audio/mpeg", (data) => ascii(data, 0, 3) === "ID3" || (data[0] === 0xff && [0xfb, 0xf3, 0xf2].includes(data[1]!))],
  ["audio/mp4", (data) => /^ftypM4A/.test(ascii(data, 4, 11))],
];

function startsWith(data: Uint8Array, ...expected: number[]): boolean {
  return expected.every((byte, index) => data[index] === byte);
}

function ascii(data: Uint8Array, start: number, end: number): string {
  return String.fromCharCode(...data.subarray(start, end));
}

/** Returns the type of an image that browsers decode; empty for other data. */
export function pictureType(data: Uint8Array): string {
  return MAGIC.find(([, matches]) => matches(data))?.[0] ?? "";
}

/** Returns the type of audio that browsers play; empty for other data. */
export function soundType(data: Uint8Array): string {
  return SOUNDS.find(([, matches]) => matches(data))?.[0] ?? "";
}

/** Whether it is a table that the node can preview: Parquet or Arrow IPC. */
export function isTable(data: Uint8Array): boolean {
  return ascii(data, 0, 4) === "PAR1" || ascii(data, 0, 6) === "ARROW1";
}

/** Whether it may be an archive: zip, tar, or compressed data that may contain a tar. */
export function isArchive(data: Uint8Array): boolean {
  return (
    startsWith(data, 0x50, 0x4b, 3, 4) ||
    ascii(data, 257, 262) === "ustar" ||
    startsWith(data, 0x1f, 0x8b) ||
    startsWith(data, 0x28, 0xb5, 0x2f, 0xfd)
  );
}

// Numbers and times as text.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count: number): string {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count.toLocaleString("en", { maximumFractionDigits: unit && count < 100 ? 1 : 0 })} ${UNITS[unit]}`;
}

export function count(value: number): string {
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

/** Returns a number with its noun, such as `1 row` or `2 rows`. */
export function counted(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function percent(share: number): string {
  return `${(100 * share).toLocaleString("en", { maximumFractionDigits: share < 0.1 ? 1 : 0 })}\u00a0%`;
}

export function duration(seconds: number): string {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86_400)} days`;
}

export function time(value: string | number): string {
  const date = new Date(value);
  return Number.isNaN(date.getTime())
    ? ""
    : date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

export function ago(milliseconds: number): string {
  return `${duration(Math.max(0, (Date.now() - milliseconds) / 1000))} ago`;
}

const INVISIBLE = /[\0-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Returns a name with its invisible characters, and those that reverse the text after them, as code points. */
export function shownName(name: string): string {
  return name.replace(INVISIBLE, (char) => `\u27e8U+${char.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);
}

/** Returns a number of a tensor as a short text. */
export function scalar(value: number): string {
  if (Number.isInteger(value)) return String(value);
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 ? value.toFixed(4).replace(/0+$/, "") : value.toExponential(3);
}

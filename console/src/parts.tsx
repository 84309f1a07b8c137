// Shared components: messages, tables, charts, meters, dialogs.

import { cloneElement, toChildArray } from "preact";
import type { ComponentChildren, JSX, TargetedEvent, VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError } from "./api";

export function sentenceOf(error: unknown): string {
  if (error instanceof ApiError) return error.sentence;
  return error instanceof Error ? error.message : String(error);
}

export function Problem({ error }: { error: unknown }): JSX.Element | null {
  if (!error) return null;
  return (
    <p class="problem" role="alert">
      {sentenceOf(error)}
    </p>
  );
}

export function Loading(): JSX.Element {
  return (
    <p class="loading" role="status">
      Loading …
    </p>
  );
}

export function Heading({ title, children }: { title: string; children?: ComponentChildren }): JSX.Element {
  useEffect(() => {
    document.title = `${title} · Shardmesh`;
  }, [title]);
  return (
    <header class="heading">
      <h1>{title}</h1>
      {children}
    </header>
  );
}

export interface Loaded<T> {
  value: T | undefined;
  error: unknown;
  reload(): void;
}

/** Calls `load` when the component is shown, and again when `keys` change. */
export function useLoaded<T>(load: (signal: AbortSignal) => Promise<T>, keys: readonly unknown[]): Loaded<T> {
  const [state, setState] = useState<{ value?: T; error?: unknown }>({});
  const [times, setTimes] = useState(0);
  useEffect(() => {
    const abort = new AbortController();
    load(abort.signal).then(
      (value) => !abort.signal.aborted && setState({ value }),
      (error: unknown) => !abort.signal.aborted && setState({ error }),
    );
    return () => abort.abort();
  }, [...keys, times]);
  return { value: state.value, error: state.error, reload: () => setTimes(times + 1) };
}

export function Meter({ label, used, total, text, goal, ahead = 0 }: {
  label: string;
  /** True if a full bar is no reason for a warning, as for a cache. */
  goal?: boolean;
  used: number;
  /** The prefetched part that follows the used one, in the same unit. */
  ahead?: number;
  total: number;
  text: string;
}): JSX.Element {
  const share = total > 0 ? Math.min(1, used / total) : 0;
  const level = goal ? "" : share > 0.95 ? "bad" : share > 0.85 ? "warn" : "";
  return (
    <div class="meter">
      <span class="meter-label">
        {label} <span class="quiet">{text}</span>
      </span>
      <div class="bar" role="img" aria-label={`${label}: ${text}`}>
        <div class={`fill ${level}`} style={{ width: `${100 * share}%` }} />
        {ahead > 0 && <div class="fill ahead" style={{ width: `${100 * Math.min(1 - share, ahead / total)}%` }} />}
      </div>
    </div>
  );
}

interface Cell {
  children?: ComponentChildren;
  role?: string;
  "data-column"?: string;
}

/**
 * A table whose rows become cards on a narrow screen, where each cell shows the name of its column. `head` lists the names:
 * "#" marks a column of numbers, "" the column of actions. The children are the rows (`tr`).
 */
export function Table({ head, children }: { head: string[]; children: ComponentChildren }): JSX.Element {
  const names = head.map((name) => name.replace("#", ""));
  const cell = (each: VNode<Cell>, at: number): VNode =>
    cloneElement(each, { role: "cell", "data-column": names[at] });
  return (
    <table class="list" role="table">
      <thead role="rowgroup">
        <tr role="row">
          {head.map((name, at) => (
            <th key={name} role="columnheader" scope="col" class={name.startsWith("#") ? "number" : ""}>
              {names[at] || <span class="hidden">Actions</span>}
            </th>
          ))}
        </tr>
      </thead>
      <tbody role="rowgroup">
        {(toChildArray(children) as VNode<Cell>[]).map((row) =>
          cloneElement(row, { role: "row" }, (toChildArray(row.props.children) as VNode<Cell>[]).map(cell)),
        )}
      </tbody>
    </table>
  );
}

export interface Point {
  time: number;
  value: number;
}

const WIDTH = 600;
const HEIGHT = 96;

/** A line chart over time. The caption shows the last value, or the one under the pointer. */
export function Chart({ title, points, format, span }: {
  title: string;
  points: Point[];
  format: (value: number) => string;
  /** The time that the width covers, in milliseconds. */
  span: number;
}): JSX.Element {
  const [at, setAt] = useState<number | null>(null);
  const end = points.length ? points[points.length - 1]!.time : Date.now();
  const start = end - span;
  const top = Math.max(...points.map((point) => point.value), 0) || 1;
  const x = (point: Point): number => ((point.time - start) / span) * WIDTH;
  const y = (point: Point): number => HEIGHT - 2 - (point.value / top) * (HEIGHT - 8);
  const line = points.map((point) => `${x(point).toFixed(1)},${y(point).toFixed(1)}`).join(" L");
  const chosen = at === null ? undefined : points[Math.min(at, points.length - 1)];
  const shown = chosen ?? points[points.length - 1];
  const move = (event: TargetedEvent<SVGSVGElement, PointerEvent>): void => {
    const box = event.currentTarget.getBoundingClientRect();
    const wanted = start + ((event.clientX - box.left) / box.width) * span;
    let best = 0;
    points.forEach((point, index) => {
      if (Math.abs(point.time - wanted) < Math.abs(points[best]!.time - wanted)) best = index;
    });
    if (points.length) setAt(best);
  };
  return (
    <figure class="chart">
      <figcaption>
        <span>{title}</span>
        <strong>{shown ? format(shown.value) : "–"}</strong>
        <span class="quiet">{chosen ? new Date(chosen.time).toLocaleTimeString() : "now"}</span>
      </figcaption>
      <svg
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        preserveAspectRatio="none"
        role="img"
        aria-label={`${title}: now ${shown ? format(shown.value) : "unknown"}, maximum ${format(top)} in the last hour`}
        onPointerMove={move}
        onPointerLeave={() => setAt(null)}
      >
        <line x1="0" x2={WIDTH} y1={HEIGHT - 1} y2={HEIGHT - 1} class="axis" />
        {points.length === 1 && (
          <line x1={WIDTH - 3} x2={WIDTH} y1={y(points[0]!)} y2={y(points[0]!)} class="line" vector-effect="non-scaling-stroke" />
        )}
        {points.length > 1 && (
          <>
            <path
              class="area"
              d={`M${x(points[0]!).toFixed(1)},${HEIGHT} L${line} L${x(points[points.length - 1]!).toFixed(1)},${HEIGHT} Z`}
            />
            <path class="line" d={`M${line}`} vector-effect="non-scaling-stroke" />
          </>
        )}
        {chosen && <line x1={x(chosen)} x2={x(chosen)} y1="0" y2={HEIGHT} class="cursor" vector-effect="non-scaling-stroke" />}
      </svg>
      <span class="chart-top quiet" aria-hidden="true">
        max {format(top)}
      </span>
    </figure>
  );
}

/** A modal dialog; Escape and the button close it. */
export function Dialog({ title, onClose, children, wide }: {
  title: string;
  onClose(): void;
  children: ComponentChildren;
  wide?: boolean;
}): JSX.Element {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = element.current!;
    dialog.showModal();
    return () => dialog.close();
  }, []);
  return (
    <dialog
      ref={element}
      class={wide ? "wide" : ""}
      aria-label={title}
      onCancel={(event) => {
        event.preventDefault();
        onClose();
      }}
      onClick={(event) => event.target === element.current && onClose()}
    >
      <div class="dialog">
        <header>
          <h2>{title}</h2>
          <button type="button" class="plain" aria-label="Close" onClick={onClose}>
            ✕
          </button>
        </header>
        {children}
      </div>
    </dialog>
  );
}

export function Empty({ children }: { children: ComponentChildren }): JSX.Element {
  return <p class="empty">{children}</p>;
}

// One batch: its rows as images, text or numbers, with the names of their samples.

import type { JSX, RefObject } from "preact";
import { useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "preact/hooks";
import { fetchAhead, forgetAhead, loadBatch, type Address, type Batch } from "../address";
import { extentOf, isPicture, text, wave, type Field } from "../frame";
import { bytes, count, counted } from "../format";
import { Loading, Problem } from "../parts";
import type { RowSource } from "../schema";
import { Picture, Wave } from "../tensors";
import { numbers, RowDialog, typeName } from "./row";

const SHOWN = 128;
const STATUS = ["", "replaced", "masked", "padding", "failed"];

/** Rows to load before the number of visible rows is known. */
const FIRST_ROWS = 24;

export function BatchView({ address, onSteps }: { address: Address; onSteps(steps: number): void }): JSX.Element {
  const [shown, setShown] = useState<Batch | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [opened, setOpened] = useState<number | null>(null);
  const [all, setAll] = useState(false);
  const [, loaded] = useReducer((times: number) => times + 1, 0);
  const visible = useRef(FIRST_ROWS);
  const before = useRef(address);
  const list = useRef<HTMLOListElement>(null);
  const key = JSON.stringify(address);
  // Before the browser paints, so that the request starts at once.
  useLayoutEffect(() => {
    const abort = new AbortController();
    const by = address.step - before.current.step;
    const stepped = Math.abs(by) === 1 && JSON.stringify({ ...before.current, step: address.step }) === key;
    before.current = address;
    setError(null);
    setAll(false);
    loadBatch(address, visible.current, abort.signal)
      .then((found) => {
        if (abort.signal.aborted) return;
        setShown(found);
        if (!found.sources) return;
        const { steps } = found.sources;
        onSteps(steps);
        const next = address.step + by;
        if (stepped && next >= 0 && next < steps) fetchAhead({ ...address, step: next }, visible.current);
      })
      .catch((why: unknown) => {
        if (abort.signal.aborted) return;
        setShown(null);
        setError(why);
      });
    return () => abort.abort();
  }, [key]);
  useEffect(() => forgetAhead, []);
  const frame = shown?.loaded.frame;
  const rows = Math.min(frame?.rows ?? 0, all ? Infinity : SHOWN);
  // Rows are loaded up to the last one on the screen.
  useEffect(() => {
    if (!frame) return;
    const abort = new AbortController();
    const look = (): void => {
      visible.current = lastVisible(list.current);
      const wanted = Math.max(visible.current, (opened ?? -1) + 1);
      if (frame.loaded < Math.min(wanted, rows)) {
        frame.load(wanted, abort.signal).then(
          () => loaded(undefined),
          (why: unknown) => abort.signal.aborted || setError(why),
        );
      }
    };
    look();
    addEventListener("scroll", look, { passive: true, capture: true });
    addEventListener("resize", look);
    return () => {
      abort.abort();
      removeEventListener("scroll", look, true);
      removeEventListener("resize", look);
    };
  }, [frame, rows, opened]);
  // The images are rendered once for each batch, not on every change around them.
  const pictures = useMemo(
    () => shown && <Rows list={list} shown={shown} rows={rows} onOpen={setOpened} />,
    [shown, rows, frame?.loaded],
  );
  if (error) return <Problem error={error} />;
  if (!shown || !frame) return <Loading />;
  const { result, took } = shown.loaded;
  const stale = JSON.stringify(shown.loaded.address) !== key;
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
      {pictures}
      {rows < frame.rows && (
        <button type="button" onClick={() => setAll(true)}>
          Show all {count(frame.rows)} rows
        </button>
      )}
      {opened !== null && opened < frame.loaded && (
        <RowDialog
          index={opened}
          fields={frame.fields}
          address={shown.loaded.address}
          replaced={STATUS[frame.status[opened] ?? 0] === "replaced"}
          position={frame.positions[opened]}
          source={shown.sources?.rows[opened]}
          onClose={() => setOpened(null)}
        />
      )}
    </div>
  );
}

/** Returns the number of rows that begin above the end of the screen. */
function lastVisible(list: HTMLOListElement | null): number {
  return [...(list?.children ?? [])].filter((row) => row.getBoundingClientRect().top < innerHeight).length;
}

function Rows({ list, shown, rows, onOpen }: {
  list: RefObject<HTMLOListElement | null>;
  shown: Batch;
  rows: number;
  onOpen(index: number): void;
}): JSX.Element {
  const { frame } = shown.loaded;
  return (
    <ol class="rows" start={0} ref={list}>
      {Array.from({ length: rows }, (_, index) => (
        <Row
          key={index}
          index={index}
          fields={frame.fields}
          status={frame.status[index] ?? 0}
          source={shown.sources?.rows[index]}
          loaded={index < frame.loaded}
          onOpen={() => onOpen(index)}
        />
      ))}
    </ol>
  );
}

function batchNote(rows: number, size: number, result: string, took: number): string {
  const how: Record<string, string> = { hit: "was cached", joined: "was already being built for another request", miss: "was built for this request" };
  return `${counted(rows, "row")}, ${bytes(size)}. The batch ${how[result] ?? "arrived"}; loaded in ${Math.round(took)} ms.`;
}

function typeOf(field: Field): string {
  return typeName(field.dtype, field.rowShape);
}

function Row({ index, fields, status, source, loaded, onOpen }: {
  index: number;
  fields: Field[];
  status: number;
  source: RowSource | undefined;
  loaded: boolean;
  onOpen(): void;
}): JSX.Element {
  const note = STATUS[status] ?? "";
  const title = source?.name ?? `Row ${index}`;
  return (
    <li class="row">
      <button type="button" class="row-button" onClick={onOpen}>
        <span class="hidden">Row {index}</span>
        {fields.map((field) =>
          loaded ? (
            <FieldView key={field.name} field={field} index={index} source={source} />
          ) : (
            <Missing key={field.name} field={field} index={index} />
          ),
        )}
      </button>
      <span class="row-name" title={title}>
        {title}
      </span>
      {note && <span class="tag warn">{note}</span>}
    </li>
  );
}

/** The placeholder of a value that is loaded when it becomes visible. */
function Missing({ field, index }: { field: Field; index: number }): JSX.Element {
  const extent = extentOf(field.row(index).shape);
  return extent ? <span class="missing" style={{ aspectRatio: `${extent.w} / ${extent.h}` }} /> : <span class="value">…</span>;
}

function FieldView({ field, index, source }: {
  field: Field;
  index: number;
  source: RowSource | undefined;
}): JSX.Element {
  const tensor = field.row(index);
  if (isPicture(tensor)) return <Picture tensor={tensor} name={`${field.name} of row ${index}`} />;
  if (wave(tensor, 1)) return <Wave tensor={tensor} name={`${field.name} of row ${index}`} />;
  const label = source?.labels[field.name];
  const words = text(tensor);
  return (
    <span class="value">
      <span class="quiet">{field.name}</span> {label?.class || (words ?? numbers(tensor, 8))}
    </span>
  );
}

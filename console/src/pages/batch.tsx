// One batch: its rows as pictures, text or numbers, with the objects that they were made of.

import type { JSX } from "preact";
import { useLayoutEffect, useMemo, useState } from "preact/hooks";
import { loadFrame, loadSources, type Address, type Loaded } from "../address";
import { isPicture, text, wave, type Field } from "../frame";
import { bytes, count } from "../format";
import { Loading, Problem } from "../parts";
import type { RowSource, Sources } from "../schema";
import { Picture, Wave } from "../tensors";
import { numbers, RowDialog, typeName } from "./row";

const SHOWN = 128;
const STATUS = ["", "replaced", "masked", "padding", "failed"];

interface Shown {
  loaded: Loaded;
  sources: Sources | null;
  trouble: unknown;
}

export function BatchView({ address, onSteps }: { address: Address; onSteps(steps: number): void }): JSX.Element {
  const [shown, setShown] = useState<Shown | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [opened, setOpened] = useState<number | null>(null);
  const [all, setAll] = useState(false);
  const key = JSON.stringify(address);
  // Before the browser paints what is there, so that the node is asked at once.
  useLayoutEffect(() => {
    const abort = new AbortController();
    setError(null);
    setAll(false);
    const sources = loadSources(address, abort.signal).then(
      (found) => ({ found, trouble: null as unknown }),
      (trouble: unknown) => ({ found: null, trouble }),
    );
    loadFrame(address, abort.signal)
      .then(async (loaded) => {
        const { found, trouble } = await sources;
        if (abort.signal.aborted) return;
        setShown({ loaded, sources: found, trouble });
        if (found) onSteps(found.steps);
      })
      .catch((why: unknown) => {
        if (abort.signal.aborted) return;
        setShown(null);
        setError(why);
      });
    return () => abort.abort();
  }, [key]);
  const rows = Math.min(shown?.loaded.frame.rows ?? 0, all ? Infinity : SHOWN);
  // The pictures are made once for each batch, not whenever something around them changes.
  const list = useMemo(() => shown && <Rows shown={shown} rows={rows} onOpen={setOpened} />, [shown, rows]);
  if (error) return <Problem error={error} />;
  if (!shown) return <Loading />;
  const { frame, result, took } = shown.loaded;
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
      {list}
      {rows < frame.rows && (
        <button type="button" onClick={() => setAll(true)}>
          Show all {count(frame.rows)} rows
        </button>
      )}
      {opened !== null && opened < frame.rows && (
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

function Rows({ shown, rows, onOpen }: { shown: Shown; rows: number; onOpen(index: number): void }): JSX.Element {
  const { frame } = shown.loaded;
  return (
    <ol class="rows" start={0}>
      {Array.from({ length: rows }, (_, index) => (
        <Row
          key={index}
          index={index}
          fields={frame.fields}
          status={frame.status[index] ?? 0}
          source={shown.sources?.rows[index]}
          onOpen={() => onOpen(index)}
        />
      ))}
    </ol>
  );
}

function batchNote(rows: number, size: number, result: string, took: number): string {
  const how: Record<string, string> = { hit: "was ready", joined: "was being made for another reader", miss: "was made now" };
  return `${count(rows)} rows, ${bytes(size)}; the frame ${how[result] ?? "arrived"}, ${Math.round(took)} ms to here`;
}

function typeOf(field: Field): string {
  return typeName(field.dtype, field.rowShape);
}

function Row({ index, fields, status, source, onOpen }: {
  index: number;
  fields: Field[];
  status: number;
  source: RowSource | undefined;
  onOpen(): void;
}): JSX.Element {
  const note = STATUS[status] ?? "";
  const title = source?.name ?? `Row ${index}`;
  return (
    <li class="row">
      <button type="button" class="row-button" onClick={onOpen}>
        <span class="hidden">Row {index}</span>
        {fields.map((field) => (
          <FieldView key={field.name} field={field} index={index} source={source} />
        ))}
      </button>
      <span class="row-name" title={title}>
        {title}
      </span>
      {note && <span class="tag warn">{note}</span>}
    </li>
  );
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

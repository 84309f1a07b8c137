// Objects of a bucket by prefix, however many there are; upload, preview, download, delete.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { bytes, counted, shownName, time } from "../format";
import { useListing, type Rows } from "../listing";
import { Empty, Heading, Problem } from "../parts";
import type { Entry } from "../s3";
import { DeleteDialog } from "./delete";
import { PreviewDialog } from "./preview";
import { SettingsDialog } from "./settings";
import { UploadPanel, useUploads } from "./uploads";

const ROW = 34;
const OVERSCAN = 10;

export function ObjectsPage({ bucket, query, root }: {
  bucket: string;
  query: URLSearchParams;
  root: boolean;
}): JSX.Element {
  const prefix = query.get("prefix") ?? "";
  const after = query.get("after") ?? "";
  const flat = query.get("flat") === "1";
  const rows = useListing(bucket, prefix, after, !flat);
  const uploads = useUploads(bucket, () => rows.reload());
  const [selected, setSelected] = useState<ReadonlySet<string>>(new Set());
  const [opened, setOpened] = useState<Entry | null>(null);
  const [removing, setRemoving] = useState(false);
  const [settings, setSettings] = useState(false);
  const [over, setOver] = useState(false);
  useEffect(() => setSelected(new Set()), [prefix, flat]);
  const go = (change: Record<string, string>): void => {
    const next = new URLSearchParams(query);
    for (const [name, value] of Object.entries(change)) {
      if (value) next.set(name, value);
      else next.delete(name);
    }
    const text = next.toString();
    location.hash = `/buckets/${encodeURIComponent(bucket)}${text && `?${text}`}`;
  };
  const toggle = (key: string): void => {
    const next = new Set(selected);
    if (!next.delete(key)) next.add(key);
    setSelected(next);
  };
  return (
    <div
      class={over ? "drop over" : "drop"}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={(event) => event.currentTarget === event.target && setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        if (event.dataTransfer) void uploads.addDropped(event.dataTransfer, prefix);
      }}
    >
      <Heading title={bucket}>
        <button type="button" onClick={() => setSettings(true)}>
          Settings
        </button>
        <label class="button primary">
          Upload
          <input
            type="file"
            multiple
            class="hidden"
            onChange={(event) => {
              uploads.add([...(event.currentTarget.files ?? [])].map((file) => ({ file, key: prefix + file.name })));
              event.currentTarget.value = "";
            }}
          />
        </label>
        <button type="button" disabled={selected.size === 0} onClick={() => setRemoving(true)}>
          Delete {selected.size > 0 && `(${selected.size})`}
        </button>
      </Heading>
      <Path bucket={bucket} prefix={prefix} go={go} />
      <form
        class="filters"
        role="search"
        onSubmit={(event) => {
          event.preventDefault();
          const form = event.currentTarget.elements;
          go({
            prefix: (form.namedItem("prefix") as HTMLInputElement).value,
            after: (form.namedItem("after") as HTMLInputElement).value,
          });
        }}
      >
        <label>
          Prefix
          <input name="prefix" key={prefix} defaultValue={prefix} autocapitalize="none" spellcheck={false} />
        </label>
        <label>
          Start after key
          <input name="after" key={after} defaultValue={after} autocapitalize="none" spellcheck={false} />
        </label>
        <label class="check">
          <input type="checkbox" checked={flat} onChange={() => go({ flat: flat ? "" : "1" })} /> Hide folders, list all keys
        </label>
        <button type="submit">Show</button>
      </form>
      <UploadPanel uploads={uploads} />
      <Problem error={rows.error} />
      <ObjectTable
        rows={rows}
        prefix={prefix}
        selected={selected}
        onToggle={toggle}
        onOpen={(entry) => (entry.folder ? go({ prefix: entry.key, after: "" }) : setOpened(entry))}
      />
      {settings && <SettingsDialog bucket={bucket} root={root} onClose={() => setSettings(false)} />}
      {opened && <PreviewDialog bucket={bucket} entry={opened} onClose={() => setOpened(null)} />}
      {removing && (
        <DeleteDialog
          bucket={bucket}
          names={[...selected]}
          onClose={() => setRemoving(false)}
          onDone={() => {
            setSelected(new Set());
            rows.reload();
          }}
        />
      )}
    </div>
  );
}

function Path({ bucket, prefix, go }: {
  bucket: string;
  prefix: string;
  go(change: Record<string, string>): void;
}): JSX.Element {
  const parts = prefix.split("/").slice(0, -1);
  const link = (name: string, to: string): JSX.Element => (
    <li key={to}>
      <button type="button" class="link" onClick={() => go({ prefix: to, after: "" })}>
        {name}
      </button>
    </li>
  );
  return (
    <nav aria-label="Folder" class="crumbs">
      <ol>
        <li>
          <a href="#/buckets">Buckets</a>
        </li>
        {link(bucket, "")}
        {parts.map((part, index) => link(part || "(empty)", `${parts.slice(0, index + 1).join("/")}/`))}
      </ol>
    </nav>
  );
}

function FolderIcon(): JSX.Element {
  return (
    <svg viewBox="0 0 16 16" width="14" height="14" aria-hidden="true" class="folder">
      <path d="M1 3h5l1.5 2H15v8H1z" />
    </svg>
  );
}

function ObjectTable({ rows, prefix, selected, onToggle, onOpen }: {
  rows: Rows;
  prefix: string;
  selected: ReadonlySet<string>;
  onToggle(key: string): void;
  onOpen(entry: Entry): void;
}): JSX.Element {
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const measure = (): void => {
    if (box.current) setView({ top: box.current.scrollTop, height: box.current.clientHeight });
  };
  // After a new listing, the box is another element, scrolled to its top.
  const empty = rows.count === 0;
  useEffect(() => {
    measure();
    addEventListener("resize", measure);
    return () => removeEventListener("resize", measure);
  }, [empty]);
  const first = Math.max(0, Math.floor(view.top / ROW) - OVERSCAN);
  const last = Math.min(rows.count, Math.ceil((view.top + view.height) / ROW) + OVERSCAN);
  useEffect(() => rows.show(first, last), [first, last, rows.count]);
  if (empty) {
    if (rows.error) return <></>;
    return rows.more || rows.loading ? (
      <p class="loading" role="status">
        Loading …
      </p>
    ) : (
      <Empty>No objects here. Drop files or folders on this page to upload them.</Empty>
    );
  }
  const shown = Array.from({ length: last - first }, (_, index) => first + index);
  const rowCount = rows.more ? -1 : rows.count;
  return (
    <>
      <p class="quiet" role="status">
        {counted(rows.count, "entry", "entries")}
        {rows.more && " so far; scroll for more"}
      </p>
      <div
        class="objects"
        ref={box}
        role="table"
        aria-label="Objects"
        aria-rowcount={rowCount}
        tabIndex={0}
        onScroll={measure}
      >
        <div role="rowgroup" class="object-head">
          <div role="row" class="object">
            <span role="columnheader">
              <span class="hidden">Selected</span>
            </span>
            <span role="columnheader">Name</span>
            <span role="columnheader" class="size">
              Size
            </span>
            <span role="columnheader" class="date">
              Modified
            </span>
          </div>
        </div>
        <div style={{ height: `${rows.count * ROW}px` }} class="canvas" role="rowgroup">
          {shown.map((index) => {
            const entry = rows.entry(index);
            const style = { top: `${index * ROW}px`, height: `${ROW}px` };
            if (!entry) {
              return (
                <div class="object" role="row" key={index} style={style} aria-rowindex={index + 2}>
                  <span role="cell" class="quiet">
                    …
                  </span>
                </div>
              );
            }
            const name = entry.key.slice(prefix.length) || entry.key;
            return (
              <div class="object" role="row" key={index} style={style} aria-rowindex={index + 2}>
                <span role="cell">
                  <input
                    type="checkbox"
                    aria-label={`Select ${entry.key}`}
                    checked={selected.has(entry.key)}
                    onChange={() => onToggle(entry.key)}
                  />
                </span>
                <span role="cell" class="name">
                  <button type="button" class="link" title={entry.key} onClick={() => onOpen(entry)}>
                    {entry.folder && <FolderIcon />}
                    <bdi dir="ltr">{shownName(name)}</bdi>
                  </button>
                </span>
                <span role="cell" class="size">
                  {entry.folder ? "" : bytes(entry.size)}
                </span>
                <span role="cell" class="date quiet">
                  {time(entry.modified)}
                </span>
              </div>
            );
          })}
        </div>
      </div>
    </>
  );
}

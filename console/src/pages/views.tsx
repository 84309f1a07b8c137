// Views: buckets whose objects are computed from those of another bucket when they are read.

import type { JSX } from "preact";
import { json } from "../api";
import { ago, count, shownName } from "../format";
import type { View, Views } from "../schema";
import { Empty, Heading, Loading, Problem, Table, useLoaded } from "../parts";

export function ViewsPage(): JSX.Element {
  const { value, error } = useLoaded((signal) => json<Views>("/-/views", { signal }), []);
  return (
    <>
      <Heading title="Views">
        <p class="quiet">A view is a bucket whose objects are computed from those of another bucket when they are read.</p>
      </Heading>
      <Problem error={error} />
      {!value && !error && <Loading />}
      {value?.views.length === 0 && <Empty>There are no views that this key may list. Create one with mesh view.</Empty>}
      {value && value.views.length > 0 && (
        <Table head={["View", "Source", "Definition", "Owner", "Created"]}>
          {value.views.map((view) => (
            <tr key={view.name}>
              <td>
                <a href={`#/buckets/${encodeURIComponent(view.name)}`}>{view.name}</a>
              </td>
              <td class="long">
                <a href={`#/buckets/${encodeURIComponent(view.bucket)}`}>s3://{view.bucket}</a>
                {view.view.prefix ? `/${shownName(String(view.view.prefix))}` : ""}
              </td>
              <td>{howOf(view.view)}</td>
              <td>{view.owner}</td>
              <td class="quiet">{ago(view.created_ms)}</td>
            </tr>
          ))}
        </Table>
      )}
    </>
  );
}

/** Describes the objects of a view. */
function wordsOf({ kind, count: samples, size, batch, world, format }: Record<string, unknown>): string {
  const number = (value: unknown): string => count(Number(value));
  switch (kind) {
    case "transform":
      return "Each object, through";
    case "shards":
      return `Shards (${String(format ?? "tar")}) of ${samples ? `${number(samples)} samples` : size ? `about ${number(size)} bytes` : "samples"}`;
    case "batches":
      return `The batches of a plan, of ${number(batch)} rows for ${number(world ?? 1)} ranks`;
    case "zarr":
      return "A Zarr array of each field, through";
    default:
      return String(kind);
  }
}

function howOf(view: View["view"]): JSX.Element {
  const { ops, ...rest } = view as { ops?: { op: string; args?: Record<string, unknown> }[] } & Record<string, unknown>;
  const told = ["prefix", "source", "bucket", "kind"];
  const more = Object.entries(rest).filter(([name, value]) => !told.includes(name) && value && !(Array.isArray(value) && !value.length));
  return (
    <>
      {wordsOf(view)} {ops?.map(({ op }) => op).join(" → ")}
      <details>
        <summary>Full definition</summary>
        {ops?.map(({ op, args }, index) => (
          <p key={index}>
            <strong>{op}</strong> <code>{JSON.stringify(args ?? {})}</code>
          </p>
        ))}
        {more.map(([name, value]) => (
          <p key={name}>
            {name.replaceAll("_", " ")}: <code>{JSON.stringify(value)}</code>
          </p>
        ))}
      </details>
    </>
  );
}

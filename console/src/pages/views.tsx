// Views: buckets whose objects are made from those of another one when they are read.

import type { JSX } from "preact";
import { json } from "../api";
import { ago } from "../format";
import type { View, Views } from "../schema";
import { Empty, Heading, Loading, Problem, Table, useLoaded } from "../parts";

export function ViewsPage(): JSX.Element {
  const { value, error } = useLoaded((signal) => json<Views>("/-/views", { signal }), []);
  return (
    <>
      <Heading title="Views">
        <p class="quiet">A view is a bucket whose objects are made from those of another one when they are read.</p>
      </Heading>
      <Problem error={error} />
      {!value && !error && <Loading />}
      {value?.views.length === 0 && <Empty>No view of this key. mesh view makes one.</Empty>}
      {value && value.views.length > 0 && (
        <Table head={["View", "Made from", "How", "Owner", "Created"]}>
          {value.views.map((view) => (
            <tr key={view.name}>
              <td>
                <a href={`#/buckets/${encodeURIComponent(view.name)}`}>{view.name}</a>
              </td>
              <td class="long">
                s3://{view.bucket}/{String(view.view.prefix ?? "")}
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

function howOf(view: View["view"]): JSX.Element {
  const { ops, ...rest } = view as { ops?: { op: string; args?: Record<string, unknown> }[] } & Record<string, unknown>;
  const more = Object.entries(rest).filter(([name, value]) => !["prefix", "source", "bucket"].includes(name) && value);
  return (
    <>
      {ops?.map(({ op }) => op).join(" → ")}
      <details>
        <summary>All of it</summary>
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

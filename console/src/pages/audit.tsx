// Audit log: the last requests from the audit logs of all nodes. For root.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { json } from "../api";
import { bytes, counted, time } from "../format";
import { Empty, Heading, Loading, Problem, Table, useLoaded } from "../parts";

interface Entry {
  node: string;
  time: string;
  request_id: string;
  remote: string;
  operation: string;
  status: number;
  ms: number;
  user?: string;
  access_key?: string;
  bucket?: string;
  key?: string;
  path?: string;
  code?: string;
  bytes_in?: number;
  bytes_out?: number;
}

const LIMIT = 300;

export function AuditPage(): JSX.Element {
  const [wanted, setWanted] = useState("");
  const { value, error, reload } = useLoaded(
    (signal) =>
      json<{ node: string; entries: Entry[]; missing: Record<string, string> }>(
        `/-/admin/audit?limit=${LIMIT}${wanted && `&containing=${encodeURIComponent(wanted)}`}`,
        { signal },
      ),
    [wanted],
  );
  return (
    <>
      <Heading title="Audit log">
        <button type="button" onClick={reload}>
          Refresh
        </button>
      </Heading>
      <form
        class="filters"
        role="search"
        onSubmit={(event) => {
          event.preventDefault();
          setWanted((event.currentTarget.elements.namedItem("wanted") as HTMLInputElement).value.trim());
        }}
      >
        <label>
          Entries that contain
          <input name="wanted" autocapitalize="none" spellcheck={false} placeholder="user, bucket, key or error code" />
        </label>
        <button type="submit">Show</button>
      </form>
      <Problem error={error} />
      {!value && !error && <Loading />}
      {Object.entries(value?.missing ?? {}).map(([node, why]) => (
        <p class="problem" key={node}>
          The requests of {node} are not shown: {why}.
        </p>
      ))}
      {value?.entries.length === 0 && <Empty>{wanted ? "No recent request contains this text." : "The audit logs have no requests yet."}</Empty>}
      {value && value.entries.length > 0 && (
        <>
          <p class="quiet">The last {counted(value.entries.length, "request")}, newest first.</p>
          <Table head={["Time", "User", "Request", "Status", "Node", "#Transferred"]}>
            {value.entries.map((entry) => (
              <tr key={`${entry.node} ${entry.request_id}`}>
                <td class="quiet" title={entry.time}>
                  {time(entry.time)}
                </td>
                <td>
                  {entry.user ?? "anonymous"} <span class="quiet">{entry.remote}</span>
                </td>
                <td class="long">
                  {entry.operation}{" "}
                  <span class="quiet">{entry.bucket ? `s3://${entry.bucket}/${entry.key ?? ""}` : entry.path}</span>
                </td>
                <td>
                  <span class={`tag ${entry.status >= 500 ? "bad" : entry.status >= 400 ? "warn" : ""}`}>{entry.status}</span>{" "}
                  {entry.code} <span class="quiet">{entry.ms.toFixed(1)} ms</span>
                </td>
                <td>{entry.node}</td>
                <td class="number">{bytes((entry.bytes_in ?? 0) + (entry.bytes_out ?? 0))}</td>
              </tr>
            ))}
          </Table>
        </>
      )}
    </>
  );
}

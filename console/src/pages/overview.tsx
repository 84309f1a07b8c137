// Overview: problems that need attention, traffic, capacity, rebalancing, and the nodes.

import type { JSX } from "preact";
import { HOUR, hitRatio, useRates, type NodeRates } from "../activity";
import type { Session } from "../api";
import { bytes, count, counted, duration, percent } from "../format";
import { useLive } from "../live";
import type { Activity, Cluster, ClusterNode, NodeActivity, Rebalance } from "../schema";
import { Chart, Heading, Loading, Meter, Table } from "../parts";

const WATCHED_BY_ROOT = ["/-/activity", "/-/cluster"];
const WATCHED = ["/-/activity"];

/** The Grafana dashboards of the Helm chart, which show more than the last hour. */
const DASHBOARDS = {
  "shardmesh-cluster": "Cluster",
  "shardmesh-nodes": "Nodes",
  "shardmesh-training": "Training",
  "shardmesh-datasets": "Datasets",
};

export function OverviewPage({ session }: { session: Session }): JSX.Element {
  const { documents, trouble } = useLive(session.root ? WATCHED_BY_ROOT : WATCHED);
  const activity = documents["/-/activity"] as Activity | undefined;
  const told = documents["/-/cluster"] as (Cluster & { error?: unknown }) | undefined;
  const cluster = told && !told.error ? told : undefined;
  const { rates, now } = useRates(activity);
  if (!activity) return trouble ? <Stale trouble={trouble} /> : <Loading />;
  const nodes = Object.values(activity.nodes);
  const total = (name: string): number => nodes.reduce((sum, node) => sum + (node.gauges[name] ?? 0), 0);
  const alerts = alertsOf(activity, cluster);
  return (
    <>
      <Heading title="Overview">
        <p class="quiet">
          {cluster
            ? `${counted(cluster.nodes.length, "node")}, ${counted(cluster.copies, "copy", "copies")} of each object`
            : `${counted(nodes.length, "node")} responding`}
        </p>
      </Heading>
      {session.grafana && (
        <p class="dashboards">
          Grafana dashboards:{" "}
          {Object.entries(DASHBOARDS).map(([name, title], index) => (
            <>
              {index > 0 && "· "}
              <a href={`${session.grafana.replace(/\/$/, "")}/d/${name}`} target="_blank" rel="noopener noreferrer">
                {title}
              </a>{" "}
            </>
          ))}
        </p>
      )}
      {trouble && <Stale trouble={trouble} />}
      <section aria-label="State" class="alerts">
        {alerts.length === 0 ? (
          <p class="good">
            <span aria-hidden="true">●</span> No problems found.
          </p>
        ) : (
          <ul>
            {alerts.map((alert) => (
              <li key={alert.text} class={alert.level}>
                {alert.text}
              </li>
            ))}
          </ul>
        )}
        {!session.root && (
          <p class="quiet">Only root sees zones, copies and rebalancing. This key sees the counters of the nodes.</p>
        )}
      </section>
      <section aria-label="Figures" class="tiles">
        <Tile title="Objects" value={count(total("objects"))} note={nodes.length > 1 ? "copies included" : ""} />
        <Tile title="Stored" value={bytes(total("live_bytes"))} note={`${bytes(total("disk_free_bytes"))} free`} />
        <Tile title="Decoded cache" value={bytes(total("decoded_cache_bytes"))} note="samples for later epochs" />
        <Tile title="Batch cache" value={bytes(total("frame_cache_bytes"))} note="in memory" />
      </section>
      <section aria-label="The last hour" class="charts">
        <Chart title="Requests" points={rates.requests ?? []} format={(value) => `${count(value)}/s`} span={HOUR} />
        <Chart title="Sent" points={rates.bytes_out ?? []} format={(value) => `${bytes(value)}/s`} span={HOUR} />
        <Chart title="Received" points={rates.bytes_in ?? []} format={(value) => `${bytes(value)}/s`} span={HOUR} />
        <Chart title="Batch rows" points={rates.rows ?? []} format={(value) => `${count(value)}/s`} span={HOUR} />
        <Chart title="Batch cache hit ratio" points={hitRatio(rates)} format={percent} span={HOUR} />
      </section>
      {cluster && <Zones cluster={cluster} now={now} />}
      <Capacity nodes={nodes} />
      {cluster?.rebalancing && <Movement rebalance={cluster.rebalance} />}
      <section aria-label="Nodes">
        <h2>Nodes</h2>
        <div class="cards">
          {nodeIds(activity, cluster).map((id) => (
            <NodeCard
              key={id}
              id={id}
              activity={activity.nodes[id]}
              node={cluster?.nodes.find((each) => each.id === id)}
              here={id === activity.node}
            />
          ))}
        </div>
      </section>
    </>
  );
}

/** The traffic of each zone, if there are several. */
function Zones({ cluster, now }: { cluster: Cluster; now: NodeRates }): JSX.Element {
  const zones = new Map<string, string[]>();
  for (const { id, zone } of cluster.nodes) zones.set(zone, [...(zones.get(zone) ?? []), id]);
  if (zones.size < 2) return <></>;
  const of = (ids: string[], name: string): number => ids.reduce((sum, id) => sum + (now[id]?.[name] ?? 0), 0);
  return (
    <section aria-label="Zones" class="card">
      <h2>Traffic by zone</h2>
      <Table head={["Zone", "Nodes", "Requests", "Sent", "Received", "Batch rows"]}>
        {[...zones].sort().map(([zone, ids]) => (
          <tr key={zone}>
            <td>{zone}</td>
            <td>{ids.sort().join(", ")}</td>
            <td>{count(of(ids, "requests"))}/s</td>
            <td>{bytes(of(ids, "bytes_out"))}/s</td>
            <td>{bytes(of(ids, "bytes_in"))}/s</td>
            <td>{count(of(ids, "rows"))}/s</td>
          </tr>
        ))}
      </Table>
    </section>
  );
}

/** The usage and the limit of each tier, from the slowest to the fastest. */
function Capacity({ nodes }: { nodes: NodeActivity[] }): JSX.Element {
  const gauge = (name: string): number => nodes.reduce((sum, node) => sum + (node.gauges[name] ?? 0), 0);
  const disk = (kind: string, name: string): number => nodes.reduce((sum, node) => sum + (node.disks?.[kind]?.[name] ?? 0), 0);
  const tiers = ["rotational", "solid-state"].map((kind) => ({
    title: kind === "rotational" ? "Rotational disks" : "Solid-state disks",
    used: disk(kind, "bytes") - disk(kind, "free"),
    total: disk(kind, "bytes"),
  }));
  tiers.push(
    { title: "Origin cache", used: gauge("cache_bytes"), total: gauge("cache_capacity") },
    { title: "Decoded cache", used: gauge("decoded_cache_bytes"), total: gauge("decoded_cache_limit") },
    { title: "Batch cache, in memory", used: gauge("frame_cache_bytes"), total: gauge("frame_cache_limit") },
    { title: "Memory", used: gauge("memory_bytes") - gauge("memory_free_bytes"), total: gauge("memory_bytes") },
  );
  return (
    <section aria-label="Capacity" class="card">
      <h2>Capacity by tier</h2>
      {tiers
        .filter(({ total }) => total > 0)
        .map(({ title, used, total }) => (
          <Meter key={title} goal={title.includes("cache")} label={title} used={used} total={total} text={`${bytes(used)} of ${bytes(total)}`} />
        ))}
    </section>
  );
}

function nodeIds(activity: Activity, cluster: Cluster | undefined): string[] {
  const ids = new Set([...Object.keys(activity.nodes), ...activity.silent]);
  for (const node of cluster?.nodes ?? []) ids.add(node.id);
  const zones = Object.fromEntries((cluster?.nodes ?? []).map(({ id, zone }) => [id, zone]));
  const place = (id: string): string => `${zones[id] ?? ""} ${id}`; // groups the nodes of a zone
  return [...ids].sort((left, right) => place(left).localeCompare(place(right), "en", { numeric: true }));
}

function Stale({ trouble }: { trouble: string }): JSX.Element {
  return (
    <p class="problem" role="alert">
      {trouble} The page reconnects by itself; until then, what it shows may be out of date.
    </p>
  );
}

function Tile({ title, value, note }: { title: string; value: string; note: string }): JSX.Element {
  return (
    <div class="tile">
      <span class="quiet">{title}</span>
      <strong>{value}</strong>
      <span class="quiet">{note}</span>
    </div>
  );
}

interface Alert {
  level: "bad" | "warn";
  text: string;
}

function alertsOf(activity: Activity, cluster: Cluster | undefined): Alert[] {
  const alerts: Alert[] = [];
  const add = (level: Alert["level"], text: string): void => void alerts.push({ level, text });
  const told = new Set<string>();
  for (const node of cluster?.nodes ?? []) {
    if (node.state === "down") add("bad", `${node.id} is down: its data is being copied from other nodes. Restart it, or replace it.`);
    else if (node.state === "away" || node.absent) add("bad", `${node.id} is not running or cannot be reached: start it, or check its network.`);
    else if (node.silent) add("warn", `${node.id} does not answer in time: check its load and its disks.`);
    else if (node.refused) add("warn", `This node does not trust the certificate of ${node.id}: ${node.refused}. Check the certificates and CA files of both nodes.`);
    else continue;
    told.add(node.id);
  }
  for (const id of activity.silent) if (!told.has(id)) add("warn", `${id} does not report its activity: check that it is running.`);
  if (cluster && cluster.control !== "reached") add("bad", `Buckets, users, keys and jobs cannot be changed, because the control store is unavailable: ${cluster.control}`);
  if (cluster && !cluster.clocks_agree) add("warn", "The clocks of the nodes differ too much: check that NTP works on all machines.");
  if (cluster && cluster.under_replicated > 0) {
    add("warn", `${counted(cluster.under_replicated, "object is", "objects are")} under-replicated: mesh cluster status shows the progress of the repair.`);
  }
  for (const [id, { gauges }] of Object.entries(activity.nodes)) {
    const used = 1 - (gauges.disk_free_bytes ?? 0) / (gauges.disk_bytes || 1);
    if (gauges.disk_bytes && used > 0.95) add("bad", `The disks of ${id} are ${percent(used)} full: delete data, or add disks or nodes.`);
    else if (gauges.disk_bytes && used > 0.85) add("warn", `The disks of ${id} are ${percent(used)} full: plan to delete data, or to add disks or nodes.`);
    if (gauges.disks_lost) add("bad", `${counted(gauges.disks_lost, "disk")} of ${id} out of service: check the kernel log of the machine, and replace the failed hardware.`);
    if (gauges.quarantined) add("bad", `${counted(gauges.quarantined, "object version")} on ${id} quarantined because of damaged bytes: repaired if another node has a copy; otherwise upload the objects again.`);
  }
  return alerts;
}

function Movement({ rebalance }: { rebalance: Rebalance }): JSX.Element {
  const { bytes_total: total, bytes_moved: moved, eta_seconds: eta, takers, blocked_by: blocked } = rebalance;
  return (
    <section aria-label="Movement" class="notice">
      <h2>Rebalancing: data moves between nodes</h2>
      <Meter goal label="Moved" used={moved} total={total} text={`${bytes(moved)} of ${bytes(total)} found so far`} />
      <p>
        {blocked
          ? `Blocked: ${blocked}.`
          : eta
            ? `About ${duration(eta)} remaining.`
            : "The remaining time is still unknown."}{" "}
        {takers.length > 0 && `Still receiving: ${takers.join(", ")}.`} Reads and writes continue.
      </p>
    </section>
  );
}

function NodeCard({ id, activity, node, here }: {
  id: string;
  activity: NodeActivity | undefined;
  node: ClusterNode | undefined;
  here: boolean;
}): JSX.Element {
  const gauges = activity?.gauges ?? {};
  const value = (name: string): number => gauges[name] ?? 0;
  const state = !activity ? "no response" : node?.leaving ? "leaving" : (node?.state ?? "running");
  const well = Boolean(activity) && ["up", "running"].includes(state);
  return (
    <article class="card" aria-label={`Node ${id}`}>
      <h3>
        <span class={`dot ${well ? "good" : activity ? "warn" : "bad"}`} aria-hidden="true" />
        {id}
        <span class={`tag ${well ? "good" : "warn"}`}>{state}</span>
        {here && <span class="tag">serves this page</span>}
      </h3>
      <p class="quiet">
        {node?.zone && `zone ${node.zone} · `}
        {node ? node.roles.join(", ") : ""}
        {activity && `${node ? " · " : ""}${counted(value("cores"), "core")} · ${counted(value("connections"), "connection")}`}
      </p>
      {activity && (
        <>
          <Meter
            label="Disks"
            used={value("disk_bytes") - value("disk_free_bytes")}
            total={value("disk_bytes")}
            text={`${bytes(value("live_bytes"))} in objects, ${bytes(value("disk_free_bytes"))} free of ${bytes(value("disk_bytes"))}`}
          />
          <Meter
            label="Memory"
            used={value("memory_bytes") - value("memory_free_bytes")}
            total={value("memory_bytes")}
            text={`${bytes(value("memory_free_bytes"))} free of ${bytes(value("memory_bytes"))}`}
          />
          {value("cache_bytes") > 0 && (
            <Meter
              label="Origin cache"
              used={value("cache_bytes")}
              total={value("cache_capacity")}
              text={`${bytes(value("cache_bytes"))} of ${bytes(value("cache_capacity"))}`}
            />
          )}
        </>
      )}
      {!activity && <p>The node does not respond. Objects with a copy on another node stay readable.</p>}
    </article>
  );
}

// Overview: the nodes, what they hold and do, what moves, and what needs attention, in words.

import type { JSX } from "preact";
import { HOUR, hitRatio, useRates, type NodeRates } from "../activity";
import type { Session } from "../api";
import { bytes, count, duration, percent } from "../format";
import { useLive } from "../live";
import type { Activity, Cluster, ClusterNode, NodeActivity, Rebalance } from "../schema";
import { Chart, Heading, Loading, Meter, Table } from "../parts";

const WATCHED_BY_ROOT = ["/-/activity", "/-/cluster"];
const WATCHED = ["/-/activity"];

/** The dashboards of the chart, which keep more than an hour. */
const DASHBOARDS = {
  "shardmesh-cluster": "the mesh",
  "shardmesh-nodes": "the nodes",
  "shardmesh-training": "training",
  "shardmesh-datasets": "datasets",
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
            ? `${cluster.nodes.length === 1 ? "One node" : `${cluster.nodes.length} nodes`}, ${cluster.copies === 1 ? "one copy" : `${cluster.copies} copies`} of each object`
            : `${nodes.length === 1 ? "One node answers" : `${nodes.length} nodes answer`}`}
        </p>
      </Heading>
      {session.grafana && (
        <p>
          In Grafana:{" "}
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
            <span aria-hidden="true">●</span> Everything is in order.
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
          <p class="quiet">Only root sees zones, copies and moving data; this key sees the counters of the nodes.</p>
        )}
      </section>
      <section aria-label="Figures" class="tiles">
        <Tile title="Objects" value={count(total("objects"))} note={nodes.length > 1 ? "with their copies" : ""} />
        <Tile title="Stored" value={bytes(total("live_bytes"))} note={`${bytes(total("disk_free_bytes"))} free`} />
        <Tile title="Decoded once" value={bytes(total("decoded_cache_bytes"))} note="samples kept for later epochs" />
        <Tile title="Finished batches" value={bytes(total("frame_cache_bytes"))} note="in memory" />
      </section>
      <section aria-label="The last hour" class="charts">
        <Chart title="Requests" points={rates.requests ?? []} format={(value) => `${count(value)}/s`} span={HOUR} />
        <Chart title="Sent" points={rates.bytes_out ?? []} format={(value) => `${bytes(value)}/s`} span={HOUR} />
        <Chart title="Received" points={rates.bytes_in ?? []} format={(value) => `${bytes(value)}/s`} span={HOUR} />
        <Chart title="Rows of batches" points={rates.rows ?? []} format={(value) => `${count(value)}/s`} span={HOUR} />
        <Chart title="Batches ready or shared" points={hitRatio(rates)} format={percent} span={HOUR} />
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
      <Table head={["Zone", "Nodes", "Requests", "Sent", "Received", "Rows of batches"]}>
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

/** What the mesh can hold on each tier, from the slowest to the fastest. */
function Capacity({ nodes }: { nodes: NodeActivity[] }): JSX.Element {
  const gauge = (name: string): number => nodes.reduce((sum, node) => sum + (node.gauges[name] ?? 0), 0);
  const disk = (kind: string, name: string): number => nodes.reduce((sum, node) => sum + (node.disks?.[kind]?.[name] ?? 0), 0);
  const tiers = ["rotational", "solid-state"].map((kind) => ({
    title: kind === "rotational" ? "Rotational disks" : "Solid-state disks",
    used: disk(kind, "bytes") - disk(kind, "free"),
    total: disk(kind, "bytes"),
  }));
  tiers.push(
    { title: "Cache of origins", used: gauge("cache_bytes"), total: gauge("cache_capacity") },
    { title: "Decoded samples", used: gauge("decoded_cache_bytes"), total: gauge("decoded_cache_limit") },
    { title: "Finished batches, in memory", used: gauge("frame_cache_bytes"), total: gauge("frame_cache_limit") },
    { title: "Memory", used: gauge("memory_bytes") - gauge("memory_free_bytes"), total: gauge("memory_bytes") },
  );
  return (
    <section aria-label="Capacity" class="card">
      <h2>Capacity by tier</h2>
      {tiers
        .filter(({ total }) => total > 0)
        .map(({ title, used, total }) => (
          <Meter key={title} goal={title.includes("samples") || title.includes("ache")} label={title} used={used} total={total} text={`${bytes(used)} of ${bytes(total)}`} />
        ))}
    </section>
  );
}

function nodeIds(activity: Activity, cluster: Cluster | undefined): string[] {
  const ids = new Set([...Object.keys(activity.nodes), ...activity.silent]);
  for (const node of cluster?.nodes ?? []) ids.add(node.id);
  const zones = Object.fromEntries((cluster?.nodes ?? []).map(({ id, zone }) => [id, zone]));
  const place = (id: string): string => `${zones[id] ?? ""} ${id}`; // those of a zone together
  return [...ids].sort((left, right) => place(left).localeCompare(place(right), "en", { numeric: true }));
}

function Stale({ trouble }: { trouble: string }): JSX.Element {
  return (
    <p class="problem" role="alert">
      {trouble} What is shown below may be old; the page goes on by itself.
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
    if (node.state === "down") add("bad", `${node.id} is down: its data is being copied from other nodes. Start it again, or replace it.`);
    else if (node.state === "away" || node.absent) add("bad", `${node.id} is not running or cannot be reached: start it, or check its network.`);
    else if (node.silent) add("warn", `${node.id} does not answer in time: check its load and its disks.`);
    else if (node.refused) add("warn", `This node does not trust the certificate of ${node.id}: ${node.refused}.`);
    else continue;
    told.add(node.id);
  }
  for (const id of activity.silent) if (!told.has(id)) add("warn", `${id} does not report its activity: check that it is running.`);
  if (cluster && cluster.control !== "reached") add("bad", `Buckets, users, keys and jobs cannot be changed, because the control store cannot be used: ${cluster.control}`);
  if (cluster && !cluster.clocks_agree) add("warn", "The clocks of the nodes differ too much: check that all machines synchronize their time (NTP).");
  if (cluster && cluster.under_replicated > 0) {
    add("warn", `${count(cluster.under_replicated)} objects have too few copies: mesh cluster status says what the nodes do about it.`);
  }
  for (const [id, { gauges }] of Object.entries(activity.nodes)) {
    const used = 1 - (gauges.disk_free_bytes ?? 0) / (gauges.disk_bytes || 1);
    if (gauges.disk_bytes && used > 0.95) add("bad", `The disks of ${id} are ${percent(used)} full: delete data, or add disks or nodes.`);
    else if (gauges.disk_bytes && used > 0.85) add("warn", `The disks of ${id} are ${percent(used)} full.`);
    if (gauges.disks_lost) add("bad", `${count(gauges.disks_lost)} disks of ${id} are out of service: look at its kernel log, and replace them.`);
    if (gauges.quarantined) add("bad", `${count(gauges.quarantined)} versions on ${id} have damaged bytes: they are restored if another node has them; otherwise upload them again.`);
  }
  return alerts;
}

function Movement({ rebalance }: { rebalance: Rebalance }): JSX.Element {
  const { bytes_total: total, bytes_moved: moved, eta_seconds: eta, takers, blocked_by: blocked } = rebalance;
  return (
    <section aria-label="Movement" class="notice">
      <h2>Data is moving between the nodes</h2>
      <Meter goal label="Moved" used={moved} total={total} text={`${bytes(moved)} of ${bytes(total)}, as far as known`} />
      <p>
        {blocked
          ? `It waits: ${blocked}.`
          : eta
            ? `About ${duration(eta)} left.`
            : "The remaining time is not known yet."}{" "}
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
  const state = !activity ? "silent" : node?.leaving ? "leaving" : (node?.state ?? "running");
  const well = Boolean(activity) && ["up", "running"].includes(state);
  return (
    <article class="card" aria-label={`Node ${id}`}>
      <h3>
        <span class={`dot ${well ? "good" : activity ? "warn" : "bad"}`} aria-hidden="true" />
        {id}
        <span class={`tag ${well ? "good" : "warn"}`}>{state}</span>
        {here && <span class="tag">this page</span>}
      </h3>
      <p class="quiet">
        {node?.zone && `zone ${node.zone} · `}
        {node ? node.roles.join(", ") : ""}
        {activity && `${node ? " · " : ""}${count(value("cores"))} cores · ${count(value("connections"))} connections`}
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
              label="Cache of origins"
              used={value("cache_bytes")}
              total={value("cache_capacity")}
              text={`${bytes(value("cache_bytes"))} of ${bytes(value("cache_capacity"))}`}
            />
          )}
        </>
      )}
      {!activity && <p>It has not answered. Objects with another copy stay readable.</p>}
    </article>
  );
}

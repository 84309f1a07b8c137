// Generated from meshd/server/api/reply_types.py by `make reference`: do not edit.

/** What the nodes count, by node; `silent` ones did not answer. */
export interface Activity {
  node: string;
  nodes: Record<string, NodeActivity>;
  silent: string[];
}

/** A sample that an op could not use. */
export interface BadSample {
  key: string;
  op: string;
  error: string;
  position: number;
  epoch: number;
  times: number;
}

/** The mesh as a node sees it. */
export interface Cluster {
  node: string;
  version: number;
  copies: number;
  rebalancing: boolean;
  rebalance: Rebalance;
  under_replicated: number;
  control: string;
  clocks_agree: boolean;
  nodes: ClusterNode[];
}

/** A node of the mesh. */
export interface ClusterNode {
  id: string;
  state: string;
  leaving: boolean;
  endpoint: string;
  zone: string;
  rack: string;
  roles: string[];
  silent: boolean;
  absent: boolean;
  refused: string;
  only_copies: boolean;
}

/** What an op drew for a row. `moved` is null if the image stayed as it was. */
export interface DrawnOp {
  index: number;
  op: string;
  field: string;
  drawn?: Record<string, unknown>;
  moved?: Movement | null;
  note?: string;
}

/** What the ops drew for a row. */
export interface Draws {
  sample: number;
  position: number;
  ops: DrawnOp[];
  images: Record<string, ShownPart>;
}

/** A field of a snapshot. Of a label: the number of `classes` and `counts` as [class, samples]. Of bytes: a `histogram` as [lowest size, samples]. */
export interface FieldStatistics {
  kind: "bytes" | "label";
  dtype?: string;
  shape?: number[];
  classes?: number;
  counts?: [string, number][];
  bytes?: number;
  least?: number;
  most?: number;
  histogram?: [number, number][];
}

/** A bulk job; `spec` is what was asked for, and `eta_s` is null while it is unknown. */
export interface Job {
  id: string;
  kind: string;
  state: string;
  owner: string;
  node: string;
  spec: Record<string, unknown>;
  created_ms: number;
  progress: JobProgress;
  eta_s: number | null;
  failed: number;
  failures: JobFailure[];
  error: string;
}

/** A source that a job could not read. */
export interface JobFailure {
  name: string;
  error: string;
}

/** How far a job is; `rate` in bytes per second. */
export interface JobProgress {
  bytes: number;
  bytes_total: number;
  rate: number;
}

/** The jobs of the caller, or all for root. */
export interface Jobs {
  jobs: Job[];
}

/** What a loader reports: seconds of its loop and of waiting, by cause; `epochs` is how far its loop is in the data, `epochs_requested` what it has requested; `user` is whose key it has. */
export interface LoaderActivity {
  samples: number;
  seconds: number;
  waited: number;
  epochs: number;
  epochs_requested: number;
  epoch_samples: number;
  stalls: Record<string, number>;
  plan: string;
  user: string;
}

/** A module with its builds, latest first. */
export interface Module {
  module: string;
  version: string;
  builds: ModuleBuild[];
}

/** A pushed content of a module. */
export interface ModuleBuild {
  version: string;
  source: string;
  pushed_ms: number;
  pushed_by: string;
  ops: string[];
  draft: boolean;
}

/** Modules, sorted by name. */
export interface Modules {
  modules: Module[];
}

/** Where an op moved an image: `corners` of the result in its input as [x, y], left upper, right upper, right lower, left lower. */
export interface Movement {
  height: number;
  width: number;
  corners: [number, number][];
  mirrored: boolean;
  degrees: number;
}

/** What a node counts; `time` in milliseconds since 1970. */
export interface NodeActivity {
  time: number;
  totals: Record<string, number>;
  gauges: Record<string, number>;
  loaders: Record<string, LoaderActivity>;
  plans?: Record<string, PlanActivity>;
  disks?: Record<string, Record<string, number>>;
  history?: Record<string, number[]>;
}

/** An op of the library. */
export interface Op {
  op: string;
  version: string;
  summary: string;
  takes: string;
  gives: string;
  arguments: string[];
}

/** The op library. */
export interface Ops {
  ops: Op[];
}

/** What a plan costs a node: rows that were rendered, their processor seconds and seconds of reading; samples that were `read_ahead` with so many `seeks`; frames that were `made`, and requests that `shared` one. */
export interface PlanActivity {
  rows: number;
  cpu: number;
  reading: number;
  seeks: number;
  read_ahead: number;
  made: number;
  shared: number;
}

/** A plan with its spec. */
export interface PlanDescription {
  plan: string;
  snapshot: string;
  spec: Record<string, unknown>;
}

/** A page of plans; `next` is empty on the last one. */
export interface Plans {
  plans: StoredPlan[];
  next: string;
  silent: string[];
}

/** What moves between the nodes. */
export interface Rebalance {
  bytes_total: number;
  bytes_moved: number;
  eta_seconds: number | null;
  takers: string[];
  blocked_by: string;
}

/** Objects of a bucket on a node; with an origin, recent reads that found them there or did not. */
export interface Residence {
  node: string;
  bucket: string;
  cached: boolean;
  objects: number;
  bytes: number;
  partial: boolean;
  used: number;
  capacity: number;
  hits?: number;
  misses?: number;
  idle_s?: number;
}

/** The class of a row: its number and its name. */
export interface RowLabel {
  value: number;
  class: string;
}

/** The bytes that a field of a row is made of; `size` is that of the whole object. */
export interface RowPlace {
  bucket: string;
  key: string;
  offset: number;
  length: number;
  size: number;
}

/** The sample behind a row; labels and bytes by field. */
export interface RowSource {
  position: number;
  sample: number;
  name: string;
  pad: boolean;
  labels: Record<string, RowLabel>;
  sources: Record<string, RowPlace>;
}

/** Which part of its source an image of a row shows. */
export interface ShownPart {
  height: number;
  width: number;
  source: Size;
  corners: [number, number][];
}

/** In pixels. */
export interface Size {
  height: number;
  width: number;
}

/** A page of snapshots; `next` is empty on the last one. */
export interface Snapshots {
  snapshots: StoredSnapshot[];
  next: string;
  silent: string[];
}

/** The samples behind the rows of a batch; `steps` and `samples` of the epoch. */
export interface Sources {
  steps: number;
  samples: number;
  rows: RowSource[];
}

/** Statistics of a snapshot. */
export interface Statistics {
  snapshot: string;
  source: string;
  kind: string;
  samples: number;
  shards: number;
  objects: number;
  bytes: number;
  buckets: string[];
  fields: Record<string, FieldStatistics>;
}

/** What is known of a stored document. Times are in milliseconds since 1970; `expires_ms` is null if it stays. */
export interface StoredDocument {
  hash: string;
  buckets: string[];
  bytes: number;
  nodes: number;
  used_ms: number;
  expires_ms: number | null;
  kept_by: string[];
}

/** A plan in a listing. */
export interface StoredPlan {
  hash: string;
  buckets: string[];
  bytes: number;
  nodes: number;
  used_ms: number;
  expires_ms: number | null;
  kept_by: string[];
  snapshot: string;
  samples: number;
  ops: string[];
}

/** A snapshot in a listing. */
export interface StoredSnapshot {
  hash: string;
  buckets: string[];
  bytes: number;
  nodes: number;
  used_ms: number;
  expires_ms: number | null;
  kept_by: string[];
  source: string;
  kind: string;
}

/** The first rows of a table: `columns` as [name, type], without `hidden` further ones. */
export interface TablePreview {
  columns: [string, string][];
  hidden: number;
  rows: ((string | null)[])[];
}

/** A trial of ops; `output` is the type of the results. */
export interface Trial {
  output: string;
  results: TrialResult[];
}

/** What became of one object: the `result` in Base64, or an `error` with its `code` and op. */
export interface TrialResult {
  sample: string;
  code?: string;
  op?: string;
  error?: string;
  size?: number;
  seconds?: number;
  repeats?: boolean;
  result?: string;
}

/** A view on the objects of a bucket. */
export interface View {
  name: string;
  bucket: string;
  owner: string;
  created_ms: number;
  view: Record<string, unknown>;
}

/** Views, sorted by name. */
export interface Views {
  views: View[];
}

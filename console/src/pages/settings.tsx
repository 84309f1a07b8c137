// Settings of a bucket: policy and lifecycle rules in words, versioning, tags, and, for root, its origin and its data on
// this node.

import type { JSX } from "preact";
import { ifThere, json, request, xml } from "../api";
import { bytes, count, counted, duration, percent } from "../format";
import type { Residence } from "../schema";
import { Dialog, Loading, Problem, useLoaded } from "../parts";
import { policyWords, type Policy } from "../policy";
import { Expiry } from "./expiry";

interface BucketFacts {
  copies?: number;
  origin?: { url: string; write: string } | null;
}

interface Settings {
  policy: Policy | null;
  versioning: string;
  tags: [string, string][];
}

async function loadSettings(bucket: string): Promise<Settings> {
  const [policy, versioning, tags] = await Promise.all([
    ifThere(request(`/${bucket}?policy`).then((response) => response.json() as Promise<Policy>), "NoSuchBucketPolicy"),
    xml(`/${bucket}?versioning`),
    ifThere(xml(`/${bucket}?tagging`), "NoSuchTagSet"),
  ]);
  const set = tags?.children.find((each) => each.name === "TagSet")?.all("Tag") ?? [];
  return {
    policy,
    versioning: versioning.text("Status"),
    tags: set.map((tag) => [tag.text("Key"), tag.text("Value")]),
  };
}

async function loadPlace(bucket: string): Promise<{ facts: BucketFacts | null; here: Residence }> {
  const [facts, here] = await Promise.all([
    ifThere(json<BucketFacts>(`/-/buckets/${bucket}`), "NoSuchBucket", "BadRequest", "NoSuchKey"),
    json<Residence>(`/-/residence/${bucket}`),
  ]);
  return { facts, here };
}

export function SettingsDialog({ bucket, root, onClose }: {
  bucket: string;
  root: boolean;
  onClose(): void;
}): JSX.Element {
  const { value, error } = useLoaded(() => loadSettings(bucket), [bucket]);
  return (
    <Dialog title={`Settings of ${bucket}`} onClose={onClose} wide>
      <Problem error={error} />
      {!value && !error && <Loading />}
      {value && (
        <>
          <h3>Bucket policy</h3>
          <p class="quiet">Without a policy, the owner, root, and users whose own policies allow it have access.</p>
          {value.policy ? <PolicyWords policy={value.policy} /> : <p>The bucket has no policy.</p>}
          <h3>Versioning</h3>
          <p>
            {value.versioning === "Enabled"
              ? "Enabled: replaced and deleted objects are kept as versions."
              : value.versioning === "Suspended"
                ? "Suspended: new versions are not kept; existing ones remain."
                : "Off: replaced and deleted objects cannot be restored."}
          </p>
          <h3>Tags</h3>
          <p>
            {value.tags.length === 0 && "The bucket has no tags."}
            {value.tags.map(([name, tag]) => (
              <span class="tag" key={name}>
                {name}: {tag}
              </span>
            ))}
          </p>
        </>
      )}
      <Expiry bucket={bucket} />
      {root && <Place bucket={bucket} />}
    </Dialog>
  );
}

export function PolicyWords({ policy }: { policy: Policy }): JSX.Element {
  return (
    <>
      <ul class="words">
        {policyWords(policy).map(({ effect, text }, index) => (
          <li key={index}>
            <span class={`tag ${effect === "Allow" ? "good" : "bad"}`}>{effect === "Allow" ? "allow" : "deny"}</span> {text}
          </li>
        ))}
      </ul>
      <details>
        <summary>As JSON</summary>
        <pre class="preview" tabIndex={0} aria-label="The policy as JSON">
          {JSON.stringify(policy, null, 2)}
        </pre>
      </details>
    </>
  );
}

function Place({ bucket }: { bucket: string }): JSX.Element {
  const { value, error } = useLoaded(() => loadPlace(bucket), [bucket]);
  const reads = (value?.here.hits ?? 0) + (value?.here.misses ?? 0);
  return (
    <>
      <h3>Storage</h3>
      <Problem error={error} />
      {value?.facts?.origin && (
        <p class="long">
          Origin: {value.facts.origin.url}. Objects are cached when they are read.{" "}
          {value.facts.origin.write === "off" ? "The bucket is read-only." : `Writes go to the origin (write mode: ${value.facts.origin.write}).`}
        </p>
      )}
      {value?.facts?.copies && <p>Copies of each object: {count(value.facts.copies)}.</p>}
      {value && (
        <p>
          On {value.here.node}: {counted(value.here.objects, "object")}, {bytes(value.here.bytes)}
          {reads > 0 && `; cache hit ratio of recent reads ${percent((value.here.hits ?? 0) / reads)}`}
          {value.here.idle_s !== undefined && value.here.idle_s > 0 && `; last read ${duration(value.here.idle_s)} ago`}.
        </p>
      )}
    </>
  );
}

// Lifecycle rules of a bucket: what expires when, in words, and the document of S3 with a rule more or less.

import { request, xml } from "./api";
import { bytes } from "./format";
import { crc32, escapeXml } from "./s3";
import { XmlElement } from "./xml";

function days(text: string): string {
  return text === "1" ? "one day" : `${text} days`;
}

/** What a filter selects; its parts may be together in an `And`. */
function selected(rule: XmlElement): string {
  const filter = rule.all("Filter")[0] ?? rule;
  const parts = filter.all("And")[0] ?? filter;
  const found = [
    ...parts.all("Prefix").filter(({ content }) => content).map(({ content }) => `that begin with ${content}`),
    ...parts.all("Tag").map((tag) => `with the tag ${tag.text("Key")}: ${tag.text("Value")}`),
    ...parts.all("ObjectSizeGreaterThan").map(({ content }) => `larger than ${bytes(Number(content))}`),
    ...parts.all("ObjectSizeLessThan").map(({ content }) => `smaller than ${bytes(Number(content))}`),
  ];
  return `objects${found.length ? ` ${found.join(", ")}` : ""}`;
}

const ACTIONS: Record<string, (action: XmlElement, what: string) => string[]> = {
  Expiration: (action, what) => [
    ...action.all("Days").map(({ content }) => `${what} are deleted ${days(content)} after they were stored`),
    ...action.all("Date").map(({ content }) => `${what} are deleted on ${content.slice(0, 10)}`),
    ...action
      .all("ExpiredObjectDeleteMarker")
      .filter(({ content }) => content === "true")
      .map(() => "delete markers without other versions are removed"),
  ],
  NoncurrentVersionExpiration: (action, what) => {
    const kept = action.text("NewerNoncurrentVersions");
    return [
      `earlier versions of ${what} are removed ${days(action.text("NoncurrentDays"))} after they were replaced` +
        (kept && `, except the last ${kept}`),
    ];
  },
  AbortIncompleteMultipartUpload: (action, what) => [
    `uploads of ${what} that do not end are given up after ${days(action.text("DaysAfterInitiation"))}`,
  ],
};
const KNOWN = ["ID", "Status", "Filter", "Prefix"];

export interface Rule {
  id: string;
  enabled: boolean;
  text: string;
}

/** Returns a sentence for each rule. What has no words here is quoted. */
export function ruleWords(document: XmlElement | null): Rule[] {
  return (document?.all("Rule") ?? []).map((rule) => {
    const what = selected(rule);
    const found = rule.children
      .filter(({ name }) => !KNOWN.includes(name))
      .flatMap((action) => ACTIONS[action.name]?.(action, what) ?? [`${what}: ${serialized(action)}`]);
    const text = `${found.join("; ")}.`;
    return { id: rule.text("ID"), enabled: rule.text("Status") === "Enabled", text: text[0]!.toUpperCase() + text.slice(1) };
  });
}

function serialized(element: XmlElement): string {
  const content = element.children.length ? element.children.map(serialized).join("") : escapeXml(element.content);
  return `<${element.name}>${content}</${element.name}>`;
}

export async function loadRules(bucket: string): Promise<XmlElement> {
  return xml(`/${bucket}?lifecycle`);
}

/** Stores these rules instead of the bucket's; without any, the bucket has none. */
async function store(bucket: string, rules: string[]): Promise<void> {
  if (rules.length === 0) {
    await request(`/${bucket}?lifecycle`, { method: "DELETE" });
    return;
  }
  const body = new TextEncoder().encode(
    `<LifecycleConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">${rules.join("")}</LifecycleConfiguration>`,
  );
  const headers = { "content-type": "application/xml", "x-amz-checksum-crc32": crc32(body) };
  await request(`/${bucket}?lifecycle`, { method: "PUT", headers, body });
}

export async function removeRule(bucket: string, document: XmlElement, at: number): Promise<void> {
  await store(bucket, document.all("Rule").filter((_, index) => index !== at).map(serialized));
}

export async function addRule(bucket: string, document: XmlElement | null, prefix: string, after: number): Promise<void> {
  const rule =
    `<Rule><Status>Enabled</Status><Filter><Prefix>${escapeXml(prefix)}</Prefix></Filter>` +
    `<Expiration><Days>${after}</Days></Expiration></Rule>`;
  await store(bucket, [...(document?.all("Rule") ?? []).map(serialized), rule]);
}

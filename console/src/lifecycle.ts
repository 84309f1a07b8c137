// Lifecycle rules of a bucket: their description in words, and changes of the S3 document.

import { request, xml } from "./api";
import { bytes } from "./format";
import { crc32, escapeXml } from "./s3";
import { parseXml, type XmlElement } from "./xml";

function days(text: string): string {
  return text === "1" ? "one day" : `${text} days`;
}

/** Describes the filter of a rule. Several conditions are in an `And`. */
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
    `incomplete uploads of ${what} are aborted after ${days(action.text("DaysAfterInitiation"))}`,
  ],
};
const KNOWN = ["ID", "Status", "Filter", "Prefix"];

export interface Rule {
  id: string;
  enabled: boolean;
  text: string;
}

/** Returns a description of each rule. Unknown elements are quoted as XML. */
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

/** Replaces the rules of a bucket; an empty list removes its lifecycle configuration. */
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

/** Enables or disables a rule. */
export async function switchRule(bucket: string, document: XmlElement, at: number, on: boolean): Promise<void> {
  const rules = document.all("Rule").map(serialized);
  rules[at] = rules[at]!.replace(/<Status>\w+<\/Status>/, `<Status>${on ? "Enabled" : "Disabled"}</Status>`);
  await store(bucket, rules);
}

export async function addRule(bucket: string, document: XmlElement | null, draft: Draft): Promise<void> {
  await store(bucket, [...(document?.all("Rule") ?? []).map(serialized), ruleXml(draft)]);
}

export type Action = "days" | "date" | "versions" | "markers" | "uploads";

/** A rule with one action. Sizes are in bytes; null: no limit. */
export interface Draft {
  action: Action;
  prefix: string;
  tags: [string, string][];
  larger: number | null;
  smaller: number | null;
  days: number;
  /** As `2027-01-31`. */
  date: string;
  /** The number of earlier versions to keep; null: none. */
  keep: number | null;
}

/** Whether a rule applies to an object of this size; null: an item without a size. */
export function matches({ larger, smaller }: Draft, size: number | null): boolean {
  if (size === null) return larger === null && smaller === null;
  return (larger === null || size > larger) && (smaller === null || size < smaller);
}

const element = (name: string, content: string | number): string => `<${name}>${escapeXml(String(content))}</${name}>`;

function ruleXml(draft: Draft): string {
  const conditions = [
    ...(draft.prefix ? [element("Prefix", draft.prefix)] : []),
    ...draft.tags.map(([name, value]) => `<Tag>${element("Key", name)}${element("Value", value)}</Tag>`),
    ...(draft.larger === null ? [] : [element("ObjectSizeGreaterThan", draft.larger)]),
    ...(draft.smaller === null ? [] : [element("ObjectSizeLessThan", draft.smaller)]),
  ];
  const inside = conditions.join("");
  const filter = conditions.length > 1 ? `<And>${inside}</And>` : inside;
  const keep = draft.keep === null ? "" : element("NewerNoncurrentVersions", draft.keep);
  const actions: Record<Action, () => string> = {
    days: () => `<Expiration>${element("Days", draft.days)}</Expiration>`,
    date: () => `<Expiration>${element("Date", `${draft.date}T00:00:00Z`)}</Expiration>`,
    markers: () => `<Expiration>${element("ExpiredObjectDeleteMarker", "true")}</Expiration>`,
    versions: () => `<NoncurrentVersionExpiration>${element("NoncurrentDays", draft.days)}${keep}</NoncurrentVersionExpiration>`,
    uploads: () => `<AbortIncompleteMultipartUpload>${element("DaysAfterInitiation", draft.days)}</AbortIncompleteMultipartUpload>`,
  };
  return `<Rule>${element("Status", "Enabled")}<Filter>${filter}</Filter>${actions[draft.action]()}</Rule>`;
}

/** Returns the description of a rule. */
export function draftWords(draft: Draft): string {
  return ruleWords(parseXml(`<Rules>${ruleXml(draft)}</Rules>`))[0]!.text;
}

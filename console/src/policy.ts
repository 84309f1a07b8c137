// Policies in words: who may do what with which objects, statement by statement.

type OneOrMany<T> = T | T[];

interface Statement {
  Sid?: string;
  Effect: "Allow" | "Deny";
  Principal?: "*" | { AWS?: OneOrMany<string>; CanonicalUser?: OneOrMany<string> };
  NotPrincipal?: unknown;
  Action?: OneOrMany<string>;
  NotAction?: OneOrMany<string>;
  Resource?: OneOrMany<string>;
  NotResource?: OneOrMany<string>;
  Condition?: Record<string, Record<string, OneOrMany<string | number | boolean>>>;
}

export interface Policy {
  Statement?: OneOrMany<Statement>;
}

const many = <T>(value: OneOrMany<T> | undefined): T[] => (value === undefined ? [] : [value].flat() as T[]);

const ACTIONS: Record<string, string> = {
  "s3:GetObject": "read objects",
  "s3:GetObjectVersion": "read versions of objects",
  "s3:PutObject": "store objects",
  "s3:DeleteObject": "delete objects",
  "s3:DeleteObjectVersion": "delete versions of objects for good",
  "s3:ListBucket": "list objects",
  "s3:ListBucketVersions": "list versions",
  "s3:ListAllMyBuckets": "list buckets",
  "s3:GetBucketLocation": "read the bucket's region",
  "s3:CreateBucket": "create buckets",
  "s3:DeleteBucket": "delete buckets",
  "s3:GetBucketPolicy": "read the bucket's policy",
  "s3:PutBucketPolicy": "change the bucket's policy",
  "s3:GetObjectTagging": "read the tags of objects",
  "s3:PutObjectTagging": "change the tags of objects",
  "s3:AbortMultipartUpload": "abort uploads",
  "s3:ListMultipartUploadParts": "list the parts of uploads",
  "s3:ListBucketMultipartUploads": "list uploads",
  "mesh:PushOp": "push ops",
  "mesh:ListOps": "list ops",
  "mesh:DeleteOp": "remove ops",
};

const COMPARISONS: Record<string, string> = {
  StringEquals: "is",
  StringNotEquals: "is not",
  StringLike: "is like",
  StringNotLike: "is not like",
  IpAddress: "is in",
  NotIpAddress: "is not in",
  Bool: "is",
  DateLessThan: "is before",
  DateGreaterThan: "is after",
  NumericLessThan: "is less than",
  NumericLessThanEquals: "is at most",
  NumericGreaterThan: "is more than",
};

const KEYS: Record<string, string> = {
  "aws:SourceIp": "the client's address",
  "aws:SecureTransport": "the use of TLS",
  "aws:CurrentTime": "the time",
  "aws:username": "the user",
  "s3:prefix": "the listed prefix",
  "s3:max-keys": "the requested number of keys",
};

function joined(parts: string[], word: string): string {
  return parts.length < 2 ? (parts[0] ?? "") : `${parts.slice(0, -1).join(", ")} ${word} ${parts[parts.length - 1]}`;
}

function who({ Principal, NotPrincipal }: Statement): string {
  if (NotPrincipal !== undefined) return `Everyone except ${JSON.stringify(NotPrincipal)}`;
  if (Principal === undefined) return "Users and keys with this policy";
  if (Principal === "*") return "Everyone, even without a key,";
  const names = [...many(Principal.AWS), ...many(Principal.CanonicalUser)];
  if (names.includes("*")) return "Everyone, even without a key,";
  if (!names.length) return JSON.stringify(Principal);
  return joined(names.map((name) => name.replace(/^arn:aws:iam::[^:]*:/, "").replace(/^user\//, "user ")), "and");
}

function where({ Resource, NotResource }: Statement): string {
  const named = (arn: string): string => {
    const path = arn.replace(/^arn:aws:s3:::/, "");
    if (path === "*") return "everything";
    const [bucket, ...rest] = path.split("/");
    const key = rest.join("/");
    if (!rest.length) return `bucket ${bucket}`;
    if (key === "*") return `all objects of ${bucket}`;
    return /^[^*?]*\*$/.test(key) ? `objects of ${bucket} that begin with ${key.slice(0, -1)}` : `s3://${path}`;
  };
  if (NotResource !== undefined) return `everything except ${joined(many(NotResource).map(named), "and")}`;
  return joined(many(Resource).map(named), "and");
}

const SETS: Record<string, string> = { "ForAnyValue:": "one value of ", "ForAllValues:": "every value of " };

function when({ Condition = {} }: Statement): string {
  const found = Object.entries(Condition).flatMap(([comparison, keys]) =>
    Object.entries(keys).map(([key, values]) => {
      const [, set = "", plain = "", exists = ""] = /^(For(?:Any|All)Values?:)?(.*?)(IfExists)?$/.exec(comparison) ?? [];
      const name = `${SETS[set] ?? set}${KEYS[key] ?? key}`;
      const given = many(values).map(String);
      if (plain === "Null") return `${name} is ${joined(given.map((each) => (each === "true" ? "missing" : "present")), "or")}`;
      // A request without the key meets these conditions, so the sentence has to say it.
      const absent = exists || set === "ForAllValues:" ? " (or not given)" : "";
      if (plain === "Bool" && key === "aws:SecureTransport" && given.length === 1)
        return `the connection ${given.includes("true") ? "uses" : "does not use"} TLS${absent}`;
      return `${name} ${COMPARISONS[plain] ?? plain} ${joined(given, "or")}${absent}`;
    }),
  );
  return joined(found, "and");
}

/** Returns a description of each statement. It is complete: unknown actions and conditions are quoted. */
export function policyWords(policy: Policy): { effect: "Allow" | "Deny"; text: string }[] {
  return many(policy.Statement).map((statement) => {
    const allowed = statement.Effect === "Allow";
    const all = allowed ? "do everything" : "do anything"; // "may never do everything" would allow a part
    const wide: Record<string, string> = { "*": all, "s3:*": `${all} with S3` };
    const words = (actions: string[]): string[] => actions.map((action) => wide[action] ?? ACTIONS[action] ?? action);
    const what =
      statement.NotAction !== undefined
        ? `${all} except ${joined(words(many(statement.NotAction)), "and")}`
        : joined(words(many(statement.Action)), allowed ? "and" : "or");
    const condition = when(statement);
    const scope = `Applies to ${where(statement) || "the bucket"}${condition && `, if ${condition}`}.`;
    const text = `${who(statement)} ${allowed ? "may" : "may never"} ${what}. ${scope}`;
    return { effect: statement.Effect, text };
  });
}

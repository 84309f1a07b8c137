// @aws-sdk/client-s3 for JavaScript, version 3. The protocol is that of driving.py: one JSON object a line.
import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import readline from "node:readline";
import { Readable } from "node:stream";
import { pipeline } from "node:stream/promises";
import { pathToFileURL } from "node:url";

// The packages lie in an environment of their own, not beside this file.
const require = createRequire(pathToFileURL(path.join(process.env.COMPAT_NODE_HOME, "package.json")));
const sdk = require("@aws-sdk/client-s3");
const { Upload } = require("@aws-sdk/lib-storage");
const { getSignedUrl } = require("@aws-sdk/s3-request-presigner");

const PART = 5 << 20;
let s3;

const bare = (etag) => etag.replaceAll('"', "");
const send = (name, input) => s3.send(new sdk[`${name}Command`](input));

// Pieces of a file that come when they come, with no length known before.
async function* pieces(file) {
  for await (const piece of fs.createReadStream(file, { highWaterMark: 70001 })) yield piece;
}

async function upload(Bucket, Key, Body) {
  await new Upload({ client: s3, params: { Bucket, Key, Body }, partSize: PART, queueSize: 3 }).done();
}

async function conditional(Bucket, Key, file, condition) {
  try {
    await send("PutObject", { Bucket, Key, Body: fs.readFileSync(file), ...condition });
    return true;
  } catch (error) {
    if (error.name === "PreconditionFailed") return false;
    throw error;
  }
}

const verbs = {
  make_bucket: async ({ bucket }) => void (await send("CreateBucket", { Bucket: bucket })),
  remove_bucket: async ({ bucket }) => void (await send("DeleteBucket", { Bucket: bucket })),
  list_buckets: async () => (await send("ListBuckets", {})).Buckets.map((entry) => entry.Name),
  put: async ({ bucket, key, path, metadata, content_type, checksum }) =>
    void (await send("PutObject", {
      Bucket: bucket,
      Key: key,
      Body: fs.readFileSync(path),
      Metadata: metadata ?? undefined,
      ContentType: content_type ?? undefined,
      ChecksumAlgorithm: checksum ?? undefined,
    })),
  put_large: async ({ bucket, key, path }) => upload(bucket, key, fs.createReadStream(path)),
  put_stream: async ({ bucket, key, path }) => upload(bucket, key, Readable.from(pieces(path))),
  get: async ({ bucket, key, path }) => {
    const got = await send("GetObject", { Bucket: bucket, Key: key });
    await pipeline(got.Body, fs.createWriteStream(path));
  },
  read_range: async ({ bucket, key, start, end, path }) => {
    const got = await send("GetObject", { Bucket: bucket, Key: key, Range: `bytes=${start}-${end - 1}` });
    await pipeline(got.Body, fs.createWriteStream(path));
  },
  head: async ({ bucket, key }) => {
    const head = await send("HeadObject", { Bucket: bucket, Key: key });
    return {
      size: head.ContentLength,
      etag: bare(head.ETag),
      content_type: head.ContentType,
      metadata: head.Metadata,
    };
  },
  listing: async ({ bucket, prefix, delimiter }) => {
    const found = { keys: [], prefixes: [] };
    const input = { Bucket: bucket, Prefix: prefix, Delimiter: delimiter || undefined, MaxKeys: 400 };
    for await (const page of sdk.paginateListObjectsV2({ client: s3 }, input)) {
      found.keys.push(...(page.Contents ?? []).map((entry) => entry.Key));
      found.prefixes.push(...(page.CommonPrefixes ?? []).map((entry) => entry.Prefix));
    }
    return found;
  },
  copy: async ({ bucket, key, target }) => {
    const source = `${bucket}/${encodeURIComponent(key)}`;
    await send("CopyObject", { Bucket: bucket, Key: target, CopySource: source });
  },
  delete_many: async ({ bucket, keys }) => {
    const named = { Objects: keys.map((Key) => ({ Key })) };
    const gone = await send("DeleteObjects", { Bucket: bucket, Delete: named });
    if (gone.Errors?.length) throw new Error(JSON.stringify(gone.Errors));
  },
  presign_get: ({ bucket, key }) =>
    getSignedUrl(s3, new sdk.GetObjectCommand({ Bucket: bucket, Key: key }), { expiresIn: 600 }),
  presign_put: ({ bucket, key }) =>
    getSignedUrl(s3, new sdk.PutObjectCommand({ Bucket: bucket, Key: key }), { expiresIn: 600 }),
  presign_part: ({ bucket, key, upload, number }) => {
    const part = new sdk.UploadPartCommand({ Bucket: bucket, Key: key, UploadId: upload, PartNumber: number });
    return getSignedUrl(s3, part, { expiresIn: 600 });
  },
  put_if_absent: ({ bucket, key, path }) => conditional(bucket, key, path, { IfNoneMatch: "*" }),
  put_if_match: ({ bucket, key, path, etag }) => conditional(bucket, key, path, { IfMatch: etag }),
};

function open({ url, access_key, secret_key, region }) {
  const settings = {
    endpoint: url,
    region,
    forcePathStyle: true,
    maxAttempts: 1,
    credentials: { accessKeyId: access_key, secretAccessKey: secret_key },
  };
  s3 = new sdk.S3Client(settings);
  const { version } = require("@aws-sdk/client-s3/package.json");
  return { version, checksums: ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"] };
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  let answer;
  try {
    if (!s3) answer = { gave: open(asked.with) };
    else if (!verbs[asked.do]) answer = { cannot: "the client has no call for it" };
    else answer = { gave: (await verbs[asked.do](asked.with)) ?? null };
  } catch (error) {
    answer = { failed: `${error.name}: ${error.message}` };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}

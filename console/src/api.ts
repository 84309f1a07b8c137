// Requests of the page. The node signs each of them with the key of the session. The page has no secret key, only the
// token (`csrf`) that proves that a request comes from this page.

import { parseXml, type XmlElement } from "./xml";

export interface Session {
  user_id: string;
  display_name: string;
  access_key: string;
  root: boolean;
  csrf: string;
  /** Seconds since 1970. */
  expires: number;
  node: string;
  single_node: boolean;
  /** The URL of a Grafana; empty if there is none. */
  grafana: string;
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly help = "",
  ) {
    super(message);
  }

  /** The error as a sentence. */
  get sentence(): string {
    const text = /[.!?]$/.test(this.message) ? this.message : `${this.message}.`;
    const first = text.charAt(0).toUpperCase() + text.slice(1);
    if (this.status === 403) {
      const help = this.help ? ` ${this.help.charAt(0).toUpperCase()}${this.help.slice(1)}.` : "";
      return `Your key may not do this: ${text}${help}`;
    }
    return this.help ? `${first} (${this.help})` : first;
  }
}

const BASE = "/-/console";
let csrf = "";
let ended: (message: string) => void = () => {};

/** Sets the function that is called with a message when the session has ended. */
export function onSessionEnd(call: (message: string) => void): void {
  ended = call;
}

export async function currentSession(): Promise<Session | null> {
  const response = await fetch(`${BASE}/session`, { cache: "no-store" });
  if (!response.ok) return null;
  return remember((await response.json()) as Session);
}

export async function signIn(accessKey: string, secretKey: string, token: string): Promise<Session> {
  const response = await fetch(`${BASE}/session`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ access_key: accessKey, secret_key: secretKey, session_token: token }),
  });
  if (!response.ok) {
    const { code, message, help } = await errorOf(response);
    throw new ApiError(0, code, message, help); // not a missing permission
  }
  return remember((await response.json()) as Session);
}

/** Returns whether users can sign in at an identity provider. */
export async function hasProvider(): Promise<boolean> {
  return (await fetch(`${BASE}/oidc/`, { cache: "no-store" })).status === 204;
}

export const PROVIDER_SIGN_IN = `${BASE}/oidc/begin`;

export async function renewSession(): Promise<Session> {
  const response = await fetch(`${BASE}/session`, { method: "PATCH", headers: { "x-mesh-console": csrf } });
  if (!response.ok) throw await errorOf(response);
  return remember((await response.json()) as Session);
}

export async function signOut(): Promise<void> {
  await fetch(`${BASE}/session`, { method: "DELETE", headers: { "x-mesh-console": csrf } });
  csrf = "";
}

function remember(session: Session): Session {
  csrf = session.csrf;
  return session;
}

export interface Options {
  method?: string;
  headers?: Record<string, string>;
  body?: BodyInit;
  signal?: AbortSignal;
}

export function apiUrl(target: string): string {
  return `${BASE}/api${target}`;
}

export function apiHeaders(): Record<string, string> {
  return { "x-mesh-console": csrf };
}

/** Requests a path of the mesh, such as `/-/jobs` or `/bucket/key`. Throws ApiError. */
export async function request(target: string, options: Options = {}): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(apiUrl(target), {
      ...options,
      cache: "no-store",
      headers: { ...apiHeaders(), ...options.headers },
    });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, "Unreachable", "the node does not respond; it may be restarting: try again, or open the console of another node");
  }
  if (!response.ok) {
    const error = await errorOf(response);
    reportSessionEnd(error);
    throw error;
  }
  return response;
}

/** Shows the sign-in page if this error means that the session has ended. */
export function reportSessionEnd(error: ApiError): void {
  if (error.status === 403 && /sign in (again|first)/i.test(error.message)) ended(error.message);
}

export async function json<T>(target: string, options: Options = {}): Promise<T> {
  const headers = options.body ? { "content-type": "application/json", ...options.headers } : options.headers;
  const response = await request(target, headers ? { ...options, headers } : options);
  return (await response.json()) as T;
}

export async function xml(target: string, options: Options = {}): Promise<XmlElement> {
  return parseXml(await (await request(target, options)).text());
}

/** Returns the result, or null if the request fails with one of these codes: the bucket has no such setting. */
export async function ifThere<T>(work: Promise<T>, ...absent: string[]): Promise<T | null> {
  try {
    return await work;
  } catch (error) {
    if (error instanceof ApiError && absent.includes(error.code)) return null;
    throw error;
  }
}

/** Reads an error of the native API (JSON) or of S3 (XML). */
export async function errorOf(response: Response): Promise<ApiError> {
  return readError(response.status, await response.text().catch(() => ""));
}

export function readError(status: number, text: string): ApiError {
  try {
    if (text.startsWith("{")) {
      const { error } = JSON.parse(text) as { error: { code: string; message: string; help?: string } };
      return new ApiError(status, error.code, error.message, error.help ?? "");
    }
    if (text.includes("<Error>")) {
      const error = parseXml(text);
      return new ApiError(status, error.text("Code"), error.text("Message"));
    }
  } catch {
    // Not an error document.
  }
  const known: Record<number, string> = {
    403: "access denied",
    404: "not found; it may have been deleted",
    503: "the node is overloaded or restarting; try again",
  };
  return new ApiError(status, String(status), known[status] ?? `the node returned HTTP status ${status}; its log may say why`);
}

/** Returns a key as a path. Throws ApiError for keys with segments `.` or `..`, which browsers remove from a URL. */
export function encodeKey(key: string): string {
  if (key.split("/").some((part) => part === "." || part === "..")) {
    throw new ApiError(0, "Dots", `a browser cannot request ${key}, because a part of it is "." or ".."; use another S3 client`);
  }
  return key.split("/").map(encodeURIComponent).join("/");
}

export function downloadUrl(bucket: string, key: string, version = ""): string {
  const query = version && `?versionId=${encodeURIComponent(version)}`;
  return `${BASE}/download/${bucket}/${encodeKey(key)}${query}`;
}

// Users and their keys, for root. A secret key is shown once, when it is created.

import type { JSX, TargetedEvent } from "preact";
import { useState } from "preact/hooks";
import { json } from "../api";
import { Dialog, Empty, Heading, Loading, Problem, Table, useLoaded } from "../parts";
import type { Policy } from "../policy";
import { PolicyWords } from "./settings";

interface User {
  user_id: string;
  display_name: string;
  email: string;
  origin: string;
  policies: string[];
}

interface Key {
  access_key: string;
  user_id: string;
  name: string;
  enabled: boolean;
  origin: string;
  policies: string[];
  last_used?: string;
}

async function all<T>(what: "users" | "keys" | "policies"): Promise<T[]> {
  const found: T[] = [];
  for (let after = ""; found.length < 10_000; ) {
    const query = `limit=1000${after && `&after=${encodeURIComponent(after)}`}`;
    const page = await json<Record<string, T[] | string>>(`/-/admin/${what}?${query}`);
    found.push(...(page[what] as T[]));
    after = page.next as string;
    if (!after) break;
  }
  return found;
}

interface NamedPolicy {
  name: string;
}

async function load(): Promise<{ users: User[]; keys: Key[]; policies: NamedPolicy[] }> {
  const [users, keys, policies] = await Promise.all([all<User>("users"), all<Key>("keys"), all<NamedPolicy>("policies")]);
  return { users, keys, policies };
}

export function UsersPage(): JSX.Element {
  const { value, error, reload } = useLoaded(load, []);
  const [adding, setAdding] = useState(false);
  const [failure, setFailure] = useState<unknown>(null);
  const [made, setMade] = useState<{ access_key: string; secret_key: string } | null>(null);
  const run = (work: Promise<unknown>): void => {
    work.then(() => {
      setFailure(null);
      reload();
    }, setFailure);
  };
  return (
    <>
      <Heading title="Users">
        {value && (
          <button type="button" class="primary" onClick={() => setAdding(true)}>
            New user
          </button>
        )}
      </Heading>
      <Problem error={error} />
      <Problem error={failure} />
      {!value && !error && <Loading />}
      {value?.users.map((user) => (
        <UserCard
          key={user.user_id}
          user={user}
          keys={value.keys.filter((key) => key.user_id === user.user_id)}
          run={run}
          onMade={(pair) => {
            setMade(pair);
            reload();
          }}
          onFailure={setFailure}
        />
      ))}
      {value && value.policies.length > 0 && (
        <section aria-label="Policies">
          <h2>Policies</h2>
          {value.policies.map(({ name }) => (
            <PolicyDetails key={name} name={name} />
          ))}
        </section>
      )}
      {adding && <NewUser onClose={() => setAdding(false)} onDone={reload} />}
      {made && (
        <Dialog title="New access key" onClose={() => setMade(null)}>
          <p>Copy the secret key now: it cannot be shown again.</p>
          <dl class="facts">
            <div>
              <dt>Access key</dt>
              <dd>
                <code>{made.access_key}</code>
              </dd>
            </div>
            <div>
              <dt>Secret key</dt>
              <dd>
                <code>{made.secret_key}</code>
              </dd>
            </div>
          </dl>
          <div class="buttons">
            <button type="button" class="primary" onClick={() => setMade(null)}>
              I have copied it
            </button>
          </div>
        </Dialog>
      )}
    </>
  );
}

function UserCard({ user, keys, run, onMade, onFailure }: {
  user: User;
  keys: Key[];
  run(work: Promise<unknown>): void;
  onMade(pair: { access_key: string; secret_key: string }): void;
  onFailure(error: unknown): void;
}): JSX.Element {
  const fixed = user.user_id === "root";
  const path = (key: Key): string => `/-/admin/keys/${encodeURIComponent(key.access_key)}`;
  const make = (): void => {
    const body = JSON.stringify({ user_id: user.user_id });
    json<{ access_key: string; secret_key: string }>("/-/admin/keys", { method: "POST", body }).then(onMade, onFailure);
  };
  return (
    <section class="card user" aria-label={`User ${user.user_id}`}>
      <h2>
        {user.display_name || user.user_id}{" "}
        {user.display_name && user.display_name !== user.user_id && <span class="quiet">{user.user_id}</span>}
      </h2>
      <p class="quiet">
        {user.email && `${user.email} · `}
        {user.policies.length > 0 ? `policies: ${user.policies.join(", ")}` : fixed ? "all permissions" : "no policies"}
      </p>
      {keys.length === 0 && <Empty>No access keys. Create one with New key.</Empty>}
      {keys.length > 0 && (
        <Table head={["Access key", "Name", "Policies", "State", ""]}>
          {keys.map((key) => (
            <tr key={key.access_key}>
              <td>
                <code>{key.access_key}</code>
              </td>
              <td>{key.name}</td>
              <td>{key.policies.join(", ")}</td>
              <td>
                <span class={`tag ${key.enabled ? "good" : "warn"}`}>{key.enabled ? "enabled" : "disabled"}</span>
              </td>
              <td class="actions">
                {!fixed && (
                <button
                  type="button"
                  class="plain"
                  aria-label={`${key.enabled ? "Disable" : "Enable"} ${key.access_key}`}
                  onClick={() => run(json(path(key), { method: "PATCH", body: JSON.stringify({ enabled: !key.enabled }) }))}
                >
                  {key.enabled ? "Disable" : "Enable"}
                </button>
                )}
                <button
                  type="button"
                  class="plain"
                  aria-label={`End sessions of ${key.access_key}`}
                  onClick={() => run(json(`${path(key)}/sessions`, { method: "DELETE" }))}
                >
                  End sessions
                </button>
              </td>
            </tr>
          ))}
        </Table>
      )}
      {!fixed && (
        <div class="buttons start">
          <button type="button" onClick={make} aria-label={`New key for ${user.user_id}`}>
            New key
          </button>
        </div>
      )}
    </section>
  );
}

/** A policy, loaded when it is opened. */
function PolicyDetails({ name }: { name: string }): JSX.Element {
  const [open, setOpen] = useState(false);
  return (
    <details class="more" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{name}</summary>
      {open && <PolicyText name={name} />}
    </details>
  );
}

function PolicyText({ name }: { name: string }): JSX.Element {
  const { value, error } = useLoaded(
    (signal) => json<{ policy: Policy }>(`/-/admin/policies/${encodeURIComponent(name)}`, { signal }),
    [name],
  );
  return (
    <>
      <Problem error={error} />
      {value && <PolicyWords policy={value.policy} />}
    </>
  );
}

function NewUser({ onClose, onDone }: { onClose(): void; onDone(): void }): JSX.Element {
  const [error, setError] = useState<unknown>(null);
  const submit = (event: TargetedEvent<HTMLFormElement, SubmitEvent>): void => {
    event.preventDefault();
    const value = (name: string): string =>
      (event.currentTarget.elements.namedItem(name) as HTMLInputElement).value.trim();
    const body = JSON.stringify({ user_id: value("id"), display_name: value("name"), email: value("email") });
    json("/-/admin/users", { method: "POST", body }).then(() => {
      onDone();
      onClose();
    }, setError);
  };
  return (
    <Dialog title="New user" onClose={onClose}>
      <form onSubmit={submit}>
        <label>
          User ID
          <input name="id" required autocapitalize="none" spellcheck={false} />
        </label>
        <label>
          Display name
          <input name="name" />
        </label>
        <label>
          Email address
          <input name="email" type="email" />
        </label>
        <Problem error={error} />
        <div class="buttons">
          <button type="submit" class="primary">
            Create
          </button>
        </div>
      </form>
    </Dialog>
  );
}

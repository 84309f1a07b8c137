// Buckets that the key may list; creation, and deletion of empty ones.

import type { JSX, TargetedEvent } from "preact";
import { useState } from "preact/hooks";
import { time } from "../format";
import { Dialog, Empty, Heading, Loading, Problem, Table, useLoaded } from "../parts";
import { createBucket, deleteBucket, listBuckets } from "../s3";

export function BucketsPage(): JSX.Element {
  const { value: buckets, error, reload } = useLoaded(listBuckets, []);
  const [adding, setAdding] = useState(false);
  const [removing, setRemoving] = useState("");
  return (
    <>
      <Heading title="Buckets">
        <button type="button" class="primary" onClick={() => setAdding(true)}>
          New bucket
        </button>
      </Heading>
      <Problem error={error} />
      {!buckets && !error && <Loading />}
      {buckets?.length === 0 && <Empty>There are no buckets that this key may list. Create one with New bucket.</Empty>}
      {buckets && buckets.length > 0 && (
        <Table head={["Name", "Created", ""]}>
          {buckets.map(({ name, created }) => (
            <tr key={name}>
              <td>
                <a href={`#/buckets/${encodeURIComponent(name)}`}>{name}</a>
              </td>
              <td class="quiet">{time(created)}</td>
              <td class="actions">
                <button type="button" class="plain" onClick={() => setRemoving(name)} aria-label={`Delete ${name}`}>
                  Delete
                </button>
              </td>
            </tr>
          ))}
        </Table>
      )}
      {adding && <NewBucket onClose={() => setAdding(false)} onDone={reload} />}
      {removing && <RemoveBucket name={removing} onClose={() => setRemoving("")} onDone={reload} />}
    </>
  );
}

function NewBucket({ onClose, onDone }: { onClose(): void; onDone(): void }): JSX.Element {
  const [error, setError] = useState<unknown>(null);
  const submit = (event: TargetedEvent<HTMLFormElement, SubmitEvent>): void => {
    event.preventDefault();
    const name = (event.currentTarget.elements.namedItem("name") as HTMLInputElement).value.trim();
    createBucket(name).then(() => {
      onDone();
      onClose();
    }, setError);
  };
  return (
    <Dialog title="New bucket" onClose={onClose}>
      <form onSubmit={submit}>
        <label>
          Name
          <input name="name" required minLength={3} maxLength={63} autocapitalize="none" spellcheck={false} />
        </label>
        <p class="quiet">3 to 63 lowercase letters, digits, dots and hyphens.</p>
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

function RemoveBucket({ name, onClose, onDone }: { name: string; onClose(): void; onDone(): void }): JSX.Element {
  const [error, setError] = useState<unknown>(null);
  const remove = (): void => {
    deleteBucket(name).then(() => {
      onDone();
      onClose();
    }, setError);
  };
  return (
    <Dialog title={`Delete ${name}?`} onClose={onClose}>
      <p>Only an empty bucket can be deleted: delete its objects and versions first. Its settings are deleted with it.</p>
      <Problem error={error} />
      <div class="buttons">
        <button type="button" onClick={onClose}>
          Cancel
        </button>
        <button type="button" class="danger" onClick={remove}>
          Delete bucket
        </button>
      </div>
    </Dialog>
  );
}

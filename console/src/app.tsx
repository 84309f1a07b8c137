// The shell of all pages: sign-in, navigation, and routing by the fragment of the URL.

import type { JSX, TargetedEvent } from "preact";
import { useEffect, useState } from "preact/hooks";
import { currentSession, hasProvider, onSessionEnd, PROVIDER_SIGN_IN, renewSession, signIn, signOut, type Session } from "./api";
import { Loading, Problem } from "./parts";
import { AuditPage } from "./pages/audit";
import { BucketsPage } from "./pages/buckets";
import { DatasetsPage } from "./pages/datasets";
import { InspectorPage } from "./pages/inspector";
import { JobsPage } from "./pages/jobs";
import { ObjectsPage } from "./pages/objects";
import { OpsPage } from "./pages/ops";
import { OverviewPage } from "./pages/overview";
import { UsersPage } from "./pages/users";
import { ViewsPage } from "./pages/views";
import { readRoute, type Route } from "./route";

const PAGES = [
  { name: "overview", title: "Overview" },
  { name: "buckets", title: "Buckets" },
  { name: "datasets", title: "Datasets" },
  { name: "batches", title: "Batches" },
  { name: "views", title: "Views" },
  { name: "ops", title: "Ops" },
  { name: "jobs", title: "Jobs" },
  { name: "users", title: "Users" },
  { name: "audit", title: "Audit log" },
] as const;

const RENEW_EVERY = 5 * 60_000;

export function App(): JSX.Element {
  const [session, setSession] = useState<Session | null | undefined>(undefined);
  const [notice, setNotice] = useState("");
  useEffect(() => {
    onSessionEnd((message) => {
      setNotice(message);
      setSession(null);
    });
    currentSession().then(setSession, () => setSession(null));
  }, []);
  useEffect(() => {
    if (!session) return;
    // A page that nobody uses lets its session expire.
    let used = false;
    const use = (): void => {
      used = true;
    };
    const timer = setInterval(() => {
      if (used) renewSession().catch(() => setSession(null));
      used = false;
    }, RENEW_EVERY);
    addEventListener("pointerdown", use);
    addEventListener("keydown", use);
    return () => {
      clearInterval(timer);
      removeEventListener("pointerdown", use);
      removeEventListener("keydown", use);
    };
  }, [session?.csrf]);
  if (session === undefined) return <Loading />;
  if (session === null) {
    return (
      <SignIn
        notice={notice}
        onSignIn={(made) => {
          setNotice("");
          setSession(made);
        }}
      />
    );
  }
  const leave = (): void => {
    void signOut().finally(() => setSession(null));
  };
  return <Shell session={session} onSignOut={leave} />;
}

function Shell({ session, onSignOut }: { session: Session; onSignOut(): void }): JSX.Element {
  const [route, setRoute] = useState(readRoute);
  useEffect(() => {
    const change = (): void => setRoute(readRoute());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  const current = route.path[0] || "overview";
  useEffect(() => {
    document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  }, [current]);
  return (
    <div class="shell">
      <a class="skip" href="#main" onClick={(event) => {
        event.preventDefault();
        document.getElementById("main")?.focus();
      }}>
        Skip to main content
      </a>
      <nav aria-label="Pages">
        <a class="brand" href="#/overview">
          <Logo /> Shardmesh
        </a>
        <ul>
          {PAGES.map(({ name, title }) => (
            <li key={name}>
              <a href={`#/${name}`} aria-current={current === name ? "page" : undefined}>
                {title}
              </a>
            </li>
          ))}
        </ul>
        <div class="who">
          <span>
            <span class="quiet">Signed in as </span>
            {session.display_name || session.user_id}
          </span>
          <ThemeButton />
          <button type="button" class="plain" onClick={onSignOut}>
            Sign out
          </button>
        </div>
      </nav>
      <main id="main" tabIndex={-1}>
        <Content current={current} route={route} session={session} />
      </main>
    </div>
  );
}

function Content({ current, route, session }: { current: string; route: Route; session: Session }): JSX.Element {
  switch (current) {
    case "buckets":
      return route.path[1] ? (
        <ObjectsPage key={route.path[1]} bucket={route.path[1]} query={route.query} root={session.root} />
      ) : (
        <BucketsPage />
      );
    case "datasets":
      return <DatasetsPage snapshot={route.path[1] ?? ""} />;
    case "batches":
      return <InspectorPage plan={route.path[1] ?? ""} query={route.query} />;
    case "views":
      return <ViewsPage />;
    case "ops":
      return <OpsPage />;
    case "audit":
      return <AuditPage />;
    case "jobs":
      return <JobsPage />;
    case "users":
      return <UsersPage />;
    default:
      return <OverviewPage session={session} />;
  }
}

function SignIn({ notice, onSignIn }: { notice: string; onSignIn(session: Session): void }): JSX.Element {
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const [provider, setProvider] = useState(false);
  useEffect(() => {
    document.title = "Sign in · Shardmesh";
    hasProvider().then(setProvider, () => {});
  }, []);
  const submit = (event: TargetedEvent<HTMLFormElement, SubmitEvent>): void => {
    event.preventDefault();
    const form = event.currentTarget;
    const value = (name: string): string => (form.elements.namedItem(name) as HTMLInputElement).value.trim();
    setBusy(true);
    signIn(value("access"), value("secret"), value("token"))
      .then((session) => {
        form.reset();
        onSignIn(session);
      }, setError)
      .finally(() => setBusy(false));
  };
  return (
    <main class="sign-in">
      <form onSubmit={submit}>
        <h1>
          <Logo /> Shardmesh
        </h1>
        {notice && <p role="status">{notice}</p>}
        {provider && (
          <p>
            <a class="button primary" href={PROVIDER_SIGN_IN}>
              Sign in with your organization
            </a>
          </p>
        )}
        <label>
          Access key
          <input name="access" autocomplete="username" autocapitalize="none" spellcheck={false} required />
        </label>
        <label>
          Secret key
          <input name="secret" type="password" autocomplete="current-password" required />
        </label>
        <details>
          <summary>Temporary credentials</summary>
          <label>
            Session token
            <input name="token" autocomplete="off" spellcheck={false} />
          </label>
        </details>
        <Problem error={error} />
        <button type="submit" class="primary" disabled={busy}>
          Sign in
        </button>
        <p class="quiet">
          The console has the permissions of this key. A session ends after 30 minutes without use. The browser does not
          store the secret key.
        </p>
      </form>
    </main>
  );
}

const THEMES = ["auto", "light", "dark"] as const;

function ThemeButton(): JSX.Element {
  const [theme, setTheme] = useState(() => localStorage.getItem("theme") ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("theme", theme);
  }, [theme]);
  const next = THEMES[(THEMES.indexOf(theme as (typeof THEMES)[number]) + 1) % THEMES.length]!;
  return (
    <button type="button" class="plain" onClick={() => setTheme(next)} title={`Theme: ${theme}`}>
      <span aria-hidden="true">{theme === "auto" ? "◐" : theme === "light" ? "☀" : "☾"}</span>
      <span class="hidden">Theme: {theme}. Switch to {next}.</span>
    </button>
  );
}

function Logo(): JSX.Element {
  return (
    <svg viewBox="0 0 16 16" width="18" height="18" aria-hidden="true" class="logo">
      <path d="M1 1h6v6H1zM9 9h6v6H9z" />
      <path class="second" d="M9 1h6v6H9zM1 9h6v6H1z" />
    </svg>
  );
}

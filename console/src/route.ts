// The route of a page: the path and the query in the fragment of its URL.

export interface Route {
  path: string[];
  query: URLSearchParams;
}

/** Returns the route in the browser's URL. After a change, the page renders it a moment later. */
export function readRoute(): Route {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { path: path.split("/").map(decodeURIComponent), query: new URLSearchParams(query) };
}

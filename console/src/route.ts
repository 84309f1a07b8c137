// The route of a page: the path and the query in the fragment of its address.

export interface Route {
  path: string[];
  query: URLSearchParams;
}

/** Reads the route that the browser's address has now. A page is drawn again for it a moment later. */
export function readRoute(): Route {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { path: path.split("/").map(decodeURIComponent), query: new URLSearchParams(query) };
}

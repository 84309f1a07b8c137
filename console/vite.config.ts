import { defineConfig } from "vite";

// The files lie where the daemon reads them. One script and one style sheet: the page's policy allows what its
// nonce names, and nothing that a script loads later.
export default defineConfig({
  base: "/-/console/",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: "../meshd/server/console/files",
    emptyOutDir: true,
    modulePreload: false,
    assetsInlineLimit: 0,
    target: "es2022",
    rolldownOptions: {
      output: {
        codeSplitting: false,
        entryFileNames: "assets/[name]-[hash].js",
        assetFileNames: "assets/[name]-[hash][extname]",
      },
    },
  },
});

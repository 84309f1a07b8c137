// The stream of a page, with time that passes as fast as the page can follow: `day.until` looks of ten seconds.
(() => {
  const send = window.fetch;
  const begin = Date.now();
  let looks = 0;
  window.day = { until: 0, looks: () => looks, go: () => {} };
  Date.now = () => begin + 10_000 * looks;
  const turn = new MessageChannel();
  const later = () => new Promise((resolve) => {
    turn.port1.onmessage = resolve;
    turn.port2.postMessage(0);
  });
  const event = (name, message) => new TextEncoder().encode(`event: ${name}\ndata: ${JSON.stringify(message)}\n\n`);
  const counted = (values, by) => Object.fromEntries(Object.keys(values).map((name) => [name, (values[name] += by)]));
  const stream = async (target, options) => {
    const targets = new URL(target, location.href).searchParams.getAll("watch");
    const { signal, ...asked } = options;
    const documents = {};
    for (const each of targets) documents[each] = await (await send("/-/console/api" + each, asked)).json();
    const { nodes } = documents["/-/activity"];
    const loops = { samples: 0, seconds: 0, waited: 0, epochs: 0, epochs_requested: 0, epoch_samples: 1e9, stalls: {} };
    for (const node of Object.values(nodes)) node.loaders = { resnet: { ...loops, plan: "", user: "root" } };
    let first = true;
    return new Response(new ReadableStream({
      async pull(controller) {
        if (first) {
          first = false;
          for (const each of targets) controller.enqueue(event("document", { target: each, document: documents[each] }));
          return;
        }
        if (looks >= day.until) await new Promise((resolve) => { day.go = resolve; });
        await later();
        looks += 1;
        const patch = {};
        for (const [id, node] of Object.entries(nodes)) {
          node.time += 10_000;
          node.loaders.resnet.samples += 64;
          node.loaders.resnet.seconds += 10;
          node.loaders.resnet.epochs += 0.001;
          patch[id] = { time: node.time, totals: counted(node.totals, 1 + (looks % 7)), gauges: counted(node.gauges, 1), loaders: node.loaders };
        }
        controller.enqueue(event("patch", { target: "/-/activity", patch: { nodes: patch } }));
      },
    }));
  };
  window.fetch = (target, options) => String(target).startsWith("/-/console/events") ? stream(target, options) : send(target, options);
})();

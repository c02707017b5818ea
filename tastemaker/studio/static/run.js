// The page of a run: state, curves and samples, as they are written.
"use strict";

(() => {
  const { run, newestSample } = document.getElementById("run").dataset;
  const board = new Charts.Board(document.getElementById("charts"));
  const path = run.split("/").map(encodeURIComponent).join("/");

  function showState(data) {
    const state = document.getElementById("state");
    state.className = `state ${data.state}`;
    state.textContent = data.state;
    document.getElementById("steps").textContent = `step ${data.step}${data.steps ? ` of ${data.steps}` : ""}`;
    document.getElementById("progress").value = data.steps ? data.step / data.steps : 0;
    const reason = document.getElementById("reason");
    reason.textContent = data.reason;
    reason.hidden = !data.reason || data.state === "running" || data.state === "finished";
    reason.classList.toggle("error", data.state === "failed");
    const newest = data.warnings.slice(-1);
    document.getElementById("warnings").replaceChildren(...newest.map(([step, text]) =>
      Charts.element("p", "note warning", `⚠ guard, step ${step}: ${text}`)));
  }

  async function showSamples(data) {
    for (const step of data.steps) {
      const response = await fetch(`/sample-rows/${path}?step=${step}`);
      if (response.ok) Samples.insertRow(step, await response.text());
    }
  }

  Charts.follow([run], newestSample, {
    charts: list => board.setCharts(list),
    curves: changes => board.setCurves(changes),
    state: showState,
    samples: showSamples,
  });

  // Comparing with the recipe takes some seconds, so the page does not wait for it.
  const difference = document.getElementById("difference");
  new IntersectionObserver(async (entries, observer) => {
    if (!entries.some(each => each.isIntersecting)) return;
    observer.disconnect();
    const response = await fetch(`/recipe-difference/${path}`);
    if (response.ok) difference.innerHTML = await response.text();  // escaped by the server
    else difference.textContent = "The comparison with the recipe failed.";
  }).observe(difference);
})();

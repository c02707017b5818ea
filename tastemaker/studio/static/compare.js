// The comparison of runs: curves that follow them, and the choice of steps.
"use strict";

(() => {
  const container = document.getElementById("charts");
  if (container) {
    const runs = [...container.querySelectorAll(".compared")].map(each => each.dataset.run);
    const board = new Charts.Board(container);
    Charts.follow(runs, "", {
      charts: list => board.setCharts(list),
      curves: changes => board.setCurves(changes),
    });
  }

  // Empty choices would be items without a name.
  for (const form of document.querySelectorAll("#steps, #chooser")) {
    const send = () => {
      const items = new FormData(form).getAll("item").filter(Boolean);
      location.href = `/compare?${new URLSearchParams(items.map(each => ["item", each]))}`;
    };
    form.addEventListener("submit", event => { event.preventDefault(); send(); });
    if (form.id === "steps") form.addEventListener("change", send);
  }
})();

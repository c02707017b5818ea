// The browser of samples: a table that is used with the arrow keys, and a dialog that shows one sample.
"use strict";

const Samples = (() => {
  const table = document.getElementById("browser"), body = document.getElementById("rows");
  const dialog = document.getElementById("zoom"), stage = document.getElementById("stage");
  const slider = document.getElementById("slider"), sliderLabel = document.getElementById("slider-label");
  const compareButton = document.getElementById("zoom-compare"), actualButton = document.getElementById("zoom-actual");
  let selected = null, zoomed = null, compares = false, actual = false;

  const cells = () => [...body.querySelectorAll("tr")].map(row => [...row.querySelectorAll(".cell")]);

  function place(cell) {
    const rows = cells(), row = rows.findIndex(each => each.includes(cell));
    return [rows, row, row < 0 ? -1 : rows[row].indexOf(cell)];
  }

  function select(cell, focus = true) {
    if (!cell) return;
    for (const each of body.querySelectorAll('[aria-selected="true"]')) {
      each.removeAttribute("aria-selected");
      each.tabIndex = -1;
    }
    selected = cell;
    cell.setAttribute("aria-selected", "true");
    cell.tabIndex = 0;
    if (focus && !dialog.open) cell.focus({ preventScroll: true });
    cell.scrollIntoView({ block: "nearest", inline: "nearest" });
    if (dialog.open) show();
  }

  function move(down, right) {
    const [rows, row, column] = place(selected);
    if (row < 0) return select(rows[0]?.[0]);
    const target = rows[Math.min(rows.length - 1, Math.max(0, row + down))];
    select(target[Math.min(target.length - 1, Math.max(0, column + right))]);
  }

  // A video of a grid plays inside a frame that shows only the box of one sample.
  function makeMedia(cell) {
    if (!cell.dataset.video) {
      const image = document.createElement("img");
      image.src = cell.dataset.full;
      image.alt = cell.dataset.prompt;
      image.classList.toggle("pixelated", cell.classList.contains("pixelated"));
      return image;
    }
    const [left, top, right, bottom] = cell.dataset.box.split(",").map(Number);
    const frame = document.createElement("div"), video = document.createElement("video"), still = new Image();
    frame.className = "frame";
    still.src = cell.dataset.full;  // until the video has loaded
    still.alt = "";
    Object.assign(video, { src: cell.dataset.video, autoplay: true, loop: true, muted: true, playsInline: true });
    video.setAttribute("aria-label", cell.dataset.prompt);
    const width = right - left, height = bottom - top;
    const fit = () => {
      const scale = actual ? 2 : Math.min(stage.clientWidth / width, stage.clientHeight / height);
      Object.assign(frame.style, { width: `${width * scale}px`, height: `${height * scale}px` });
      Object.assign(video.style, { width: `${video.videoWidth * scale}px`, height: `${video.videoHeight * scale}px`,
        maxWidth: "none", position: "absolute", left: `${-left * scale}px`, top: `${-top * scale}px` });
      slide();
    };
    video.addEventListener("loadedmetadata", fit);
    new ResizeObserver(fit).observe(stage);
    frame.append(still, video);
    return frame;
  }

  function show() {
    zoomed = selected;
    const [rows, row, column] = place(selected);
    // Before and after: the first step of this prompt, or the first run of a comparison.
    const first = table.dataset.order === "runs" ? rows[row][0] : rows[rows.length - 1][column];
    const isPair = compares && first && first !== selected;
    document.getElementById("zoom-title").textContent = name(selected);
    document.getElementById("zoom-prompt").textContent = selected.dataset.prompt;
    stage.classList.toggle("actual", actual);
    const after = makeMedia(selected);
    stage.replaceChildren(after);
    sliderLabel.hidden = !isPair;
    if (isPair) {
      const before = makeMedia(first), divider = document.createElement("div");
      before.classList.add("before");
      divider.className = "divider";
      stage.append(before, divider, tag("left", name(first)), tag("right", name(selected)));
      slide();
    }
    compareButton.setAttribute("aria-pressed", compares);
    actualButton.setAttribute("aria-pressed", actual);
  }

  const name = cell => cell.dataset.name || `step ${cell.dataset.step}`;

  function tag(side, text) {
    const node = document.createElement("span");
    node.className = `tag ${side}`;
    node.textContent = text;
    return node;
  }

  // The first step is cut off at the slider; both lie on top of each other.
  function slide() {
    const before = stage.querySelector(".before"), divider = stage.querySelector(".divider");
    if (!before) return;
    const share = Number(slider.value) / 100, box = before.getBoundingClientRect(), outer = stage.getBoundingClientRect();
    before.style.clipPath = `inset(0 ${100 - 100 * share}% 0 0)`;
    divider.style.left = `${box.left - outer.left + share * box.width}px`;
  }

  function open(cell) {
    select(cell, false);
    if (!dialog.open) dialog.showModal();
    show();
  }

  const toggleCompare = () => { compares = !compares; if (!dialog.open) open(selected || cells()[0]?.[0]); else show(); };
  const toggleActual = () => { actual = !actual; show(); };

  function press(event) {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      Home: [0, -9999], End: [0, 9999], PageUp: [-9999, 0], PageDown: [9999, 0] };
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const inTable = table.contains(document.activeElement) || dialog.open;
    if (moves[key] && inTable) move(...moves[key]);
    else if (key === "b" && selected) toggleCompare();
    else if (key === "z" && dialog.open) toggleActual();
    else return;
    event.preventDefault();
  }

  // Rows are ordered by step, the newest first.
  function insertRow(step, html) {
    const template = document.createElement("template");
    template.innerHTML = html;  // escaped by the server
    const row = template.content.querySelector("tr");
    if (!row) return;
    row.classList.add("fresh");
    const present = [...body.querySelectorAll("tr")];
    const old = present.find(each => Number(each.dataset.step) === step);
    if (old) old.replaceWith(row);
    else body.insertBefore(row, present.find(each => Number(each.dataset.step) < step) || null);
    if (table.hidden) location.reload();  // the first samples bring the prompts of the columns
    if (!body.querySelector('.cell[tabindex="0"]')) makeReachable();
  }

  function makeReachable() {
    const first = body.querySelector(".cell");
    if (first) first.tabIndex = 0;
  }

  if (table) {
    makeReachable();
    body.addEventListener("click", event => { const cell = event.target.closest(".cell"); if (cell) open(cell); });
    body.addEventListener("focusin", event => {
      const cell = event.target.closest(".cell");
      if (cell && cell !== selected) select(cell);
    });
    document.addEventListener("keydown", press);
    slider.addEventListener("input", slide);
    new ResizeObserver(slide).observe(stage);
    compareButton.addEventListener("click", toggleCompare);
    actualButton.addEventListener("click", toggleActual);
    document.getElementById("zoom-close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => { stage.replaceChildren(); select(zoomed); });  // the browser goes back to an earlier one
    document.getElementById("size")?.addEventListener("click", event => {
      const large = table.classList.toggle("large");
      event.currentTarget.setAttribute("aria-pressed", large);
    });
  }

  return { insertRow };
})();

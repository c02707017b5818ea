// Voting: the next ballots wait in memory with their samples loaded, and votes are sent in order from a list that survives
// a lost connection and a closed page.
"use strict";

(() => {
  const root = document.getElementById("vote"), address = root.dataset.address, kind = root.dataset.kind;
  const find = id => document.getElementById(id);
  const stage = find("stage"), nameInput = find("voter"), saved = find("saved"), problem = find("problem");
  const ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ", AHEAD = 4, MAX_WAIT = 10000;
  const outboxKey = `tastemaker-votes${address}`;
  let voter = "", queue = [], current = null, shownAt = 0, history = [], skipped = [], more = false;
  let outbox = JSON.parse(localStorage.getItem(outboxKey) || "[]"), sending = false, asking = null, wait = 1000;
  let progress = { votes: 0, target: 0, decided: false }, isDone = false;

  function newId() {
    let time = BigInt(Date.now()), id = "";
    for (let k = 0; k < 10; k++) { id = ALPHABET[Number(time & 31n)] + id; time >>= 5n; }
    for (const byte of crypto.getRandomValues(new Uint8Array(16))) id += ALPHABET[byte & 31];
    return id;
  }

  const keyOf = ballot => [...ballot.samples].sort((a, b) => a - b).join("-");
  const media = (ballot, place) => `${address}/samples/${ballot.samples[place]}`;

  function keepOutbox() {
    localStorage.setItem(outboxKey, JSON.stringify(outbox));
    saved.classList.toggle("failed", outbox.length > 0 && wait > 1000);
    saved.textContent = !outbox.length ? (history.length ? "saved" : "")
      : wait > 1000 ? `No connection: ${outbox.length} not saved yet; kept here and sent again` : "saving";
    showProgress();
  }

  function showProgress() {
    const waiting = outbox.reduce((sum, each) => sum + (each.undo ? -1 : 1), 0);
    const votes = Math.max(0, progress.votes + waiting);
    find("progress").max = Math.max(1, progress.target);
    find("progress").value = Math.min(votes, progress.target);
    find("count").textContent = voter ? `${votes} of ${progress.target} votes` : "";
    find("undo").disabled = !history.length;
    find("decided").hidden = !progress.decided || isDone;
  }

  function complain(text) {
    problem.textContent = text;
    problem.hidden = !text;
  }

  async function send() {
    if (sending) return;
    sending = true;
    while (outbox.length) {
      keepOutbox();
      const { undo, ...body } = outbox[0];
      try {
        const answer = await fetch(`${address}/${undo ? "undo" : "vote"}`, {
          method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
        if (answer.status >= 500) throw new Error(answer.statusText);
        const data = await answer.json();
        if (answer.ok && body.voter === voter) progress = data.progress;
        if (!answer.ok) complain(data.error || answer.statusText);
        outbox.shift();
        wait = 1000;
      } catch {
        wait = Math.min(MAX_WAIT, wait * 2);
        keepOutbox();
        await new Promise(resolve => setTimeout(resolve, wait));
      }
    }
    sending = false;
    keepOutbox();
    fill();
  }

  function fill() {
    asking = asking || ask().finally(() => { asking = null; });
    return asking;
  }

  async function ask() {
    if (!voter || queue.length >= AHEAD || "ended" in root.dataset) return;
    const waiting = [...(current ? [current] : []), ...queue, ...outbox.filter(each => !each.undo)].map(keyOf);
    const known = new Set([...waiting, ...skipped.slice(-200)]);
    const query = new URLSearchParams({ voter, count: AHEAD, exclude: [...known].join(","), more: more ? "1" : "0" });
    try {
      const answer = await fetch(`${address}/next?${query}`), data = await answer.json();
      if (!answer.ok) return complain(data.error || answer.statusText);
      if (!outbox.length) progress = data.progress;
      for (const ballot of data.ballots) {
        if (known.has(keyOf(ballot))) continue;
        ballot.elements = ballot.samples.map((_, place) => makeMedia(ballot, place));
        queue.push(ballot);
      }
      if (!data.ballots.length && !current && !queue.length) {
        if (skipped.length) { skipped = []; setTimeout(fill); } else if (!outbox.length) finish(data.ballots);
      }
      if (!current) showNext();
      showProgress();
    } catch {
      setTimeout(fill, 2000);
    }
  }

  function makeMedia(ballot, place) {
    const element = document.createElement(ballot.videos[place] ? "video" : "img");
    if (ballot.videos[place]) Object.assign(element, { muted: true, loop: true, autoplay: true, playsInline: true, preload: "auto" });
    else element.addEventListener("load", () => element.classList.toggle("pixelated", element.naturalWidth < 200));
    element.src = media(ballot, place);
    if (!ballot.videos[place]) element.alt = `Sample ${place + 1}`;
    return element;
  }

  function isLoaded() {
    return current.elements.every(each => each.tagName === "VIDEO" ? each.readyState >= 2 : each.complete);
  }

  function showNext() {
    show(queue.shift() || null);
    fill();
  }

  function show(ballot) {
    current = ballot;
    find("ballot").hidden = !ballot;
    if (!ballot) return;
    isDone = false;
    find("over").hidden = true;
    find("prompt").textContent = ballot.prompt;
    stage.replaceChildren(...ballot.elements.map((element, place) => {
      const box = document.createElement(kind === "like" ? "div" : "button");
      box.className = "choice";
      if (kind !== "like") {
        box.dataset.choice = place;
        box.setAttribute("aria-label", kind === "pair" ? ["Left is better", "Right is better"][place] : `Sample ${place + 1} is best`);
      }
      box.append(element);
      const label = ballot.sources ? ballot.sources[place] : kind === "best_of" ? String(place + 1) : "";
      if (label) {
        const tag = document.createElement("span");
        tag.className = "tag";
        tag.textContent = label;
        box.append(tag);
      }
      return box;
    }));
    for (const element of ballot.elements) if (element.tagName === "VIDEO") element.play().catch(() => {});
    shownAt = performance.now();
  }

  function finish() {
    isDone = true;
    find("over").hidden = false;
    find("over-text").textContent = more ? "You have voted on everything there is." : `Thank you: you have voted on all ${progress.target}.`;
    find("more").hidden = more;
  }

  function choose(choice) {
    if (!current || !isLoaded()) return;
    const seconds = Math.round((performance.now() - shownAt) / 10) / 100, id = newId();
    outbox.push({ id, voter, samples: current.samples, choice, seconds });
    history.push({ ballot: current, id });
    complain("");
    showNext();
    send();
  }

  function undo() {
    const last = history.pop();
    if (!last) return;
    const place = outbox.findIndex(each => each.id === last.id && !each.undo);
    if (place > 0 || (place === 0 && !sending)) outbox.splice(place, 1);
    else outbox.push({ id: last.id, voter, undo: true });
    if (current) queue.unshift(current);
    show(last.ballot);
    send();
    keepOutbox();
  }

  function skip() {
    if (!current) return;
    skipped.push(keyOf(current));
    showNext();
  }

  function parse(choice) {
    return /^\d+$/.test(choice) ? Number(choice) : choice === "true" ? true : choice === "false" ? false : choice;
  }

  function start() {
    voter = nameInput.value.trim();
    if (!voter) return;
    localStorage.setItem("tastemaker-voter", voter);
    find("start").textContent = "Change";
    nameInput.blur();
    queue = []; current = null; history = []; skipped = [];
    show(null);
    fill();
    send();
  }

  const KEYS = {
    pair: { ArrowLeft: 0, ArrowRight: 1, 1: 0, 2: 1, t: "tie", ArrowDown: "tie", b: "both_bad" },
    best_of: { 1: 0, 2: 1, 3: 2, 4: 3, t: "tie", ArrowDown: "tie", b: "both_bad" },
    like: { ArrowLeft: false, ArrowRight: true, 1: false, 2: true, d: false, l: true },
  }[kind];

  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (key === "z" || key === "Backspace") undo();
    else if (key === "s") skip();
    else if (key in KEYS) choose(KEYS[key]);
    else return;
    event.preventDefault();
  });
  root.addEventListener("click", event => {
    const button = event.target.closest("[data-choice]");
    if (button) choose(parse(button.dataset.choice));
  });
  find("undo").addEventListener("click", undo);
  find("skip").addEventListener("click", skip);
  find("more").addEventListener("click", () => { more = true; find("over").hidden = true; fill(); });
  find("voter-form").addEventListener("submit", event => { event.preventDefault(); start(); });
  addEventListener("online", () => { wait = 1000; send(); });
  if ("ended" in root.dataset) {
    find("over").hidden = false;
    find("voter-form").hidden = true;
  } else {
    nameInput.value = localStorage.getItem("tastemaker-voter") || "";
    if (nameInput.value) start(); else nameInput.focus();
  }
})();

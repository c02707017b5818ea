// Jobs: lists and logs that follow the server, the filter of recipes, the form of a new run, and "sample now".
"use strict";

const find = (selector, root = document) => root.querySelector(selector);

function followPart(part) {
  // Replaces a part of the page when it changes on the server, and keeps the focus and what is being typed.
  const source = new EventSource(part.dataset.follow);
  source.addEventListener("html", (event) => {
    const focused = part.contains(document.activeElement) ? document.activeElement : null;
    if (focused && focused.matches("input")) return;
    const id = focused ? focused.id : "";
    part.innerHTML = JSON.parse(event.data);
    if (id) { const again = document.getElementById(id); if (again) again.focus(); }
  });
}

function showPictures(box, addresses) {
  const known = new Set([...box.children].map((each) => each.getAttribute("src")));
  addresses.forEach((address, index) => {
    if (known.has(address)) return;
    const media = document.createElement(address.endsWith(".mp4") ? "video" : "img");
    if (media.tagName === "VIDEO") { media.controls = true; media.loop = true; } else { media.alt = `sample ${index + 1}`; }
    media.src = address;
    box.append(media);
  });
}

function followJob(id, offset, handlers) {
  const source = new EventSource(`/jobs/${id}/events?offset=${offset}`);
  for (const [name, handle] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  }
  source.addEventListener("end", () => source.close());
  source.addEventListener("error", () => source.close()); // a new connection would send the log again
  return source;
}

function showJob(page) {
  const log = find("#log"), state = find("#job-state"), reason = find("#job-reason"), pictures = find("#pictures");
  const first = state.textContent;
  log.scrollTop = log.scrollHeight;
  followJob(page.dataset.job, page.dataset.offset, {
    log: (text) => {
      const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
      log.append(text);
      if (log.textContent.length > 400000) log.textContent = log.textContent.slice(-200000);
      if (atEnd) log.scrollTop = log.scrollHeight;
    },
    state: (data) => {
      state.textContent = data.state;
      state.className = `state ${data.state}`;
      reason.textContent = data.reason;
      reason.hidden = data.state !== "failed";
      if (data.run) { find("#open-run").href = data.run; find("#open-run").hidden = false; }
      const stop = find("#stop");
      if (stop) stop.hidden = data.state !== "running" && data.state !== "queued";
    },
    files: (addresses) => { if (pictures) showPictures(pictures, addresses); },
    end: () => { if (first === "running" || first === "stopping") document.title = `${state.textContent}: ${document.title}`; },
  });
}

function filterRecipes(input) {
  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const section of document.querySelectorAll("#recipes section")) {
      let shown = 0;
      for (const item of section.querySelectorAll("li")) {
        item.hidden = !words.every((word) => item.dataset.text.includes(word));
        shown += item.hidden ? 0 : 1;
      }
      section.hidden = shown === 0;
      count += shown;
    }
    find("#recipe-count").textContent = count;
  };
  input.addEventListener("input", apply);
  apply();
}

class RunForm {
  // Checks the form on the server while it is filled in, and shows problems beside their fields.
  constructor(form) {
    this.form = form;
    this.number = 0;
    this.state = find("#check-state");
    this.wasSent = find(".wrong", form) !== null || find("#others").children.length > 0;
    form.addEventListener("input", () => this.schedule());
    form.addEventListener("submit", () => {
      this.show("Checking and starting …", "");
      find("#start").disabled = true;
    });
    // Back to this page from the job: the browser restores the disabled button.
    addEventListener("pageshow", (event) => { if (event.persisted) find("#start").disabled = false; });
    this.mark();
    this.openGroups();
    if (!this.wasSent) this.check(); else this.plan();
  }

  schedule() {
    clearTimeout(this.timer);
    this.mark();
    this.timer = setTimeout(() => this.check(), 400);
  }

  mark() {
    for (const field of this.form.querySelectorAll(".field[data-initial]")) {
      const input = find("input[type=checkbox], input[type=text], select, textarea", field);
      const text = input.type === "checkbox" ? String(input.checked) : input.value;
      field.classList.toggle("changed", text.trim() !== field.dataset.initial.trim() && field.dataset.key !== "name");
    }
  }

  openGroups() {
    for (const group of this.form.querySelectorAll("details.group")) if (find(".wrong", group)) group.open = true;
  }

  async send(address) {
    const response = await fetch(address, { method: "POST", body: new URLSearchParams(new FormData(this.form)) });
    if (!response.ok) throw new Error(`${response.status}`);
    return response.json();
  }

  show(text, kind) {
    this.state.textContent = text;
    this.state.className = kind;
  }

  async check() {
    const number = ++this.number;
    this.show("Checking the settings …", "");
    let result;
    try { result = await this.send("/jobs/new/check"); } catch { this.show("The settings could not be checked; is the studio still running?", "wrong"); return; }
    if (number !== this.number) return;
    const count = this.showProblems(result);
    const state = count ? `${count} ${count === 1 ? "problem" : "problems"}` : result.is_checked ? `No problems found. ${result.summary}` : "Not checked: it took too long.";
    this.show(state, count ? "wrong" : result.is_checked ? "good" : "");
    this.showList(find("#changes"), result.overrides);
    find("#paths").hidden = !result.paths.length;
    this.showList(find("#paths ul"), result.paths);
    find("#command").textContent = result.command;
    this.showNotes(find("#warnings"), result.warnings, "warning");
    if (!count) { this.plan(); return; }
    find("#plan-memory").textContent = find("#plan-time").textContent = "–";
    find("#plan-note").textContent = "";
  }

  showProblems(result) {
    let count = result.others.length;
    for (const field of this.form.querySelectorAll(".field[data-key]")) {
      const text = result.problems[field.dataset.key] || "", place = find(".problem", field);
      field.classList.toggle("wrong", Boolean(text));
      if (place && place.textContent !== text) place.textContent = text;
      count += text ? 1 : 0;
    }
    this.showNotes(find("#others"), result.others, "error");
    this.openGroups();
    return count;
  }

  showList(list, items) {
    list.replaceChildren(...(items.length ? items : ["none"]).map((text) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    }));
  }

  showNotes(box, messages, kind) {
    box.replaceChildren(...messages.map((text) => {
      const note = document.createElement("p");
      note.className = `note ${kind} small`;
      note.textContent = text;
      return note;
    }));
  }

  async plan() {
    const number = this.number;
    find("#plan-memory").textContent = find("#plan-time").textContent = "estimating …";
    let plan;
    try { plan = await this.send("/jobs/new/plan"); } catch { plan = { reason: "the studio does not answer" }; }
    if (number !== this.number) return;
    find("#plan-memory").textContent = plan.memory || "not estimated";
    find("#plan-time").textContent = plan.time || "not estimated";
    find("#plan-note").textContent = plan.memory ? plan.note || "" : plan.reason || "";
  }
}

function sampleNow(form) {
  const state = find("#sample-state"), pictures = find("#pictures");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    state.textContent = "Queuing …";
    const response = await fetch(form.action, {
      method: "POST", body: new URLSearchParams(new FormData(form)), headers: { Accept: "application/json" },
    });
    if (!response.ok) {
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      state.textContent = (find("main p", page) || page.body).textContent;
      return;
    }
    const id = (await response.json()).page.split("/").pop();
    followJob(id, 0, {
      state: (data) => {
        const words = { queued: "Waiting for the device …", running: "Generating …", done: "Done.", failed: "Failed: " };
        state.textContent = (words[data.state] || data.state) + (data.state === "failed" ? data.reason : "");
      },
      files: (addresses) => showPictures(pictures, addresses),
    });
  });
}

for (const part of document.querySelectorAll("[data-follow]")) followPart(part);
if (find("#job")) showJob(find("#job"));
if (find("#recipe-filter")) filterRecipes(find("#recipe-filter"));
if (find("#new-run")) new RunForm(find("#new-run"));
if (find("#sample-form")) sampleNow(find("#sample-form"));

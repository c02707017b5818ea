// The list of runs: choose some to compare, and see changes every few seconds.
"use strict";

(() => {
  const list = document.getElementById("runs"), form = document.getElementById("compare-form");
  const SECONDS = 4;
  let tag = "";

  function count() {
    const chosen = list.querySelectorAll("input:checked").length;
    form.querySelector("button").disabled = chosen < 1;
    document.getElementById("chosen").textContent = chosen ? `${chosen}` : "";
  }

  // Only items that changed are replaced, so that scrolling, focus and choices stay.
  function update(html) {
    const template = document.createElement("template");
    template.innerHTML = html;  // escaped by the server
    const present = new Map([...list.children].map(item => [item.dataset.id, item]));
    let previous = null;
    for (const item of [...template.content.querySelectorAll("li.run")]) {
      const old = present.get(item.dataset.id);
      let node = item;
      if (old && old.dataset.source === item.outerHTML) node = old;
      else {
        item.dataset.source = item.outerHTML;
        const isFocused = old?.contains(document.activeElement);
        if (old) {
          item.querySelector("input").checked = old.querySelector("input").checked;
          old.replaceWith(item);
          if (isFocused) item.querySelector("a").focus({ preventScroll: true });
        }
      }
      present.delete(item.dataset.id);
      if ((previous ? previous.nextElementSibling : list.firstElementChild) !== node) {
        if (previous) previous.after(node); else list.prepend(node);
      }
      previous = node;
    }
    for (const item of present.values()) item.remove();
    count();
  }

  async function poll() {
    if (!document.hidden) {
      const address = new URL(location.href);
      address.searchParams.set("fragment", "1");
      try {
        const response = await fetch(address, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
        if (response.status === 200) {
          tag = response.headers.get("ETag") || "";
          update(await response.text());
          document.querySelector(".empty")?.toggleAttribute("hidden", list.children.length > 0);
        }
      } catch { /* the studio was stopped; the next call may find it again */ }
    }
    setTimeout(poll, SECONDS * 1000);
  }

  list.addEventListener("change", count);
  form.addEventListener("submit", event => {
    event.preventDefault();
    const query = new URLSearchParams([...list.querySelectorAll("input:checked")].map(each => ["item", each.value]));
    location.href = `/compare?${query}`;
  });
  for (const item of list.children) item.dataset.source = item.outerHTML;
  count();
  setTimeout(poll, SECONDS * 1000);
})();

(() => {
  "use strict";
  const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
  const all = selector => [...document.querySelectorAll(selector)];

  // Slider: both pictures of a pair in one place, with a range input below them.
  const pairs = all(".two.compare");
  for (const pair of pairs) {
    const [before, after] = pair.querySelectorAll("img");
    const range = make("input", { type: "range", min: 0, max: 100, value: 50 });
    range.setAttribute("aria-label", "Share of the picture that is before training: " + before.alt);
    const move = () => pair.style.setProperty("--split", range.value + "%");
    range.addEventListener("input", move);
    move();
    let start = null;
    for (const image of [before, after]) {
      image.draggable = false;
      image.addEventListener("pointerdown", event => { start = event.clientX; pair.dataset.dragged = ""; });
    }
    pair.addEventListener("pointermove", event => {
      if (start === null || !event.buttons || !pair.classList.contains("slider")) return;
      if (Math.abs(event.clientX - start) < 5 && !pair.dataset.dragged) return;
      pair.dataset.dragged = "yes";
      const box = before.getBoundingClientRect();
      range.value = 100 * (event.clientX - box.left) / box.width;
      move();
    });
    addEventListener("pointerup", () => { start = null; });
    pair.append(range);
  }
  const lists = all(".pairs").filter(list => list.querySelector(".two.compare"));
  const buttons = lists.map(list => {
    const button = make("button", { type: "button", className: "view" });
    list.before(button);
    return button;
  });
  const show = slider => {
    pairs.forEach(pair => pair.classList.toggle("slider", slider));
    buttons.forEach(button => { button.textContent = slider ? "Show side by side" : "Show with a slider"; });
  };
  show(matchMedia("(max-width: 520px)").matches);
  buttons.forEach(button => button.addEventListener("click", () => show(!pairs[0].classList.contains("slider"))));

  // Lightbox: a click or Enter enlarges a picture, arrow keys step, Escape closes.
  const images = all(".pair img, .film img");
  const box = make("dialog", { className: "lightbox" });
  if (!images.length || !box.showModal) return;
  const picture = make("img", { alt: "" }), text = make("p");
  const button = (label, name, action) => {
    const element = make("button", { type: "button", textContent: label, onclick: action });
    element.setAttribute("aria-label", name);
    return element;
  };
  let current = 0;
  const open = index => {
    current = (index + images.length) % images.length;
    const image = images[current];
    picture.src = image.src;
    picture.alt = image.alt;
    picture.className = image.classList.contains("pixels") ? "pixels" : "";
    picture.style.aspectRatio = image.getAttribute("width") + " / " + image.getAttribute("height");
    text.textContent = image.alt;
    if (!picture.isConnected) box.prepend(picture);
    if (!box.open) box.showModal();
  };
  const close = () => { box.close(); images[current].focus(); };
  const controls = make("div", { className: "controls" });
  controls.append(
    button("\u2190", "Previous picture", () => open(current - 1)),
    button("\u2192", "Next picture", () => open(current + 1)),
    button("Close", "Close", close));
  box.append(text, controls);
  box.setAttribute("aria-label", "Enlarged picture");
  box.addEventListener("keydown", event => {
    if (event.key === "ArrowLeft") open(current - 1);
    if (event.key === "ArrowRight") open(current + 1);
    if (event.key === "Escape") { event.preventDefault(); close(); }
  });
  box.addEventListener("click", event => { if (event.target === box || event.target === picture) close(); });
  document.body.append(box);
  images.forEach((image, index) => {
    image.tabIndex = 0;
    image.setAttribute("role", "button");
    image.setAttribute("aria-label", "Enlarge: " + image.alt);
    image.addEventListener("click", () => {
      const pair = image.closest(".two");
      if (!pair || !pair.dataset.dragged) open(index);
    });
    image.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(index); }
    });
  });
})();

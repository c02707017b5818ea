// Curves as small SVG charts that follow a stream of server-sent events.
"use strict";

const Charts = (() => {
  const WIDTH = 340, HEIGHT = 190, LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 24;
  const NUM_COLORS = 6, SMOOTHED_FROM = 24;
  const SVG = "http://www.w3.org/2000/svg";

  function make(name, attributes = {}, text = "") {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    return node;
  }

  function element(name, className = "", text = "") {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text) node.textContent = text;
    return node;
  }

  function format(value) {
    if (!Number.isFinite(value)) return "";
    if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)) return value.toExponential(1);
    return String(Number(value.toPrecision(3)));
  }

  // A range with ticks at multiples of 1, 2 or 5, slightly wider than the values.
  function niceAxis(low, high, count = 4) {
    if (high - low < 1e-9 * Math.max(1, Math.abs(high))) {
      const spread = Math.abs(high) / 2 || 1;
      [low, high] = [low - spread, high + spread];
    }
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(m => m * power).find(each => each >= rough * 0.999) || rough;
    const margin = (high - low) * 0.06;
    return { low: low - margin, high: high + margin, step };
  }

  function ticks(axis) {
    const found = [];
    for (let k = Math.ceil(axis.low / axis.step - 1e-9); k <= Math.floor(axis.high / axis.step + 1e-9); k++) {
      found.push(k * axis.step);
    }
    return found;
  }

  function tickLabel(value, step) {
    if (Math.abs(value) >= 10000) return `${Number((value / 1000).toPrecision(6))}k`;
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return digits > 4 && value ? value.toExponential(0) : value.toFixed(Math.min(digits, 4));
  }

  // Running means over about a tenth of the curve, with a narrow window at its start.
  function smooth(points) {
    const radius = Math.max(1, Math.floor(points.length / 20)), sums = [0];
    for (const [, value] of points) sums.push(sums[sums.length - 1] + value);
    return points.map(([step], i) => {
      const reach = Math.min(radius, i), end = Math.min(points.length, i + reach + 1);
      return [step, (sums[end] - sums[i - reach]) / (end - i + reach)];
    });
  }

  function nearest(points, step) {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - points[low - 1][0] < points[low][0] - step ? points[low - 1] : points[low];
  }

  class Chart {
    constructor(settings, curves) {
      this.settings = settings;
      this.curves = curves;
      this.node = element("figure", "card chart");
      const caption = element("figcaption");
      caption.append(element("h3", "", settings.title));
      this.value = element("span", "value");
      caption.append(this.value);
      this.svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
      this.note = element("p", "", settings.note);
      this.node.append(caption, this.svg, this.note);
      this.svg.addEventListener("pointermove", event => this.point(event));
      this.svg.addEventListener("pointerleave", () => { this.cursor = null; this.showValue(); });
      this.isVisible = false;
      this.isStale = true;
    }

    series() {
      return this.settings.series.map(each => ({ ...each, points: this.curves.get(each.key) || [] }));
    }

    draw() {
      if (!this.isVisible) { this.isStale = true; return; }
      this.isStale = false;
      const series = this.series().filter(each => each.points.length);
      if (!series.length) return;
      const all = series.flatMap(each => each.points);
      let first = Infinity, last = -Infinity, low = Infinity, high = -Infinity;
      for (const [step, value] of all) {
        first = Math.min(first, step); last = Math.max(last, step);
        low = Math.min(low, value); high = Math.max(high, value);
      }
      if (first <= 0.1 * last) first = 0;
      const x = { low: first, high: Math.max(last, first + 1) }, y = niceAxis(low, high);
      this.x = x;
      this.toX = step => LEFT + (step - x.low) / (x.high - x.low) * (WIDTH - LEFT - RIGHT);
      this.toY = value => HEIGHT - BOTTOM - (value - y.low) / (y.high - y.low) * (HEIGHT - TOP - BOTTOM);
      const parts = [make("title", {}, `${this.settings.title}: ${this.describe(series)}`), ...this.frame(x, y)];
      for (const each of series) parts.push(...this.line(each));
      this.svg.replaceChildren(...parts);
      this.showValue();
    }

    frame(x, y) {
      const parts = [];
      for (const value of ticks(y)) {
        const at = this.toY(value).toFixed(1);
        parts.push(make("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }));
        parts.push(make("text", { x: LEFT - 6, y: Number(at) + 4, "text-anchor": "end" }, tickLabel(value, y.step)));
      }
      const step = Math.max(1, niceAxis(x.low, x.high).step);
      for (const value of ticks({ ...x, step })) {
        const at = this.toX(value), anchor = at > WIDTH - RIGHT - 14 ? "end" : "middle";
        parts.push(make("text", { x: at.toFixed(1), y: HEIGHT - 6, "text-anchor": anchor }, tickLabel(value, step)));
      }
      const base = HEIGHT - BOTTOM;
      parts.push(make("line", { class: "base", x1: LEFT, x2: WIDTH - RIGHT, y1: base, y2: base }));
      return parts;
    }

    line(each) {
      const color = `run-${each.color % NUM_COLORS + 1}`;
      const toText = points => points.map(([s, v]) => `${this.toX(s).toFixed(1)},${this.toY(v).toFixed(1)}`).join(" ");
      if (each.points.length >= SMOOTHED_FROM) {
        return [make("polyline", { class: `faint ${color}`, points: toText(each.points) }),
          make("polyline", { class: color, points: toText(smooth(each.points)) })];
      }
      const dots = each.points.map(([step, value]) =>
        make("circle", { class: color, cx: this.toX(step).toFixed(1), cy: this.toY(value).toFixed(1), r: 2.2 }));
      return [make("polyline", { class: color, points: toText(each.points) }), ...dots];
    }

    describe(series) {
      return series.map(each => {
        const [step, value] = each.points[each.points.length - 1];
        return `${each.label} ${format(each.points[0][1])} to ${format(value)} at step ${step}`;
      }).join("; ");
    }

    point(event) {
      if (!this.x) return;
      const box = this.svg.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width * WIDTH;
      const step = this.x.low + (at - LEFT) / (WIDTH - LEFT - RIGHT) * (this.x.high - this.x.low);
      this.cursor = Math.min(this.x.high, Math.max(this.x.low, step));
      this.showValue();
    }

    // Shows the newest values, or those under the pointer.
    showValue() {
      const series = this.series().filter(each => each.points.length);
      this.svg.querySelectorAll(".cursor").forEach(each => each.remove());
      const parts = [];
      let step = null;
      for (const each of series) {
        const found = this.cursor == null ? each.points[each.points.length - 1] : nearest(each.points, this.cursor);
        step = found[0];
        const text = element("span");
        if (this.settings.series.length > 1) {
          const key = element("span", `key run-${each.color % NUM_COLORS + 1}`);
          key.title = each.label;
          text.append(key);
        }
        text.append(format(found[1]), " ");
        parts.push(text);
      }
      if (this.cursor != null && step != null && this.toX) {
        const at = this.toX(this.cursor).toFixed(1);
        this.svg.append(make("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
        parts.unshift(element("span", "quiet", `step ${step}: `));
      }
      this.value.replaceChildren(...parts);
    }
  }

  // All charts of a page. Only those on the screen are drawn.
  class Board {
    constructor(container) {
      this.container = container;
      this.curves = new Map();
      this.charts = [];
      this.pending = false;
      this.observer = new IntersectionObserver(entries => {
        for (const entry of entries) {
          const chart = this.charts.find(each => each.node === entry.target);
          if (!chart) continue;
          chart.isVisible = entry.isIntersecting;
          if (chart.isVisible && chart.isStale) chart.draw();
        }
      }, { rootMargin: "200px" });
    }

    setCharts(list) {
      const open = new Set([...this.container.querySelectorAll("details[open]")].map(each => each.dataset.group));
      this.observer.disconnect();
      this.charts = list.map(each => new Chart(each, this.curves));
      const groups = [...new Set(list.map(each => each.group))], parts = [];
      for (const group of groups) {
        const members = this.charts.filter(chart => chart.settings.group === group);
        const cards = element("div", "cards");
        cards.append(...members.map(chart => chart.node));
        if (group === "Guard" || group === "More") {
          const details = element("details");
          details.dataset.group = group;
          details.open = open.has(group);
          details.append(element("summary", "", group === "Guard"
            ? `Guard: ${members.length} metrics on fixed prompts` : `${members.length} more metrics`), cards);
          parts.push(details);
        } else {
          const title = element("h3", "group quiet", group);
          parts.push(title, cards);
        }
      }
      this.container.replaceChildren(...parts);
      for (const chart of this.charts) this.observer.observe(chart.node);
    }

    // Each change replaces the end of a curve, from an index on.
    setCurves(changes) {
      for (const [key, change] of Object.entries(changes)) {
        const points = this.curves.get(key) || [];
        points.length = Math.min(points.length, change.from);
        points.push(...change.points);
        this.curves.set(key, points);
      }
      if (this.pending) return;
      this.pending = true;
      requestAnimationFrame(() => {
        this.pending = false;
        for (const chart of this.charts) chart.draw();
      });
    }
  }

  // Follows runs while the page is visible: browsers allow only six connections to a server.
  // `newestSample` is the version of the newest samples on the page; only later ones are sent.
  function follow(runs, newestSample, handlers) {
    let source = null;
    const open = () => {
      if (source || document.hidden) return;
      const query = new URLSearchParams(runs.map(run => ["run", run]));
      if (newestSample) query.append("samples", newestSample);
      source = new EventSource(`/events/runs?${query}`);
      for (const [name, handle] of Object.entries(handlers)) {
        source.addEventListener(name, event => handle(JSON.parse(event.data)));
      }
      source.addEventListener("gone", () => { source.close(); });
    };
    const close = () => { if (source) { source.close(); source = null; } };
    document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
    addEventListener("pagehide", close);
    addEventListener("pageshow", open);
    open();
  }

  return { Board, follow, element };
})();

// Two drawings: curves over the last minutes, and the latest steps as bars.

import { el, svg } from "./dom.js";
import { Series, bars, niceTop, short } from "./series.js";

const WINDOW_S = 180;
const STEPS = 300;

const canvas = (...children) =>
  svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" }, ...children);
const gridLine = (y) => svg("line", { class: "grid", x1: 0, x2: 100, y1: y, y2: y });

/** Curves called `names`, all in `unit`. */
export class LineChart {
  #series = new Series(WINDOW_S);
  #lines;
  #values;

  constructor(title, names, unit) {
    this.#lines = names.map((_, i) => svg("path", { class: `line s${i}` }));
    this.#values = names.map(() => el("span", {}, "–"));
    this.top = el("span.scale");
    this.half = el("span.scale");
    this.half.style.top = "50%";
    this.top.style.top = "0";
    this.empty = el("div.empty", {}, "Nothing yet");
    this.unit = unit;
    const legend = names.map((name, i) => el("li", {}, el(`i.s${i}`), `${name} `, this.#values[i]));
    this.node = el("section.card", { "aria-label": title },
      el("div.card-head", {}, el("h2", {}, title), el("ul.legend", {}, ...legend)),
      el("div.plot", {}, canvas(gridLine(0), gridLine(50), gridLine(100), ...[...this.#lines].reverse()),
        this.top, this.half, this.empty),
      el("div.ends", { "aria-hidden": "true" }, el("span", {}, `${WINDOW_S / 60} min ago`), el("span", {}, "now")));
  }

  push(at, values) {
    this.#series.push(at, values);
    const top = niceTop(this.#series.top);
    this.#lines.forEach((line, i) => line.setAttribute("d", this.#series.path(i, at, top)));
    this.#values.forEach((node, i) => (node.textContent = `${short(values[i])} ${this.unit}`));
    this.top.textContent = `${short(top)} ${this.unit}`;
    this.half.textContent = short(top / 2);
    this.empty.hidden = this.#series.points.some(({ values: all }) => all.some((v) => v !== null));
  }
}

/** One band of the step timeline: bars of one or two kinds under one scale. */
class Band {
  constructor(name, height, kinds, unit) {
    this.paths = kinds.map((kind) => svg("path", { class: kind }));
    this.pick = svg("rect", { class: "pick", y: 0, height: 100, width: 0 });
    this.scale = el("span.scale");
    this.unit = unit;
    this.plot = el(`div.plot.${height}`, {}, canvas(this.pick, gridLine(0), gridLine(100), ...this.paths), this.scale);
    this.node = el("div.band", {}, el("div.band-name", {}, name), this.plot);
  }

  draw(columns, n) {
    const top = niceTop(columns.flat().reduce((a, b) => Math.max(a, b), 0));
    columns.forEach((heights, i) => this.paths[i].setAttribute("d", bars(heights, n, top)));
    this.scale.textContent = `${short(top)}${this.unit}`;
  }
}

/** The latest steps: duration, rows, prefill tokens. `read(text)` is told about the one under the pointer. */
export class Timeline {
  #steps = [];

  constructor(read) {
    this.read = read;
    this.bands = [
      new Band(duration(), "tall", ["decode", "prefill"], " ms"),
      new Band("Rows", "short", ["rows"], ""),
      new Band("Prefill tokens", "short", ["prefill"], ""),
    ];
    this.ends = el("div.ends", { "aria-hidden": "true" }, el("span"), el("span", {}, "latest"));
    this.node = el("div", { role: "img" }, ...this.bands.map((band) => band.node), this.ends);
    this.node.addEventListener("pointermove", (event) => this.#point(event));
    this.node.addEventListener("pointerleave", () => this.#unpoint());
  }

  /** Adds `steps`: objects with the server's column names. */
  push(steps) {
    if (!steps.length) return;
    this.#steps = [...this.#steps, ...steps].slice(-STEPS);
    const n = STEPS;
    const rows = [...Array(n - this.#steps.length).fill(null), ...this.#steps];
    const column = (f) => rows.map((step) => (step ? f(step) : 0));
    const filled = (step) => step.prefill_tokens > 0;
    this.bands[0].draw([column((s) => (filled(s) ? 0 : s.ms)), column((s) => (filled(s) ? s.ms : 0))], n);
    this.bands[1].draw([column((s) => s.rows)], n);
    this.bands[2].draw([column((s) => s.prefill_tokens)], n);
    this.ends.firstChild.textContent = `${n} steps ago`;
    const last = this.#steps.at(-1);
    this.node.setAttribute("aria-label", `The latest ${this.#steps.length} steps. The last one: ${describe(last)}.`);
    this.#unpoint();
  }

  #point(event) {
    const box = this.bands[0].plot.getBoundingClientRect();
    const k = Math.floor((STEPS * (event.clientX - box.left)) / box.width);
    const step = this.#steps[k - (STEPS - this.#steps.length)];
    for (const { pick } of this.bands) {
      pick.setAttribute("x", (100 * k) / STEPS);
      pick.setAttribute("width", step ? 100 / STEPS : 0);
    }
    if (step) this.read(describe(step));
  }

  #unpoint() {
    for (const { pick } of this.bands) pick.setAttribute("width", 0);
    const last = this.#steps.at(-1);
    if (last) this.read(describe(last));
  }
}

function duration() {
  return el("span.key", {}, el("span", {}, "Duration: "), el("span", {}, el("i.decode"), "decode only"),
    el("span", {}, el("i.prefill"), "with prefill"));
}

function describe({ number, ms, rows, prefill_rows: prefills, prefill_tokens: tokens, drawn }) {
  const prefill = tokens ? `, ${tokens} prefill tokens in ${prefills}` : "";
  return `step ${number}: ${short(ms)} ms, ${rows} ${rows === 1 ? "row" : "rows"}${prefill}, ${drawn} drawn`;
}

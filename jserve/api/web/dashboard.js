// The dashboard: one question a second while it is looked at, and what the answers amount to.

import { get } from "./api.js";
import { LineChart, Timeline } from "./charts.js";
import { byId, el } from "./dom.js";
import { perSecond, short } from "./series.js";

const EVERY_MS = 1000;

const throughput = new LineChart("Throughput", ["output", "prompt"], "tok/s");
const ttft = new LineChart("Time to first token", ["p50", "p90", "p99"], "ms");
const itl = new LineChart("Time between tokens", ["p50", "p90", "p99"], "ms");
byId("charts").append(throughput.node, ttft.node, itl.node);
const timeline = new Timeline((text) => (byId("step").textContent = text));
byId("steps").append(timeline.node);

const tiles = Object.fromEntries(
  [["output", "Output"], ["ttft", "TTFT p50"], ["itl", "ITL p50"],
    ["requests", "Running"], ["kv", "KV in use"], ["prefix", "Prefix hits"]].map(([name, title]) => {
    const value = el("dd");
    const sub = el("dd.sub");
    byId("tiles").append(el("div", {}, el("dt", {}, title), value, sub));
    return [name, (text, unit, more) => {
      value.replaceChildren(text, unit ? el("small", {}, unit) : "");
      sub.textContent = more;
    }];
  }));

let before = null;
let lastStep = -1;

function show(now) {
  const output = perSecond(before, now, (d) => d.totals.output_tokens);
  const prompt = perSecond(before, now, (d) => d.totals.prompt_tokens);
  const curve = (l) => [l.p50, l.p90, l.p99];
  if (before) throughput.push(now.now, [output, prompt]);
  ttft.push(now.now, curve(now.latency_ms.ttft));
  itl.push(now.now, curve(now.latency_ms.itl));
  const steps = now.steps.rows.map((row) => Object.fromEntries(now.steps.columns.map((c, i) => [c, row[i]])));
  lastStep = steps.at(-1)?.number ?? lastStep;
  timeline.push(steps);
  showTiles(now, output, prompt);
  showLower(now);
  before = now;
}

function showTiles(now, output, prompt) {
  const { latency_ms: latency, requests, totals } = now;
  const late = ({ p90, p99 }) => `p90 ${short(p90)}, p99 ${short(p99)}`;
  tiles.output(short(output), "tok/s", `prompt ${short(prompt)} tok/s`);
  tiles.ttft(short(latency.ttft.p50), "ms", late(latency.ttft));
  tiles.itl(short(latency.itl.p50), "ms", late(latency.itl));
  tiles.requests(short(requests.running), "", `${short(requests.waiting)} waiting, ${short(totals.preemptions)} preempted so far`);
  tiles.kv(share(used(now.kv), now.kv.pages), "%", `${short(used(now.kv))} of ${short(now.kv.pages)} pages`);
  tiles.prefix(share(now.prefix.found, now.prefix.looked_up), "%", `${short(now.prefix.found)} of ${short(now.prefix.looked_up)} tokens`);
}

const used = (kv) => kv.pages - kv.pages_free - kv.pages_cached;
const share = (part, whole) => (whole ? short(Math.round((1000 * part) / whole) / 10) : "–");

function showLower(now) {
  byId("lanes").replaceChildren(...Object.entries(now.lanes).map(([lane, n]) => el("tr", {},
    el("th", { scope: "row" }, lane),
    ...[n.waiting, n.running, n.finished, n.refused, n.expired].map((value) => el("td", {}, short(value))))));
  const levels = ["", "bulk is refused", "bulk is refused, prefills are short", "only interactive is taken"];
  byId("overload").textContent = now.overload_level ? `Overload: ${levels[now.overload_level]}.` : "";
  const { kv, prefix, replicas, fleet, speculation, experts } = now;
  byId("replicas-card").hidden = !replicas.length;
  byId("replicas").replaceChildren(...replicas.map((r) => el("tr", {},
    el("th", { scope: "row" }, r.name), el("td", {}, r.role), el("td", {}, r.state),
    ...[r.running, r.waiting, r.requests].map((value) => el("td", {}, short(value))),
    el("td", {}, share(r.pages_used, r.pages)), el("td", {}, share(r.found, r.looked_up)),
    el("td", {}, r.suspicion > 1 ? `${r.suspicion.toFixed(1)}×` : "–"), el("td", {}, short(r.odd)))));
  byId("fleet").textContent = fleet.needed ? `Load ${fleet.load.toFixed(2)}: needs ${short(fleet.needed)}` : "";
  stack("kv", kv.pages, [["In use", used(kv)], ["Kept for reuse", kv.pages_cached], ["Free", kv.pages_free]]);
  stack("prefix", prefix.looked_up, [["Found", prefix.found], ["", 0], ["Computed", prefix.looked_up - prefix.found]]);
  byId("speculation-card").hidden = speculation === null;
  if (speculation) {
    const { drafted, accepted } = speculation;
    stack("speculation", drafted, [["Accepted", accepted], ["", 0], ["Rejected", drafted - accepted]]);
  }
  byId("experts-card").hidden = experts === null;
  if (experts) {
    const times = (value) => `${(Math.round(100 * value) / 100).toFixed(2)} ×`;
    const facts = [["Fullest device, of the mean", times(experts.fullest)], ["In the worst layer", times(experts.worst)],
      ["Busiest expert", `${short(Math.round(1000 * experts.hottest) / 10)} %`], ["Moves", short(experts.moves)]];
    byId("experts").replaceChildren(...facts.map(([title, value]) => el("div", {}, el("dt", {}, title), el("dd", {}, value))));
  }
}

/** A bar of the first two parts of `whole`, and all named parts in figures. */
function stack(name, whole, parts) {
  const named = parts.filter(([title]) => title);
  byId(name).replaceChildren(...named.map(([title, value]) => el("div", {}, el("dt", {}, title), el("dd", {}, short(value)))));
  const bar = byId(`${name}-bar`);
  bar.setAttribute("aria-label", named.map(([title, value]) => `${title}: ${short(value)}`).join(", "));
  bar.replaceChildren(...parts.slice(0, 2).map(([, value], i) => {
    const piece = el(`i.${"ab"[i]}`);
    piece.style.width = whole ? `${(100 * value) / whole}%` : "0";
    return piece;
  }));
}

function showState(text, { live = false, bad = false } = {}) {
  const state = byId("state");
  if (state.textContent !== text) state.textContent = text; // a screen reader is told of changes only
  state.toggleAttribute("data-live", live);
  state.toggleAttribute("data-bad", bad);
}

async function poll() {
  if (document.hidden) return;
  try {
    const now = await get(`v1/dashboard?after=${lastStep}`);
    const { model, version, healthy, degraded_reasons, draining, restarts } = now.server;
    byId("model").textContent = model;
    const tail = restarts ? `, engine restarted ${restarts} times` : "";
    if (draining) showState("Shutting down", { bad: true });
    else if (!healthy) showState(`The engine makes no progress${tail}`, { bad: true });
    else if (degraded_reasons.length) showState(`Not ready: ${degraded_reasons.join("; ")}${tail}`, { bad: true });
    else showState(`Live, jserve ${version}, context ${now.server.max_model_len}${tail}`, { live: true });
    show(now);
  } catch (error) {
    showState(error.message, { bad: true });
  }
}

(async function watch() {
  for (;;) {
    await poll();
    await new Promise((wake) => setTimeout(wake, EVERY_MS));
  }
})();

// An answer as its tokens, coloured by how likely each one was; the alternatives on hover or focus.

import { el } from "./dom.js";
import { percent, surprise } from "./logprobs.js";

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "∅";

/** The tokens in reading order. One of them is a tab stop; arrow keys go on from it. */
export function tokenView(tokens) {
  const view = el("div.tokens", { role: "group", "aria-label": "Tokens by probability; arrow keys move" });
  const spans = tokens.map((token, i) => span(token, i));
  for (const [i, node] of spans.entries()) {
    view.append(node);
    if (tokens[i].t.endsWith("\n")) view.append(el("br"));
  }
  if (spans.length) spans[0].tabIndex = 0;
  const at = (event) => event.target.closest?.(".token");
  const show = (event) => at(event) && tip.show(at(event), tokens[at(event).dataset.i]);
  view.addEventListener("mouseover", show);
  view.addEventListener("focusin", show);
  view.addEventListener("mouseleave", () => tip.hide());
  view.addEventListener("focusout", () => tip.hide());
  view.addEventListener("keydown", (event) => move(event, spans));
  return view;
}

function span(token, i) {
  const label = `${visible(token.t)}, ${percent(token.p)}`;
  return el(`span.token.p${surprise(token.p)}`, { tabindex: -1, role: "note", "aria-label": label, data: { i } },
    token.t.includes("\n") ? visible(token.t) : token.t);
}

function move(event, spans) {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
  if (event.key === "Escape") tip.hide();
  if (!step) return;
  event.preventDefault();
  const from = Number(event.target.dataset.i);
  const to = Math.min(spans.length - 1, Math.max(0, from + step));
  spans[from].tabIndex = -1;
  spans[to].tabIndex = 0;
  spans[to].focus();
}

/** The one box with alternatives. */
const tip = {
  node: null,

  show(anchor, token) {
    this.node ??= document.body.appendChild(el("div.tip", { id: "alternatives", role: "tooltip" }));
    this.node.replaceChildren(...this.rows(token));
    this.node.hidden = false;
    anchor.setAttribute("aria-describedby", "alternatives");
    this.place(anchor.getClientRects()[0]);
  },

  hide() {
    if (this.node) this.node.hidden = true;
  },

  rows(token) {
    const listed = token.a.some(([text, p]) => text === token.t && p === token.p);
    const all = listed ? token.a : [...token.a, [token.t, token.p]];
    return all.map(([text, p]) => {
      const bar = el("i.bar");
      bar.style.width = `${Math.max(1, 100 * Math.exp(p))}%`;
      const chosen = text === token.t && p === token.p;
      return el(`div.alternative${chosen ? ".chosen" : ""}`, {},
        el("code", {}, visible(text)), el("span.track", {}, bar), el("span.figure", {}, percent(p)));
    });
  },

  place(box) {
    const { offsetWidth: width, offsetHeight: height } = this.node;
    const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - width - 8);
    const below = box.bottom + 6;
    const top = below + height > innerHeight ? box.top - height - 6 : below;
    Object.assign(this.node.style, { left: `${left}px`, top: `${Math.max(8, top)}px` });
  },
};

addEventListener("scroll", () => tip.hide(), { capture: true, passive: true });

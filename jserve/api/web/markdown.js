// The little Markdown that models write: paragraphs, headings, lists, fenced code, code, bold and italic.
// Everything becomes nodes with text; links and HTML stay the text they are.

import { el } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+-]*)\s*$/;
const ITEM = /^\s*(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;

/** A fragment that shows `text`. A fence that is not closed yet runs to the end. */
export function markdown(text) {
  const lines = text.split("\n");
  const found = document.createDocumentFragment();
  let at = 0;
  while (at < lines.length) {
    const [node, next] = block(lines, at);
    if (node) found.append(node);
    at = next;
  }
  return found;
}

function block(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (FENCE.test(line)) return code(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [el("h4", {}, ...inline(heading[2])), at + 1];
  if (ITEM.test(line)) return list(lines, at);
  return paragraph(lines, at);
}

function code(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(fence)) end++;
  const text = lines.slice(at + 1, end).join("\n");
  return [el("pre", {}, el("code", { data: { language } }, text)), end + 1];
}

function list(lines, at) {
  const numbered = ITEM.exec(lines[at])[2] !== undefined;
  const start = numbered ? Number(ITEM.exec(lines[at])[2]) : null;
  const node = el(numbered ? "ol" : "ul", { start });
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || (item[2] !== undefined) !== numbered) break;
    node.append(el("li", {}, ...inline(item[3])));
    at++;
  }
  return [node, at];
}

function paragraph(lines, at) {
  const node = el("p");
  for (let first = true; at < lines.length && lines[at].trim(); at++, first = false) {
    if (!first && (FENCE.test(lines[at]) || ITEM.test(lines[at]) || HEADING.test(lines[at]))) break;
    if (!first) node.append(el("br"));
    node.append(...inline(lines[at]));
  }
  return [node, at];
}

const INLINE = /(`+)(.+?)\1|\*\*(?=\S)(.+?)\*\*|\*(?=\S)([^*]+?)\*/;

function inline(text) {
  const nodes = [];
  for (let found; (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    if (found.index) nodes.push(text.slice(0, found.index));
    if (found[1]) nodes.push(el("code", {}, found[2]));
    else if (found[3]) nodes.push(el("strong", {}, ...inline(found[3])));
    else nodes.push(el("em", {}, ...inline(found[4])));
  }
  if (text) nodes.push(text);
  return nodes;
}

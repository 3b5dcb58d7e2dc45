// The controls beside the conversation: read, remembered, marked where a value is at fault.

import { byId, el } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

const panel = byId("settings");
const controls = [...panel.querySelectorAll("[data-field]")];
const narrow = matchMedia("(max-width: 1023px)");

const EXAMPLES = {
  tools: [{
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  }],
  schema: {
    type: "object",
    properties: { name: { type: "string" }, age: { type: "integer", minimum: 0 } },
    required: ["name", "age"],
    additionalProperties: false,
  },
};

/** name -> text, or boolean of a check box. */
export function values() {
  return Object.fromEntries(controls.map((c) => [c.dataset.field, c.type === "checkbox" ? c.checked : c.value]));
}

function fill(saved) {
  for (const control of controls) {
    const value = saved[control.dataset.field];
    if (control.type === "checkbox") control.checked = Boolean(value);
    else control.value = value ?? control.defaultValue ?? "";
  }
  document.querySelectorAll("input[type=range]").forEach(followNumber);
  markSections();
}

/** A dot on every section that holds a value. */
function markSections() {
  for (const section of panel.querySelectorAll("details")) {
    const inside = controls.filter((c) => section.contains(c) && c.dataset.quiet === undefined);
    const set = inside.some((c) => (c.type === "checkbox" ? c.checked : c.value.trim() !== ""));
    section.toggleAttribute("data-set", set);
  }
}

/** A slider shows what its number box holds; an empty box rests it at the default. */
function followNumber(range) {
  const box = byId(range.dataset.for);
  range.value = box.value === "" ? range.dataset.rest : box.value;
  range.toggleAttribute("data-unset", box.value === "");
}

/** Shows `message` at the control called `field`; false where there is none. */
export function showFault(field, message) {
  const control = controls.find((c) => c.dataset.field === field);
  if (!control) return false;
  clearFault(control);
  const id = `${control.id}-fault`;
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", id);
  control.closest(".field").append(el("p.bad", { id, role: "alert" }, message));
  control.closest("details")?.setAttribute("open", "");
  if (narrow.matches) openPanel();
  control.focus();
  return true;
}

function clearFault(control) {
  control.removeAttribute("aria-invalid");
  byId(`${control.id}-fault`)?.remove();
}

export const clearFaults = () => controls.forEach(clearFault);

function openPanel() {
  panel.dataset.open = "";
  byId("settings-toggle").setAttribute("aria-expanded", "true");
  panel.querySelector("button, input, textarea").focus();
}

function closePanel() {
  delete panel.dataset.open;
  byId("settings-toggle").setAttribute("aria-expanded", "false");
  byId("settings-toggle").focus();
}

panel.addEventListener("input", (event) => {
  const { target } = event;
  if (target.dataset.for) byId(target.dataset.for).value = target.value;
  if (target.dataset.field) clearFault(target);
  panel.querySelectorAll("input[type=range]").forEach(followNumber);
  markSections();
  saveSettings(values());
});
panel.addEventListener("click", (event) => {
  const { example } = event.target.dataset;
  if (!example) return;
  const box = byId(example);
  box.value = JSON.stringify(EXAMPLES[example], null, 2);
  box.dispatchEvent(new Event("input", { bubbles: true }));
  box.focus();
});
byId("reset").addEventListener("click", () => {
  clearFaults();
  fill({});
  saveSettings({});
});
byId("settings-toggle").addEventListener("click", () => ("open" in panel.dataset ? closePanel() : openPanel()));
byId("settings-close").addEventListener("click", closePanel);
panel.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && "open" in panel.dataset) closePanel();
});
fill(loadSettings());

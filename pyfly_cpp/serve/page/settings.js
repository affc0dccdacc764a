// The gate, the sampling and the system message of the next request. Kept in the browser.
import { $ } from "./dom.js";

const KEY = "pyfly.settings";
const MARGINS = [0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1, 1.5, 2]; // steps of the slider, nats; 0: exact
const NUMBERS = ["temperature", "top_p", "seed", "max_tokens"];
const KEPT = [...NUMBERS, "system"];
let serverGate = null; // a gate that the server was started with and that is no step of the slider
let isGateMoved = false;
let own = {}; // sampling that the page asks for, as chat does, unless a field sets it
let isSeeded = false; // whether the server was started with a seed

/** The gate, as requests name it. */
export function gate() {
  if (serverGate !== null && !isGateMoved) return serverGate;
  const margin = MARGINS[$("gate").value];
  return margin === 0 ? "exact" : `margin:${margin}`;
}

/** The gates of the next answers: two to compare, or one. */
export const gates = () => $("both").checked && gate() !== "exact" ? ["exact", gate()] : [gate()];

/** The fields of the requests for n answers to compare. They are drawn alike, so that they differ by their gates alone. */
export function fields(n) {
  const drawn = n > 1 && !isSeeded ? { seed: crypto.getRandomValues(new Uint32Array(1))[0] >>> 1 } : {};
  const given = NUMBERS.filter(name => $(name).value !== "").map(name => [name, Number($(name).value)]);
  return { ...drawn, ...own, ...Object.fromEntries(given) };
}

/** The system message, as the first of the messages. */
export function systemMessages() {
  const content = $("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

/** Takes over the ranges, the defaults and the gate of the server. */
export function fit(model, described) {
  own = model.pyfly?.page ?? {};
  const behind = { ...model.pyfly?.defaults, ...own };
  isSeeded = behind.seed != null;
  for (const name of NUMBERS) {
    const range = Object.assign({}, described[name], ...(described[name]?.anyOf ?? []));
    const most = name === "max_tokens" ? model.pyfly?.max_tokens : Math.min(range.maximum ?? Infinity, 2 ** 32 - 1);
    const least = name === "max_tokens" ? 1 : name === "seed" ? 0 : range.minimum;
    const placeholder = behind[name] == null ? (name === "seed" ? "any" : "") : String(+behind[name].toFixed(3));
    Object.assign($(name), { min: least ?? "", max: most ?? "", placeholder });
  }
  if (model.pyfly?.lossless === false && !isGateMoved) {
    const served = model.pyfly.gate.split(" ")[0]; // its window is the gate's own
    const step = MARGINS.findIndex(margin => served === `margin:${margin}`);
    if (step >= 0) $("gate").value = step; else serverGate = served;
  }
  showGate();
}

function showGate() {
  const name = gate();
  $("gate-name").textContent = name;
  $("gate").setAttribute("aria-valuetext", name);
  $("both").disabled = name === "exact";
  const likely = Math.round(100 * Math.exp(-MARGINS[$("gate").value]));
  $("gate-note").textContent = name === "exact" ? ""
    : name.startsWith("margin:")
      ? `Lossy: a draft is kept if it is over ${likely}% as likely as the target's most probable token.`
      : "Lossy: the gate that this server was started with.";
}

function keep() {
  const kept = Object.fromEntries(KEPT.map(name => [name, $(name).value]));
  try {
    localStorage.setItem(KEY, JSON.stringify({ ...kept, ...(isGateMoved ? { gate: $("gate").value } : {}) }));
  } catch { /* until the page is closed, then */ }
}

function restore() {
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem(KEY)) ?? {}; } catch { /* none */ }
  for (const name of KEPT) $(name).value = kept[name] ?? "";
  if (kept.gate !== undefined) {
    $("gate").value = kept.gate;
    isGateMoved = true;
  }
  $("settings").open = KEPT.some(name => $(name).value !== "");
  showGate();
}

$("gate").addEventListener("input", () => { isGateMoved = true; showGate(); });
$("form").addEventListener("change", event => { if (event.target.id === "gate" || KEPT.includes(event.target.id)) keep(); });
// A number out of range is shown where it stands.
$("form").addEventListener("invalid", () => { $("settings").open = true; }, true);
restore();

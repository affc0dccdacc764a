// The rule, the sampling and the system message of the next request. Kept in the browser.
import { $ } from "./dom.js";

const KEY = "pyfly.settings";
const MARGINS = [0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1, 1.5, 2]; // steps of the slider, nats; 0: exact
const NUMBERS = ["temperature", "top_p", "seed", "max_tokens"];
const KEPT = [...NUMBERS, "system"];
let serverRule = null; // a rule that the server was started with and that is no step of the slider
let isRuleMoved = false;
let own = {}; // sampling that the page asks for, as chat does, unless a field sets it
let isSeeded = false; // whether the server was started with a seed

/** The rule, as requests name it. */
export function rule() {
  if (serverRule !== null && !isRuleMoved) return serverRule;
  const margin = MARGINS[$("rule").value];
  return margin === 0 ? "exact" : `margin:${margin}`;
}

/** The rules of the next answers: two to compare, or one. */
export const rules = () => $("both").checked && rule() !== "exact" ? ["exact", rule()] : [rule()];

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

/** Takes over the ranges, the defaults and the rule of the server. */
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
  if (model.pyfly?.lossless === false && !isRuleMoved) {
    const gate = model.pyfly.rule.split(" ")[0]; // its window is the gate's own
    const step = MARGINS.findIndex(margin => gate === `margin:${margin}`);
    if (step >= 0) $("rule").value = step; else serverRule = gate;
  }
  showRule();
}

function showRule() {
  const name = rule();
  $("rule-name").textContent = name;
  $("rule").setAttribute("aria-valuetext", name);
  $("both").disabled = name === "exact";
  const likely = Math.round(100 * Math.exp(-MARGINS[$("rule").value]));
  $("rule-note").textContent = name === "exact" ? ""
    : name.startsWith("margin:")
      ? `Lossy: a draft is kept if it is over ${likely}% as likely as the target's choice and the text agrees again.`
      : "Lossy: the rule that this server was started with.";
}

function keep() {
  const kept = Object.fromEntries(KEPT.map(name => [name, $(name).value]));
  try {
    localStorage.setItem(KEY, JSON.stringify({ ...kept, ...(isRuleMoved ? { rule: $("rule").value } : {}) }));
  } catch { /* until the page is closed, then */ }
}

function restore() {
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem(KEY)) ?? {}; } catch { /* none */ }
  for (const name of KEPT) $(name).value = kept[name] ?? "";
  if (kept.rule !== undefined) {
    $("rule").value = kept.rule;
    isRuleMoved = true;
  }
  $("settings").open = KEPT.some(name => $(name).value !== "");
  showRule();
}

$("rule").addEventListener("input", () => { isRuleMoved = true; showRule(); });
$("form").addEventListener("change", event => { if (event.target.id === "rule" || KEPT.includes(event.target.id)) keep(); });
// A number out of range is shown where it stands.
$("form").addEventListener("invalid", () => { $("settings").open = true; }, true);
restore();

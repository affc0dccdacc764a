// The tokens of an answer, by how they were produced, and the tip of the one under the pointer or the focus.
import { $, element } from "./dom.js";
import { codeOf } from "./markdown.js";

const ORIGINS = { matched: "drafted, and the target's choice", loose: "drafted and loosely accepted", target: "the target's own", earlier: "from an earlier visit" };
const visible = text => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(part of a character)";
const number = (value, digits = 2) => value == null ? "–" : value.toFixed(digits);

/** The records of a piece of text. If they are parts of one character, the last one has all of it as `shown`. */
export function recordsOf(tokens, content) {
  const adds = tokens.map(token => token.text).join("") === content;
  return tokens.map((token, i) => ({ ...token, shown: adds ? token.text : i === tokens.length - 1 ? content : "" }));
}

/** Appends the records that a place does not show yet, and has those that are code look so. */
export function show(place, records) {
  for (let i = place.querySelectorAll(".token").length; i < records.length; i++) {
    const record = records[i];
    for (const text of record.rejected ?? []) {
      const rejected = element("del");
      rejected.dataset.text = text.replaceAll("\n", "↵"); // drawn by the style sheet: no part of the text
      rejected.setAttribute("aria-hidden", true);
      place.append(rejected);
    }
    const begins = i > 0 && records[i - 1].round !== record.round;
    const span = element("span", `token ${record.origin ?? ""}${begins ? " begins" : ""}`, record.shown);
    span.tabIndex = i ? -1 : 0; // one stop of the Tab key; arrows continue from there
    span.record = record;
    place.append(span);
  }
  showCode(place);
}

function showCode(place) {
  const left = codeOf(place.textContent);
  let at = 0;
  for (const one of place.children) {
    const n = one.textContent.length; // 0: a rejected draft, which looks like what stands in its place
    while (left.length && left[0][1] <= at) left.shift();
    one.classList.toggle("code-token", left.length > 0 && left[0][0] < at + (n || 1));
    at += n;
  }
}

/** Marks the token in which two answers part. */
export function markParting(...places) {
  const [one, other] = places.map(place => place.textContent);
  let i = 0;
  while (i < one.length && one[i] === other[i]) i++;
  if (one === other) return;
  for (const place of places) {
    let at = 0;
    for (const span of place.querySelectorAll(".token")) {
      at += span.textContent.length;
      if (at > i) { span.classList.add("parts"); break; }
    }
  }
}

function showTip(span) {
  const record = span.record;
  const tip = $("tip");
  tip.replaceChildren(element("b", "", visible(record.text)), ": " + (ORIGINS[record.origin] ?? record.origin));
  const line = (...pieces) => tip.append(element("br"), ...pieces);
  if (record.origin === "loose") line("the target's choice: ", element("b", "", visible(record.choice)));
  line(`margin ${number(record.margin)} nats, entropy ${number(record.entropy)} nats` +
    (record.logprob == null ? "" : `, probability ${number(100 * Math.exp(record.logprob), 1)}%`));
  if (record.rejected?.length) line("rejected here: ", element("b", "", record.rejected.map(visible).join(" ")), ` (${record.reason})`);
  line(`step ${record.round + 1}` + (record.depth ? `, depth ${record.depth}` : ""));
  if (span.classList.contains("parts")) line("the answers part here");
  tip.hidden = false;
  span.setAttribute("aria-describedby", "tip");
  const at = span.getClientRects()[0];
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${at.bottom + tip.offsetHeight + 8 < innerHeight ? at.bottom + 6 : Math.max(8, at.top - tip.offsetHeight - 6)}px`;
}

export const hideTip = () => { $("tip").hidden = true; };
const tokenOf = event => event.target.closest?.(".token");

for (const kind of ["pointerover", "focusin"]) {
  document.addEventListener(kind, event => { const span = tokenOf(event); if (span) showTip(span); });
}
for (const kind of ["pointerout", "focusout"]) {
  document.addEventListener(kind, event => {
    tokenOf(event)?.removeAttribute("aria-describedby");
    if (tokenOf(event)) hideTip();
  });
}
$("scroll").addEventListener("scroll", hideTip);

document.addEventListener("keydown", event => {
  const span = document.activeElement.classList.contains("token") ? document.activeElement : null;
  if (!span || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
  const all = [...span.parentElement.querySelectorAll(".token")];
  const at = all.indexOf(span);
  const next = all[{ ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key]];
  if (next) { span.tabIndex = -1; next.tabIndex = 0; next.focus(); }
  event.preventDefault();
});

// Colours stay on the page.
document.addEventListener("copy", event => {
  const selection = getSelection();
  const isOfTokens = [...document.querySelectorAll(".tokens")].some(place => place.firstChild && selection.containsNode(place, true));
  if (!isOfTokens || event.target.closest?.("textarea, input")) return;
  event.clipboardData.setData("text/plain", selection.toString());
  event.preventDefault();
});

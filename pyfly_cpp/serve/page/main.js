// The conversation and its controls.
import { Answer, empty } from "./answer.js";
import * as chats from "./chats.js";
import { $, alertOf, button, download, element } from "./dom.js";
import { describeFields, describeModel, useKey } from "./server.js";
import * as settings from "./settings.js";
import { hideTip, markParting } from "./tokens.js";

let model = null;
let connecting = null;
let chat = chats.create();
const shown = []; // of each turn: { place, answers }
let edited = null; // the index of the turn that the message box replaces
let isStopped = false; // since the last message was sent
let unanswered = null; // what was sent and has no answer yet: { user, chat, edited }, the latter two as before

const running = () => shown.flatMap(turn => turn.answers).filter(answer => answer.isRunning);
const isBusy = () => document.body.classList.contains("busy");

/* ---- The server ---- */

/** Has the page know what is served. Called again while the server is being asked, waits for that. */
function connect() {
  connecting ??= describe().finally(() => { connecting = null; });
  return connecting;
}

async function describe() {
  try {
    const described = await describeModel();
    model = described.id;
    $("locked").hidden = true;
    $("model").textContent = [model, described.pyfly?.drafters?.join(" and ")].filter(Boolean).join(", drafted by ");
    alertOf("");
    settings.fit(described, await describeFields());
  } catch (error) {
    $("model").textContent = "not connected";
    $("locked").hidden = error.status !== 401;
    alertOf(error.message);
  }
}

/* ---- The chats ---- */

function keep(one) {
  if (!one.turns.length) return; // was deleted
  if (!chats.keep(one)) alertOf("The browser cannot keep this chat: its storage is full or off. Export it, or delete others.");
  showChats();
}

function open(other) {
  stop();
  chat = other;
  if (edited !== null) setBox("");
  alertOf("");
  showTurns(0);
  showChats();
  showColumn(false);
}

function showChats() {
  const list = $("chat-list");
  const before = list.contains(document.activeElement) ? document.activeElement.dataset.key : null; // keeps the focus
  list.replaceChildren(...chats.list().map(kept => {
    const entry = element("li");
    const put = (text, name, act) => { const made = button(text, act); made.dataset.key = `${name} ${kept.id}`; entry.append(made); return made; };
    const title = put(kept.title || "(no title)", "open", () => { if (kept.id === chat.id) showColumn(false); else open(kept); });
    title.className = "title";
    if (kept.id === chat.id) {
      title.setAttribute("aria-current", "true");
      put("Rename", "rename", rename);
      put("Export", "export", () => download(`${chat.title || "chat"}.md`, chats.written(chat)));
      put("Delete", "delete", forget);
    }
    return entry;
  }));
  if (before) ([...list.querySelectorAll("button")].find(one => one.dataset.key === before) ?? $("prompt")).focus();
}

function rename() {
  const title = window.prompt("Title of this chat", chat.title)?.trim();
  if (title) { chat.title = title; keep(chat); }
}

function forget() {
  if (!window.confirm(`Delete “${chat.title}”?`)) return;
  stop();
  chats.remove(chat);
  chat.turns = [];
  open(chats.create());
}

/* ---- Turns ---- */

/** Draws the turns from the i-th on. */
function showTurns(i = 0) {
  for (const { place } of shown.splice(i)) place.remove();
  while (shown.length < chat.turns.length) showTurn(shown.length);
  $("empty").hidden = shown.length > 0;
  $("turns").classList.toggle("wide", shown.some(turn => turn.answers.length > 1));
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

function showTurn(i) {
  const turn = chat.turns[i];
  const isCompared = turn.answers.length > 1;
  const place = element("article", "turn");
  const answers = turn.answers.map(kept => new Answer(kept, { choose, goOn }, isCompared));
  const row = element("div", isCompared ? "answers two" : "answers");
  row.append(...answers.map(one => one.box));
  const actions = (...buttons) => { const made = element("div", "actions"); made.append(...buttons); return made; };
  place.append(
    element("div", "user", turn.user), actions(button("Edit", () => edit(i), "Edit this message")),
    row, actions(button("Regenerate", () => regenerate(i), "Regenerate the answer")),
  );
  $("turns").append(place);
  shown.push({ place, answers });
  showChosen(i);
}

function showChosen(i) {
  const { answers } = shown[i];
  answers.forEach((one, n) => {
    const isChosen = n === chat.turns[i].chosen;
    one.box.classList.toggle("chosen", answers.length > 1 && isChosen);
    one.choose.hidden = answers.length < 2 || isChosen;
  });
}

const turnOf = one => shown.findIndex(turn => turn.answers.includes(one));

/** The messages before turn i, and its own. */
function messagesFor(i) {
  const before = chat.turns.slice(0, i).flatMap(turn => {
    const { text } = chats.parts(turn.answers[turn.chosen]);
    return text ? [{ role: "user", content: turn.user }, { role: "assistant", content: text }] : [];
  });
  return [...settings.systemMessages(), ...before, { role: "user", content: chat.turns[i].user }];
}

/** Has answers written and shows the first failure. Returns whether there is any text of them. */
async function write(answers, body) {
  const own = chat;
  alertOf("");
  busy(true);
  isStopped = false;
  let failures;
  try {
    if (model === null) await connect();
    if (isStopped) return false;
    const request = { model, ...settings.fields(answers.length), ...body };
    failures = await Promise.all(answers.map(one => one.run(request)));
  } finally {
    busy(false);
  }
  const failure = failures.find(one => one !== null);
  if (failure?.status === 401) $("locked").hidden = false;
  if (failure && own === chat) alertOf(failure.message);
  const isWritten = answers.some(one => !one.isEmpty);
  if (isWritten) keep(own);
  return isWritten;
}

/** Has the last turn answered. Returns whether there is any text. */
async function answer() {
  const i = chat.turns.length - 1;
  const turn = chat.turns[i];
  Object.assign(turn, { answers: settings.gates().map(empty), chosen: 0 });
  showTurns(i);
  const { answers } = shown[i];
  const isWritten = await write(answers, { messages: messagesFor(i) });
  if (isWritten && answers[0].isEmpty) turn.chosen = 1;
  if (shown[i]?.answers !== answers) return isWritten;
  showChosen(i);
  compare(i);
  return isWritten;
}

function compare(i) {
  const { answers } = shown[i];
  if (answers.length > 1 && document.body.classList.contains("drafts")) markParting(...answers.map(one => one.tokens));
}

async function send() {
  const user = $("prompt").value.trim();
  if (!user || isBusy()) return;
  const before = { chat, turns: [...chat.turns], edited };
  const i = edited ?? chat.turns.length;
  if (i < chat.turns.length - 1) chat = chats.fork(chat, i); // what follows stays in a chat of its own
  else chat.turns.splice(i);
  chat.turns.push({ user });
  const own = chat;
  setBox("");
  unanswered = { user, chat: before.chat, edited: before.edited };
  const isWritten = await answer();
  unanswered = null;
  if (isWritten) return;
  if (own !== chat) { // another one was opened meanwhile
    if (own === before.chat && own.turns.length && before.turns.length > i) { // what an edit replaced stays, and the message beside it
      const beside = chats.fork(before.chat, i);
      beside.turns.push(own.turns.pop());
      if (i === 0) beside.title = ""; // that of its own message
      own.turns = before.turns;
      keep(beside);
    }
    keep(own);
    return;
  }
  chat = before.chat; // as if it had not been sent
  chat.turns = before.turns;
  showTurns(Math.min(i, shown.length - 1));
  setBox([user, $("prompt").value.trim()].filter(Boolean).join("\n\n"), before.edited);
}

async function regenerate(i) {
  if (isBusy()) return;
  const before = { chat, turn: chat.turns[i], old: { ...chat.turns[i] } };
  if (i < chat.turns.length - 1) chat = chats.fork(chat, i + 1);
  const own = chat;
  if (await answer() || own !== chat) return;
  Object.assign(before.turn, before.old);
  chat = before.chat;
  showTurns(i);
}

async function goOn(one) {
  if (isBusy()) return;
  const { content, reasoning } = one.kept;
  const begun = { role: "assistant", content, ...(reasoning ? { reasoning_content: reasoning } : {}) };
  const messages = [...messagesFor(turnOf(one)), begun];
  await write([one], { messages, continue_final_message: true, add_generation_prompt: false });
}

function choose(one) {
  const i = turnOf(one);
  chat.turns[i].chosen = shown[i].answers.indexOf(one);
  showChosen(i);
  keep(chat);
}

/* ---- The message box ---- */

/** Fills it. `index`: of the turn whose message it replaces, null: of none. */
function setBox(text, index = null) {
  edited = index;
  $("editing").hidden = index === null;
  $("prompt").value = text;
  fitBox();
}

function fitBox() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight / 3)}px`;
}

function edit(i) {
  if (isBusy()) return;
  setBox(chat.turns[i].user, i);
  $("prompt").focus();
}

/* ---- The controls ---- */

function busy(is) {
  document.body.classList.toggle("busy", is);
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (!is && document.activeElement === document.body) $("prompt").focus({ preventScroll: true });
}

function stop() {
  isStopped = true;
  for (const one of running()) one.stop();
}

function showColumn(is) {
  $("chats").classList.toggle("open", is);
  $("show-chats").setAttribute("aria-expanded", is);
}

/** Whether a key is for the input method. In Safari the Enter that ends a word comes after its end. */
const isComposing = event => event.isComposing || event.keyCode === 229;

$("form").addEventListener("submit", event => { event.preventDefault(); send(); });
$("prompt").addEventListener("input", () => { fitBox(); alertOf(""); });
$("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !isComposing(event)) { event.preventDefault(); $("form").requestSubmit(); }
});
$("stop").addEventListener("click", stop);
$("cancel-edit").addEventListener("click", () => setBox(""));
$("new").addEventListener("click", () => { open(chats.create()); $("prompt").focus(); });
$("show-chats").addEventListener("click", () => showColumn(!$("chats").classList.contains("open")));
$("drafts").addEventListener("click", () => {
  const is = document.body.classList.toggle("drafts");
  $("drafts").setAttribute("aria-pressed", is);
  for (const one of shown.flatMap(turn => turn.answers)) one.show();
  shown.forEach((_, i) => compare(i));
});
$("unlock").addEventListener("click", () => { useKey($("key").value); $("key").value = ""; connect(); });
$("key").addEventListener("keydown", event => {
  if (event.key === "Enter") { event.preventDefault(); $("unlock").click(); }
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || isComposing(event)) return;
  stop();
  hideTip();
  showColumn(false);
});
document.addEventListener("grown", () => {
  const scroll = $("scroll");
  if (scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 160) scroll.scrollTop = scroll.scrollHeight;
});

// A reload comes back to the same chat: an answer with text was stopped then, and a message without one was not sent.
addEventListener("pagehide", () => {
  const writing = running();
  for (const one of writing) one.kept.ending = "stopped";
  const typed = $("prompt").value;
  const isWritten = writing.some(one => !one.isEmpty);
  if (isWritten) chats.keep(chat);
  if (isWritten || !unanswered) chats.leave(chat, typed, edited);
  else chats.leave(unanswered.chat, [unanswered.user, typed].filter(Boolean).join("\n\n"), unanswered.edited);
});
addEventListener("storage", showChats);

const left = chats.left();
open(left.chat ?? chat);
if (left.message) setBox(left.message, left.edited);
connect();

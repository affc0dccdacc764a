// Chats, kept in the browser: each under a key of its own, so that two tabs do not overwrite each other's.
//
//   chat = { id, title, changed, turns: [{ user, answers: [answer], chosen }] }
//   answer = { gate, content, reasoning, ending }   ending: why, as in answer.js, or as finish_reason

const PREFIX = "pyfly.chat.";
const OPEN = "pyfly.open"; // in the storage of the tab

export function create() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, title: "", changed: 0, turns: [] };
}

/** A new chat with the first n turns of another one. */
export const fork = (chat, n) => ({ ...create(), title: chat.title, turns: chat.turns.slice(0, n).map(turn => ({ ...turn })) });

/** All that are kept, the latest first. */
export function list() {
  const found = [];
  try {
    for (let i = 0; i < localStorage.length; i++) {
      const key = localStorage.key(i);
      if (!key.startsWith(PREFIX)) continue;
      try { found.push(JSON.parse(localStorage.getItem(key))); } catch { /* not ours */ }
    }
  } catch { /* the browser keeps nothing */ }
  return found.sort((a, b) => b.changed - a.changed);
}

/** Whether the chat could be kept. */
export function keep(chat) {
  chat.changed = Date.now();
  chat.title ||= chat.turns[0]?.user.slice(0, 60) ?? "";
  try {
    localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));
    return true;
  } catch {
    return false;
  }
}

export function remove(chat) {
  try { localStorage.removeItem(PREFIX + chat.id); } catch { /* was not kept */ }
}

/** Notes, as the tab is left, which chat it shows, the text of its message box, and which turn that text replaces. */
export function leave(chat, message, edited) {
  try { sessionStorage.setItem(OPEN, JSON.stringify({ id: chat.id, message, edited })); } catch { /* a new chat, then */ }
}

/** What the tab was left with, { chat, message, edited }. `chat`: null if it was not kept. */
export function left() {
  let noted = null;
  try { noted = JSON.parse(sessionStorage.getItem(OPEN)); } catch { /* nothing */ }
  const { id, message = "", edited = null } = noted ?? {};
  const chat = list().find(kept => kept.id === id) ?? null;
  return { chat, message, edited: chat && edited < chat.turns.length ? edited : null };
}

/** The chat as Markdown. */
export function written(chat) {
  const turns = chat.turns.map(turn => {
    const answer = turn.answers[turn.chosen];
    return `## You\n\n${turn.user}\n\n## Answer${answer ? ` (${answer.gate})\n\n${answer.content}` : ""}\n`;
  });
  return `# ${chat.title}\n\n${turns.join("\n")}`;
}

/** An answer's thinking and its text: apart if the server sent them so, or if the text has <think> marks. */
export function parts(answer) {
  if (answer.reasoning) return { thinking: answer.reasoning, text: answer.content, isThinking: !answer.content };
  const found = /^\s*(?:<think>)?([^]*?)<\/think>\s*/.exec(answer.content) ?? /^\s*<think>([^]*)$/.exec(answer.content);
  if (!found) return { thinking: "", text: answer.content, isThinking: false };
  const text = answer.content.slice(found[0].length);
  return { thinking: found[1].trim(), text, isThinking: !text };
}

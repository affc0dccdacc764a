// One answer on the page: while it is written, and afterwards.
import { parts } from "./chats.js";
import { button, copyButton, element } from "./dom.js";
import * as markdown from "./markdown.js";
import { stream } from "./server.js";
import { speaker } from "./spoken.js";
import * as tokens from "./tokens.js";

const ENDINGS = {
  length: "ended by the limit of tokens", context: "the context is full", stopped: "stopped", failed: "broken off",
  loop: "ended because it repeats itself: regenerate it, or raise the temperature",
};
const CONTINUED = ["length", "loop", "stopped", "failed"]; // endings after which there may be more
const number = (value, digits = 2) => value.toFixed(digits);
const whole = value => value.toLocaleString("en");

/** A new answer, as chats keep it. */
export const empty = gate => ({ gate, content: "", reasoning: "", ending: null });

export class Answer {
  /**
   * @param kept the answer as the chat keeps it; written to
   * @param actions { choose(answer), goOn(answer) }
   * @param isCompared whether another one stands beside it
   */
  constructor(kept, actions, isCompared) {
    this.kept = kept;
    this.records = []; // of this visit: chats do not keep them
    this.isCompared = isCompared;
    this.box = element("section", "answer");
    this.box.setAttribute("aria-label", `Answer, ${kept.gate}`);
    this.thinking = element("details", "thinking");
    this.thinkingTitle = element("summary");
    this.thinkingText = element("div", "thinking-text");
    this.thinking.append(this.thinkingTitle, this.thinkingText);
    this.text = element("div", "text");
    this.tokens = element("div", "tokens");
    this.numbers = element("p", "numbers");
    this.choose = button("Use this one", () => actions.choose(this));
    this.goOn = button("Continue", () => actions.goOn(this), "Continue the answer");
    const row = element("div", "actions");
    row.append(copyButton(() => parts(kept).text, "Copy the answer"), this.goOn, this.choose);
    this.box.append(element("h2", "gate", kept.gate), this.thinking, this.text, this.tokens, this.numbers, row);
    this.show();
  }

  get isEmpty() { return !this.kept.content && !this.kept.reasoning; }
  get isRunning() { return this.abort !== undefined; }

  /** Writes it, or writes on. Returns the failure, null if there was none. */
  async run(body) {
    this.abort = new AbortController();
    this.kept.ending = null;
    this.began = performance.now();
    this.first = this.progress = undefined;
    const { reasoning, content } = this.kept;
    if (!this.isEmpty && !this.records.length) this.records.push({ text: content, shown: reasoning + content, origin: "earlier", round: -1 });
    this.nBefore = this.records.length;
    this.say = speaker(this.isCompared ? this.kept.gate : null, parts(this.kept).text.length);
    let failure = null;
    this.show();
    try {
      const own = { gate: this.kept.gate, records: true, stop_loops: true, return_progress: true };
      for await (const chunk of stream({ ...body, ...own }, this.abort.signal)) this.take(chunk);
    } catch (error) {
      this.kept.ending = error.name === "AbortError" ? "stopped" : "failed";
      if (error.name !== "AbortError") failure = error;
    }
    this.abort = undefined;
    clearTimeout(this.timer);
    this.show();
    this.say(parts(this.kept).text, true);
    return failure;
  }

  stop() { this.abort?.abort(); }

  take(chunk) {
    if (chunk.prompt_progress) {
      this.progress = chunk.prompt_progress;
      this.showSoon();
    }
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const content = choice.delta?.content ?? "";
    const reasoning = choice.delta?.reasoning_content ?? "";
    if (content || reasoning) {
      this.last = performance.now();
      this.first ??= this.last;
      this.kept.content += content;
      this.kept.reasoning += reasoning;
    }
    const { cause } = choice.pyfly ?? {}; // tells more than finish_reason, and comes before it
    this.kept.ending ??= (cause in ENDINGS ? cause : choice.finish_reason) ?? null;
    const offset = this.nBefore ? this.records[this.nBefore - 1].round + 1 : 0;
    for (const record of tokens.recordsOf(choice.pyfly?.tokens ?? [], reasoning + content)) {
      this.records.push({ ...record, round: record.round + offset });
    }
    this.showSoon();
  }

  // A long answer takes a while to be drawn: a quarter of the time at most.
  showSoon() {
    if (this.isDrawn === false) return;
    this.isDrawn = false;
    this.timer = setTimeout(() => {
      const begun = performance.now();
      this.show();
      this.say?.(parts(this.kept).text, false);
      this.pause = 3 * (performance.now() - begun);
    }, Math.max(40, this.pause ?? 0));
  }

  show() {
    this.isDrawn = true;
    const { thinking, text, isThinking } = parts(this.kept);
    this.thinking.hidden = !thinking;
    this.thinkingTitle.textContent = isThinking && this.isRunning ? "Thinking …" : "Thoughts";
    this.thinkingText.textContent = thinking;
    markdown.show(this.text, text);
    this.box.classList.toggle("recorded", this.records.length > 0);
    if (this.records.length && document.body.classList.contains("drafts")) tokens.show(this.tokens, this.records);
    this.numbers.textContent = this.isRunning && !this.first ? this.wait() : this.counts().join(" · ");
    this.goOn.hidden = !CONTINUED.includes(this.kept.ending) || this.isEmpty;
    this.box.dispatchEvent(new Event("grown", { bubbles: true }));
  }

  /** What the server does before the first token. */
  wait() {
    if (!this.progress) return "waiting for the server …";
    return `reading the prompt: ${whole(this.progress.processed)} of ${whole(this.progress.total)} tokens`;
  }

  counts() {
    const seen = this.records.slice(this.nBefore ?? 0);
    const out = [];
    if (seen.length) {
      const steps = new Set(seen.map(record => record.round)).size;
      const seconds = (this.last - this.first) / 1000;
      out.push(`${seen.length} tokens`);
      if (seconds > 0) out.push(`${number((seen.length - 1) / seconds, 1)} a second`);
      out.push(`${number(seen.length / steps)} a step`, `${seen.filter(record => record.origin === "loose").length} loose`);
      out.push(`first after ${number((this.first - this.began) / 1000, 1)} s`);
    }
    if (this.kept.ending in ENDINGS) out.push(ENDINGS[this.kept.ending]);
    return out;
  }
}

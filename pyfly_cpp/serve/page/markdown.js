// Markdown as elements. What a model writes stays text: HTML in it is shown, not obeyed, and nothing is loaded.
import { marked } from "./kept/marked.js";
import "./kept/purify.js";
import hljs from "./kept/highlight.js";
import { copyButton, element } from "./dom.js";

const MOST_HIGHLIGHTED = 50_000; // characters of a code block
const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p", "pre",
  "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
];
const ATTRIBUTES = ["align", "checked", "class", "data-language", "disabled", "href", "start", "title", "type"];

const escape = text => text.replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

marked.use({
  breaks: true,
  renderer: {
    code({ text, lang }) {
      const language = /^[\w+#.-]*/.exec(lang ?? "")[0].toLowerCase();
      const isKnown = hljs.getLanguage(language) && text.length < MOST_HIGHLIGHTED;
      const shown = isKnown ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escape(text);
      return `<pre data-language="${escape(language)}"><code>${shown}\n</code></pre>`;
    },
    html: ({ text, block }) => block ? `<p>${escape(text.trim()).replaceAll("\n", "<br>")}</p>` : escape(text),
    image({ href, text, title }) {
      return this.link({ href, title, tokens: [{ type: "text", raw: text, text: text || href }] });
    },
  },
});

function renderBlock(block) {
  const made = element("div", "block");
  made.source = block.raw;
  const options = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, RETURN_DOM_FRAGMENT: true };
  made.append(globalThis.DOMPurify.sanitize(marked.parser([block]), options));
  for (const link of made.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const table of made.querySelectorAll("table")) {
    const scroller = element("div", "scroller");
    table.replaceWith(scroller);
    scroller.append(table);
  }
  for (const pre of made.querySelectorAll("pre")) {
    const frame = element("div", "code");
    frame.dataset.language = pre.dataset.language;
    pre.replaceWith(frame);
    pre.tabIndex = 0; // scrolls by keys
    frame.append(copyButton(() => pre.textContent, "Copy code"), pre);
  }
  return made;
}

/** The parts [begin, end) of a text in Markdown that are code: blocks between fences, with these, and `code` in a line. */
export function codeOf(text) {
  const found = [];
  let fence = null; // what opened the block that a line stands in
  let begin = 0; // of the block
  let at = 0; // of the line
  for (const line of text.split("\n")) {
    const end = at + line.length;
    const [, marks, rest] = /^[\s>]*(?:(?:[-*+]|\d+[.)])\s+)?(`{3,}|~{3,})(.*)$/.exec(line) ?? [];
    if (fence) {
      const closes = marks?.startsWith(fence) && !rest.trim();
      if (closes) { found.push([begin, end]); fence = null; }
    } else if (marks && !(marks[0] === "`" && rest.includes("`"))) {
      fence = marks;
      begin = at;
    } else {
      for (const { index, 0: code } of line.matchAll(/(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)/g)) {
        found.push([at + index, at + index + code.length]);
      }
    }
    at = end + 1;
  }
  if (fence) found.push([begin, text.length]);
  return found;
}

/** Shows Markdown in a place. Blocks that are shown already stay as they are, with what is selected in them. */
export function show(place, text) {
  try {
    showBlocks(place, text);
  } catch { // too deep for the reader of Markdown
    place.replaceChildren(element("p", "", text));
  }
}

function showBlocks(place, text) {
  const blocks = marked.lexer(text).filter(block => block.type !== "space");
  let n = 0;
  while (n < blocks.length && place.children[n]?.source === blocks[n].raw) n++;
  while (place.children.length > n) place.lastChild.remove();
  place.append(...blocks.slice(n).map(renderBlock));
}

// Short words for the page's elements.

export const $ = id => document.getElementById(id);

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function button(text, onClick, label = text) {
  const made = element("button", "small", text);
  made.type = "button";
  made.setAttribute("aria-label", label);
  made.addEventListener("click", () => onClick(made));
  return made;
}

/** A button that copies what `text()` returns, and shows for two seconds whether it did; a screen reader hears it. */
export function copyButton(text, label) {
  let timer;
  const show = (made, words, done) => {
    made.textContent = words || "Copy";
    made.classList.toggle("done", done);
    $("told").textContent = words;
  };
  return button("Copy", async made => {
    const done = await copy(text());
    show(made, done ? "Copied" : "Not copied", done);
    clearTimeout(timer);
    timer = setTimeout(show, 2000, made, "", false);
  }, label);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // pages of plain http from other machines have no clipboard
    const area = element("textarea", "visually-hidden");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** Has the browser save a file. */
export function download(name, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Shows a failure above the message box, the only place, until the box changes; empty: none. */
export function alertOf(text) {
  $("alert").hidden = !text;
  $("alert").textContent = text;
}

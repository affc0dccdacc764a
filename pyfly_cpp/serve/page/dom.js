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

/** A button that copies what `text()` returns. */
export function copyButton(text, label) {
  return button("Copy", async made => {
    made.textContent = await copy(text()) ? "Copied" : "Not copied";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
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

/** Shows a failure above the message box; empty: none. */
export function alertOf(text) {
  $("alert").hidden = !text;
  $("alert").textContent = text;
}

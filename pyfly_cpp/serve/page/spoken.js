// What a screen reader hears of an answer: its paragraphs as they are complete, without code marks or statistics.
import { $, element } from "./dom.js";

/**
 * Returns say(text, isWhole), which speaks the part of a growing answer that is new.
 * @param name of the answer; with a name it is spoken when it is whole, as another one is written at the same time
 * @param begin characters that were spoken before
 */
export function speaker(name, begin) {
  if (!begin) $("spoken").replaceChildren();
  let said = begin;
  return (text, isWhole) => {
    const end = isWhole ? text.length : name ? said : Math.max(said, text.lastIndexOf("\n\n"));
    const fresh = text.slice(said, end).trim();
    said = end;
    if (fresh) $("spoken").append(element("p", "", (name ? `${name}: ` : "") + fresh.replaceAll(/[`*#]+/g, "")));
  };
}

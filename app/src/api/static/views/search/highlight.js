// Marks the words of a query in a text, whatever their case and accents. Gives nodes, never markup.

import { h } from "../../dom.js";

const WORD = /[\p{L}\p{N}][\p{L}\p{N}\p{M}]*/gu;
const LEAST_STEM = 4;
const ENDING = 2;
const LITTLE = new Set(
  ("a an and are as at by for from in is it of on or that the this to was with " +
    "am auf fur uber aus bei das dem den der des die ein eine einem einen einer ist im in mit nach oder und von zu zum zur").split(" "),
);

/** The words to mark, folded. */
export function wordsOf(query) {
  const words = [...query.matchAll(WORD)].map(([word]) => fold(word));
  const telling = words.filter((word) => !LITTLE.has(word));
  return [...new Set(telling.length > 0 ? telling : words)];
}

/** Strings and <mark>s, which make up the text. */
export function highlighted(text, words) {
  if (words.length === 0) return [text];
  const parts = [];
  let done = 0;
  for (const match of text.matchAll(WORD)) {
    if (!meant(fold(match[0]), words)) continue;
    if (match.index > done) parts.push(text.slice(done, match.index));
    parts.push(h("mark", null, match[0]));
    done = match.index + match[0].length;
  }
  parts.push(text.slice(done));
  return parts;
}

/** The words of the text that match, each once and in order. */
export function matchedIn(text, words) {
  const found = [...text.matchAll(WORD)].map(([word]) => word).filter((word) => meant(fold(word), words));
  return [...new Map(found.map((word) => [fold(word), word])).values()];
}

/** The position of the first match, or -1. */
export function firstOf(text, words) {
  for (const match of text.matchAll(WORD)) if (meant(fold(match[0]), words)) return match.index;
  return -1;
}

function fold(word) {
  return word.normalize("NFD").replace(/\p{M}+/gu, "").toLowerCase().replaceAll("ß", "ss");
}

/** The word itself, one that goes on where it ends, one without its ending, a number without its leading zeros. */
function meant(word, words) {
  return words.some((wanted) => {
    if (word === wanted) return true;
    if (/^\d+$/.test(wanted)) return /^\d+$/.test(word) && word.replace(/^0+/, "") === wanted.replace(/^0+/, "");
    if (wanted.length >= LEAST_STEM && word.startsWith(wanted)) return true;
    return word.length >= LEAST_STEM && wanted.startsWith(word) && wanted.length - word.length <= ENDING;
  });
}

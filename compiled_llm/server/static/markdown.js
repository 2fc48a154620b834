// Markdown -> elements. Only those made here come to be: HTML in the text stays text, and a link is http, https or mail.

import {copyButton, el} from "./dom.js";

const DEEPEST = 12;
const LONGEST = 20000;

// Shows a text in a container. As it grows, blocks that have not changed stay as they are.
export function showMarkdown(container, text) {
  const blocks = blocksOf(text);
  blocks.forEach((block, index) => {
    const shown = container.children[index];
    if (shown?.source === block.source) return;
    const made = block.code === undefined ? el("div", {}, lines(block.source.split("\n"))) : codeBlock(block);
    made.source = block.source;
    if (shown) shown.replaceWith(made);
    else container.append(made);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

// Fenced code, and what lies between blank lines.
function blocksOf(text) {
  const blocks = [];
  let open = null;   // the block that lines are added to
  for (const line of text.split("\n")) {
    if (open?.fence) {
      open.source += "\n" + line;
      const end = line.trim();
      if (end.startsWith(open.fence) && !end.replaceAll(open.fence[0], "")) open = null;
      else open.code.push(line.startsWith(open.indent) ? line.slice(open.indent.length) : line);
      continue;
    }
    const fence = line.match(/^(\s*)(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/);
    if (fence) {
      open = {source: line, code: [], indent: fence[1], fence: fence[2], language: fence[3].trim().split(/\s/)[0]};
      blocks.push(open);
    } else if (!line.trim()) {
      open = null;
    } else if (open) {
      open.source += "\n" + line;
    } else {
      open = {source: line};
      blocks.push(open);
    }
  }
  return blocks;
}

function codeBlock({code, language}) {
  const text = code.join("\n");
  return el("figure", {class: "code"},
    el("figcaption", {}, el("span", {}, language || "text"), copyButton(() => text)),
    el("pre", {tabindex: 0}, el("code", {}, text)));
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const isSpecial = line => /^#{1,6}\s/.test(line) || /^\s*>/.test(line) || ITEM.test(line) || RULE.test(line);

// The elements of lines without a blank one between them. What is nested deeper than anyone writes stays as it is.
function lines(given, depth = 0) {
  if (depth > DEEPEST) return [el("p", {}, given.join("\n"))];
  const made = [];
  const take = holds => {  // lines from the next one on; holds(line, whether it is the first one)
    const end = given.findIndex((line, index) => !holds(line, index === 0));
    return given.splice(0, end < 0 ? given.length : end);
  };
  given = [...given];
  while (given.length) {
    const heading = given[0].match(/^(#{1,6})\s+(.*)$/);
    if (heading) {
      // Those of the page come first, so that the outline is one of the whole page.
      made.push(el(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2].replace(/\s#+\s*$/, ""))));
      given.shift();
    } else if (RULE.test(given[0])) {
      made.push(el("hr"));
      given.shift();
    } else if (/^\s*>/.test(given[0])) {
      const quoted = take(line => /^\s*>/.test(line)).map(line => line.replace(/^\s*> ?/, ""));
      made.push(el("blockquote", {}, lines(quoted, depth + 1)));
    } else if (ITEM.test(given[0])) {
      const own = take(line => ITEM.test(line) || /^\s/.test(line) || !isSpecial(line));
      made.push(list(own, depth));
    } else if (given.length > 1 && given[0].includes("|") && TABLE_RULE.test(given[1])) {
      made.push(table(take(line => line.includes("|"))));
    } else {
      const text = take((line, isFirst) => isFirst || !isSpecial(line));
      made.push(el("p", {}, inline(text.join("\n"))));
    }
  }
  return made;
}

function list(given, depth) {
  const [, indent, mark] = given[0].match(ITEM);
  const isOrdered = /\d/.test(mark);
  const items = [];
  for (const line of given) {
    const item = line.match(ITEM);
    if (item && item[1].length <= indent.length + 1) items.push([item[3]]);
    else items.at(-1).push(line.replace(/^\s{1,4}/, ""));
  }
  const made = items.map(([first, ...more]) => {
    const text = [first];
    while (more.length && !isSpecial(more[0])) text.push(more.shift());
    return el("li", {}, inline(text.join("\n")), lines(more, depth + 1));
  });
  return isOrdered ? el("ol", {start: parseInt(mark)}, made) : el("ul", {}, made);
}

function table([head, , ...rows]) {
  const cells = (row, name) => row.trim().replace(/^\||\|$/g, "").split("|")
    .map(cell => el(name, {}, inline(cell.trim())));
  return el("div", {class: "wide", tabindex: 0}, el("table", {},
    el("thead", {}, el("tr", {}, cells(head, "th"))),
    el("tbody", {}, rows.map(row => el("tr", {}, cells(row, "td"))))));
}

// What begins with a character within a line: patterns, and what they make of a match, or null.
const LINK = [/!?\[([^\]\n]*)\]\(\s*<?([^\s)>]+)>?(?:\s+"[^"]*")?\s*\)/y, (match, depth) => link(match[2], match[1], depth)];
const wrapped = (pattern, name) => [pattern, (match, depth) => el(name, {}, inline(match[1], depth + 1))];
const INLINE = {
  "\\": [[/\\([\\`*_{}[\]()#+\-.!~|<>])/y, match => match[1]]],
  "`": [[/(`+)(?!`)([^]*?[^`])\1(?!`)/y, match => el("code", {}, match[2].replace(/^ (.*) $/, "$1"))]],
  "!": [LINK],
  "[": [LINK],
  "<": [[/<(https?:\/\/[^\s>]+)>/y, match => link(match[1], match[1])]],
  "h": [[/https?:\/\/[^\s<>()"'`*]*[\w/#=]/y, match => link(match[0], match[0])]],
  "*": [
    wrapped(/\*\*(?=\S)([^]*?\S)\*\*/y, "strong"),
    wrapped(/\*(?=[^\s*])([^*]*?[^\s*])\*(?!\*)/y, "em"),
  ],
  "_": [
    wrapped(/(?<!\w)__(?=\S)([^]*?\S)__(?!\w)/y, "strong"),
    wrapped(/(?<!\w)_(?=[^\s_])([^_]*?[^\s_])_(?!\w)/y, "em"),
  ],
  "~": [wrapped(/~~(?=\S)([^]*?\S)~~/y, "del")],
  "\n": [[/\n/y, () => el("br")]],
};

// Elements and texts. A text so long that patterns take time stays as it is.
function inline(text, depth = 0) {
  if (depth > DEEPEST || text.length > LONGEST) return [text];
  const made = [];
  let plain = "", at = 0;
  while (at < text.length) {
    const [found, length] = elementAt(text, at, depth);
    if (found === null) plain += text.slice(at, at + length);
    else {
      made.push(plain, found);
      plain = "";
    }
    at += length;
  }
  return [...made, plain];
}

// What begins there, or null; and how many characters it has.
function elementAt(text, at, depth) {
  for (const [pattern, make] of INLINE[text[at]] ?? []) {
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    const made = match && make(match, depth);
    if (made) return [made, match[0].length];
  }
  return [null, 1];
}

function link(address, text, depth = 0) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return null;
  const shown = !text || text === address ? [address] : inline(text, depth + 1);
  return el("a", {href: address, target: "_blank", rel: "noopener noreferrer", title: address}, shown);
}

// Log-probabilities of an answer: [text, log-probability, [[text, log-probability] of the likeliest]] for each token.

import {el} from "./dom.js";

// Of a chunk's choice, whose form is that of a chat or of a completion. ``decoder``: keeps bytes that are a part of a character.
export function tokensOf({logprobs}, decoder) {
  if (logprobs.content) {
    return logprobs.content.map(one => [
      one.bytes ? decoder.decode(new Uint8Array(one.bytes), {stream: true}) : one.token,
      one.logprob,
      one.top_logprobs.map(({token, logprob}) => [token, logprob]),
    ]);
  }
  return logprobs.tokens.map((token, index) =>
    [token, logprobs.token_logprobs[index], Object.entries(logprobs.top_logprobs[index])]);
}

// Shows tokens, each with its probability as a colour. Those that are shown already stay.
export function showTokens(container, tokens) {
  if (!container.matches(".tokens") || container.children.length > tokens.length) {
    container.className = "content tokens";
    container.replaceChildren();
  }
  for (const [text, logprob, top] of tokens.slice(container.children.length)) {
    const span = el("span", {tabindex: container.children.length ? -1 : 0}, text);
    span.style.setProperty("--doubt", 1 - Math.exp(logprob));
    span.token = {text, logprob, top};
    container.append(span);
  }
}

const percent = logprob => `${(100 * Math.exp(logprob)).toFixed(1)}%`;
const visible = text => JSON.stringify(text).slice(1, -1) || "a part of a character";

// The alternatives to the token under the pointer, or that the keyboard has come to: Tab, and then the arrows.
export function explainTokens(container) {
  const bubble = el("div", {class: "bubble", role: "tooltip", id: "alternatives", hidden: true});
  document.body.append(bubble);
  const show = ({target}) => {
    bubble.hidden = !target.token;
    if (bubble.hidden) return;
    const {text, logprob, top} = target.token;
    const others = top.some(([other]) => other === text) ? top : [[text, logprob], ...top];
    bubble.replaceChildren(el("table", {}, ...others.map(([other, value]) => {
      const bar = el("progress", {max: 1, value: Math.exp(value), "aria-hidden": "true"});
      return el("tr", {class: other === text && "chosen"},
        el("td", {}, visible(other)), el("td", {}, percent(value)), el("td", {}, bar));
    })));
    const place = target.getBoundingClientRect();
    bubble.style.left = `${Math.max(4, Math.min(place.left, innerWidth - bubble.offsetWidth - 8))}px`;
    const below = place.bottom + 6;
    bubble.style.top = `${below + bubble.offsetHeight < innerHeight ? below : place.top - bubble.offsetHeight - 6}px`;
    target.setAttribute("aria-describedby", "alternatives");
  };
  container.addEventListener("keydown", ({key, target}) => {
    if (target.token && key === "ArrowRight") target.nextElementSibling?.focus();
    if (target.token && key === "ArrowLeft") target.previousElementSibling?.focus();
  });
  for (const kind of ["mouseover", "focusin"]) container.addEventListener(kind, show);
  for (const kind of ["mouseleave", "focusout", "scroll"]) container.addEventListener(kind, () => { bubble.hidden = true; });
}

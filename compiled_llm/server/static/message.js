// One message of the conversation, as it is shown.

import {copyButton, el} from "./dom.js";
import {showMarkdown} from "./markdown.js";
import {showTokens} from "./tokens.js";

const NAMES = {user: "You", assistant: "Model", tool: "Result of a tool"};
const ENDS = {length: "cut off at max tokens", tool_calls: "calls tools", stopped: "stopped"};

// Args: the message; actions: a label and a function for each button.
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.content = el("div", {class: "content"});
    this.reasoning = el("div", {class: "content"});
    this.thinking = el("details", {class: "reasoning", open: true, hidden: true}, el("summary", {}, "Reasoning"), this.reasoning);
    this.calls = el("div", {class: "calls"});
    this.error = el("p", {class: "error", role: "alert", hidden: true});
    this.stats = el("p", {class: "stats"});
    const buttons = actions.map(([label, action]) => el("button", {type: "button", onclick: () => action(this)}, label));
    const name = NAMES[message.role];
    this.element = el("article", {class: `message ${message.role}`, "aria-label": name},
      el("header", {}, el("h2", {}, name), el("div", {class: "actions"}, copyButton(() => message.content), ...buttons)),
      this.thinking, this.content, this.calls, this.error, this.stats);
  }

  // Shows what the message has by now.
  update({isRunning = false, showsTokens = false, isPlain = false} = {}) {
    const {role, content, reasoning, tool_calls: calls = [], tokens = [], error, stats} = this.message;
    this.element.setAttribute("aria-busy", isRunning);
    this.element.classList.toggle("running", isRunning);
    if (reasoning) {
      this.thinking.hidden = false;
      showMarkdown(this.reasoning, reasoning);
      if (content && !this.wasClosed) {
        this.thinking.open = false;
        this.wasClosed = true;
      }
    }
    if (showsTokens && tokens.length) {
      showTokens(this.content, tokens);
    } else if (isPlain || role !== "assistant") {
      this.content.className = "content plain";
      this.content.textContent = content;
    } else {
      if (this.content.className !== "content") this.content.replaceChildren();
      this.content.className = "content";
      showMarkdown(this.content, content);
    }
    this.calls.replaceChildren(...calls.map(showCall));
    this.error.hidden = !error;
    this.error.textContent = error ?? "";
    this.stats.textContent = stats ? statsText(stats) : isRunning ? "waits for the first token" : "";
  }

  // A form in the place of the content. saved(text) is called if it is sent.
  edit(saved) {
    if (this.form) return this.field.focus();
    this.field = el("textarea", {"aria-label": "Text of the message"});
    this.field.value = this.message.content;
    const end = () => {
      this.form.remove();
      this.form = null;
      this.content.hidden = false;
    };
    const save = () => {
      const text = this.field.value;
      end();
      saved(text);
    };
    this.form = el("form", {class: "edit", onsubmit: event => { event.preventDefault(); save(); }}, this.field,
      el("button", {class: "main"}, this.message.role === "user" ? "Send" : "Save"),
      el("button", {type: "button", onclick: end}, "Cancel"));
    this.field.addEventListener("keydown", event => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
      if (event.key === "Escape") end();
    });
    this.content.hidden = true;
    this.content.after(this.form);
    this.field.rows = Math.min(20, this.message.content.split("\n").length + 1);
    this.field.focus();
  }
}

function showCall(call) {
  let shown = call.function.arguments;
  try {
    shown = JSON.stringify(JSON.parse(shown), null, 2);
  } catch { /* it is not complete, or no JSON */ }
  return el("figure", {class: "code call"},
    el("figcaption", {}, el("span", {}, "calls ", el("strong", {}, call.function.name)), copyButton(() => call.function.arguments)),
    el("pre", {tabindex: 0}, el("code", {}, shown)));
}

function statsText({first, tokens, rate, prompt, cached, end}) {
  const parts = [
    first !== undefined && `first token ${first < 1000 ? `${Math.round(first)} ms` : `${(first / 1000).toFixed(1)} s`}`,
    tokens !== undefined && `${tokens} token${tokens === 1 ? "" : "s"}`,
    rate && `${rate.toFixed(1)} tokens/s`,
    prompt !== undefined && `prompt of ${prompt}${cached ? `, ${cached} cached` : ""}`,
    ENDS[end],
  ];
  return parts.filter(Boolean).join(" · ");
}

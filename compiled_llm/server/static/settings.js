// What is sent with every request: the form beside the conversation, which the browser keeps.

import {$, el} from "./dom.js";

const STORED = "compiled-llm.settings";
const NUMBERS = [
  ["temperature", "Temperature", "0 takes the likeliest token; higher is more varied"],
  ["top_p", "Top p", "only the likeliest tokens that have this probability together"],
  ["top_k", "Top k", "only so many of the likeliest tokens; 0: all"],
  ["min_p", "Min p", "only tokens that have this share of the likeliest one's probability"],
  ["max_tokens", "Max tokens", "of an answer"],
  ["seed", "Seed", "the same seed gives the same answer"],
  ["presence_penalty", "Presence penalty", "against tokens that the answer has already"],
  ["frequency_penalty", "Frequency penalty", "against these, as often as it has them"],
  ["repetition_penalty", "Repetition penalty", "against tokens of prompt and answer; 1: none"],
];
const TEXT_TOKENS = 256;  // a server's own number for plain text is 16

const form = $("settings");
let changed = () => {};

// whenChanged() is called after each change.
export function startSettings(whenChanged) {
  changed = whenChanged;
  $("sampling").append(...NUMBERS.map(([name, label, title]) =>
    el("label", {title}, label, el("input", {name, type: "number", step: "any", placeholder: "default"}))));
  let stored = {};
  try {
    stored = JSON.parse(localStorage.getItem(STORED)) ?? {};
  } catch { /* what is there was not written by this page */ }
  for (const field of fields()) {
    if (field.type === "checkbox") field.checked = stored[field.name] === true;
    else if (typeof stored[field.name] === "string") field.value = stored[field.name];
  }
  const keep = () => {
    const values = fields().filter(field => !field.disabled).map(field => [field.name, field.type === "checkbox" ? field.checked : field.value]);
    localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(values)));
    form.classList.toggle("text", isText());
    changed();
  };
  form.addEventListener("input", keep);
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(keep));
  keep();
}

const fields = () => [...form.elements].filter(field => field.name);

// Whether the model goes on with a plain text, in the place of a conversation.
export const isText = () => form.elements.mode.value === "text";

export const showsTokens = () => form.elements.logprobs.checked;

// There is no chat template: only plain text is left.
export function allowOnlyText() {
  form.elements.mode.value = "text";
  form.elements.mode.disabled = true;
  form.classList.add("text");
  changed();
}

// The fields of a request that come from the form. Error: the list of tools is none.
export function requestFields() {
  const asked = {stream: true, stream_options: {include_usage: true, continuous_usage_stats: true}};
  for (const [name] of NUMBERS) {
    if (form.elements[name].value) asked[name] = Number(form.elements[name].value);
  }
  if (isText()) return {max_tokens: TEXT_TOKENS, ...asked, ...(showsTokens() && {logprobs: 5})};
  const tools = form.elements.tools.value.trim();
  return {...asked, ...(showsTokens() && {logprobs: true, top_logprobs: 5}), ...(tools && {tools: listOfTools(tools)})};
}

function listOfTools(text) {
  try {
    const tools = JSON.parse(text);
    if (Array.isArray(tools)) return tools;
  } catch { /* said below */ }
  throw new Error("The tools of the settings must be a list in JSON.");
}

export const systemPrompt = () => isText() ? "" : form.elements.system.value.trim();

// One answer: a request is made of the conversation, and the stream becomes the last message.

import {events} from "./api.js";
import {isText, requestFields, systemPrompt} from "./settings.js";
import {tokensOf} from "./tokens.js";

// Fills the last message, and calls changed() after each event. What goes wrong is in its field "error".
export async function generate(messages, model, signal, changed) {
  const message = messages.at(-1), decoder = new TextDecoder(), started = performance.now();
  let firstAt, firstCount;
  message.stats = undefined;
  message.error = undefined;
  const before = message.content;
  if (before) message.tokens = undefined;  // those of its first part are only a part of all
  else message.tool_calls = message.reasoning = undefined;
  try {
    const [path, body] = isText() ? textRequest(messages) : chatRequest(messages, before !== "");
    for await (const event of events(path, {model, ...body}, signal)) {
      const now = performance.now(), choice = event.choices[0], count = event.usage?.completion_tokens ?? 0;
      if (choice) take(message, choice, decoder, before === "");
      if (count && firstAt === undefined) [firstAt, firstCount] = [now, count];
      const seconds = (now - firstAt) / 1000;
      message.stats = {
        ...message.stats,
        ...(count && {first: firstAt - started, tokens: count}),
        ...(choice && count && seconds > 0 && {rate: (count - firstCount) / seconds}),
        ...(event.usage && {prompt: event.usage.prompt_tokens, cached: event.usage.prompt_tokens_details?.cached_tokens}),
        ...(choice?.finish_reason && {end: choice.finish_reason}),
      };
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") message.stats = {...message.stats, end: "stopped"};
    else [message.error, message.status] = [error.message, error.status];
  }
}

// Plain text goes on where all that was written ends.
const textRequest = messages => ["v1/completions", {prompt: messages.map(({content}) => content).join(""), ...requestFields()}];

function chatRequest(messages, continues) {
  const system = systemPrompt();
  const sent = continues ? messages : messages.slice(0, -1);
  return ["v1/chat/completions", {
    messages: [...(system ? [{role: "system", content: system}] : []), ...sent.map(sentForm)],
    ...requestFields(),
    ...(continues && {continue_final_message: true, add_generation_prompt: false}),
  }];
}

function sentForm({role, content, tool_calls, tool_call_id}) {
  return {role, content, ...(tool_calls?.length && {tool_calls}), ...(tool_call_id && {tool_call_id})};
}

// Adds what a chunk has to the message.
function take(message, choice, decoder, keepsTokens) {
  const delta = choice.delta ?? {content: choice.text};
  message.content += delta.content ?? "";
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  for (const {index, id, function: part} of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = message.tool_calls[index] ??= {id: "", type: "function", function: {name: "", arguments: ""}};
    call.id ||= id ?? "";
    call.function.name += part?.name ?? "";
    call.function.arguments += part?.arguments ?? "";
  }
  if (keepsTokens && choice.logprobs) (message.tokens ??= []).push(...tokensOf(choice, decoder));
}

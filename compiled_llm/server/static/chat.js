// The tab "Chat": the conversation that is shown, and what one can do with it.

import {$, el} from "./dom.js";
import {generate} from "./generate.js";
import {MessageView} from "./message.js";
import {isText, showsTokens, startSettings} from "./settings.js";
import {exportToFile, forget, importFromFile, keep, newConversation, storedConversations, titleOf} from "./store.js";
import {explainTokens} from "./tokens.js";

let conversation = newConversation();
let views = [];        // of its messages
let running = null;    // what stops the answer that comes
let model = "";
let needKey = () => {};

export function startChat(askForKey) {
  needKey = askForKey;
  conversation = storedConversations()[0] ?? conversation;
  $("prompt").focus();
  explainTokens($("messages"));
  startSettings(() => views.length ? views.forEach(view => update(view, running && view === views.at(-1))) : showAll());
  showAll();
  $("composer").addEventListener("submit", event => { event.preventDefault(); send(); });
  $("prompt").addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("input", fitPrompt);
  $("stop").addEventListener("click", stop);
  document.addEventListener("keydown", event => { if (event.key === "Escape") stop(); });
  $("new").addEventListener("click", () => show(newConversation()));
  $("delete").addEventListener("click", remove);
  $("export").addEventListener("click", () => exportToFile(conversation));
  $("import").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", load);
  $("conversations").addEventListener("change", event =>
    show(storedConversations().find(({id}) => id === event.target.value) ?? newConversation()));
}

export function useModel(name) {
  model = name;
}

function show(other) {
  stop();
  conversation = other;
  showAll();
  $("prompt").focus();
}

function showAll() {
  views = conversation.messages.map(message => new MessageView(message, actionsOf(message)));
  $("messages").replaceChildren(...views.map(view => view.element));
  if (!views.length) $("messages").append(el("p", {class: "empty"}, isText() ? "Write the beginning of a text." : "Ask the model something."));
  views.forEach(view => update(view));
  showCallsToAnswer();
  showList();
  $("messages").scrollTop = $("messages").scrollHeight;
}

function showList() {
  const others = storedConversations().filter(({id}) => id !== conversation.id);
  $("conversations").replaceChildren(...[conversation, ...others].map(one => el("option", {value: one.id}, titleOf(one))));
}

function update(view, isRunning = false) {
  const log = $("messages");
  const isAtEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
  view.update({isRunning, showsTokens: showsTokens(), isPlain: isText()});
  if (isRunning && isAtEnd) log.scrollTop = log.scrollHeight;
}

function actionsOf(message) {
  const edit = ["Edit", view => view.edit(text => change(message, text))];
  if (message.role === "tool") return [edit];
  if (message.role === "user") return [edit, ["Retry", () => answerAfter(message)]];
  return [edit, ["Continue", () => resume(message)], ["Regenerate", () => regenerate(message)]];
}

function change(message, text) {
  message.content = text;
  if (message.role === "user") return answerAfter(message);
  message.tokens = undefined;
  store(conversation);
  showAll();
}

// Ends what comes, and drops all messages after this one.
function cutAfter(message) {
  stop();
  conversation.messages.length = conversation.messages.indexOf(message) + 1;
}

function answerAfter(message) {
  cutAfter(message);
  answer();
}

function regenerate(message) {
  cutAfter(message);
  conversation.messages.pop();
  answer();
}

function resume(message) {
  cutAfter(message);
  showAll();
  run(views.at(-1));
}

function send() {
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  $("prompt").value = "";
  fitPrompt();
  conversation.messages.push({role: "user", content: isText() ? text : text.trim()});
  answer();
}

function answer() {
  conversation.messages.push({role: "assistant", content: ""});
  store(conversation);
  showAll();
  run(views.at(-1));
}

async function run(view) {
  const own = running = new AbortController();
  const asked = conversation;
  let isDue = false;
  const changed = () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      update(view, running === own);
    });
  };
  setRunning(true);
  update(view, true);
  $("spoken").textContent = "The model answers.";
  await generate(asked.messages.slice(0, asked.messages.indexOf(view.message) + 1), model, own.signal, changed);
  if (running === own) {
    running = null;
    setRunning(false);
  }
  update(view);
  $("spoken").textContent = view.message.error ? "" : `Answer: ${view.element.querySelector(".content:not(.reasoning *)").textContent}`;
  if (asked.messages.includes(view.message)) store(asked);
  if (asked === conversation) {
    showCallsToAnswer();
    showList();
  }
  if (view.message.status === 401) needKey();
}

function stop() {
  running?.abort();
  running = null;
  setRunning(false);
}

function setRunning(isRunning) {
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
}

function store(changed) {
  try {
    keep(changed);
  } catch (error) {
    say(error.message);
  }
}

export function say(text) {
  $("notice").hidden = !text;
  $("notice").textContent = text;
}

function remove() {
  if (conversation.messages.length && !confirm("Delete this conversation?")) return;
  conversation.messages = [];  // an answer that still comes does not bring it back
  forget(conversation);
  show(storedConversations()[0] ?? newConversation());
}

async function load(event) {
  const [file] = event.target.files;
  event.target.value = "";
  try {
    show(await importFromFile(file));
    say("");
    store(conversation);
    showList();
  } catch (error) {
    say(error.message);
  }
}

// Where the last message calls tools, their results can be given, and the model goes on.
function showCallsToAnswer() {
  const last = conversation.messages.at(-1);
  if (running || !last?.tool_calls?.length) return;
  const fields = last.tool_calls.map(call => el("textarea", {rows: 2, class: "code", "aria-label": `Result of ${call.function.name}`,
    placeholder: `Result of ${call.function.name}`}));
  const form = el("form", {class: "results", onsubmit: event => {
    event.preventDefault();
    last.tool_calls.forEach((call, index) =>
      conversation.messages.push({role: "tool", content: fields[index].value, tool_call_id: call.id}));
    answer();
  }}, ...fields, el("button", {class: "main"}, "Send results"));
  views.at(-1).element.append(form);
  $("messages").scrollTop = $("messages").scrollHeight;
}

function fitPrompt() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight / 3)}px`;
}

// Conversations in this browser, each under a name of its own, so that two tabs do not overwrite each other's.

const PREFIX = "compiled-llm.conversation.";
const ROLES = ["user", "assistant", "tool"];

export const newConversation = () => ({id: crypto.randomUUID?.() ?? String(Date.now()), changed: Date.now(), messages: []});

// All, the latest one first.
export function storedConversations() {
  return Object.keys(localStorage).filter(name => name.startsWith(PREFIX)).flatMap(name => {
    try {
      return [checked(JSON.parse(localStorage.getItem(name)))];
    } catch {
      return [];
    }
  }).sort((one, other) => other.changed - one.changed);
}

// Error: the browser has no room for it.
export function keep(conversation) {
  conversation.changed = Date.now();
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
  } catch {
    throw new Error("The browser has no more room for this conversation: export it, or delete others.");
  }
}

export function forget(conversation) {
  localStorage.removeItem(PREFIX + conversation.id);
}

export function titleOf(conversation) {
  const first = conversation.messages.find(({role}) => role === "user")?.content ?? "";
  return first.trim().split("\n")[0].slice(0, 60) || "New conversation";
}

// A file with the conversation, which the browser saves.
export function exportToFile(conversation) {
  const content = new Blob([JSON.stringify(conversation, null, 1)], {type: "application/json"});
  const day = new Date(conversation.changed).toISOString().slice(0, 16).replace(":", "");
  const link = Object.assign(document.createElement("a"), {href: URL.createObjectURL(content), download: `conversation-${day}.json`});
  link.click();
  URL.revokeObjectURL(link.href);
}

// A conversation from a file, under a new id. Error: it is none.
export async function importFromFile(file) {
  try {
    return {...checked(JSON.parse(await file.text())), id: newConversation().id};
  } catch {
    throw new Error(`${file.name} is no conversation that this page has exported.`);
  }
}

// Only what has the form that this page gives it is shown and sent. Error: it has another form.
function checked({id, changed, messages}) {
  return {id: String(id), changed: Number(changed) || 0, messages: messages.map(checkedMessage)};
}

function checkedMessage({role, content, reasoning, tool_calls: calls, tool_call_id, tokens, error, stats}) {
  const isText = value => typeof value === "string";
  const isCall = call => isText(call.id) && isText(call.function.name) && isText(call.function.arguments);
  const isToken = ([text, logprob, top]) => isText(text) && isFinite(logprob) && top.every(isLikely);
  const isLikely = ([text, logprob]) => isText(text) && isFinite(logprob);
  const isSound = ROLES.includes(role) && [content, reasoning ?? "", tool_call_id ?? "", error ?? ""].every(isText)
    && (calls ?? []).every(isCall) && (tokens ?? []).every(isToken)
    && Object.entries(stats ?? {}).every(([name, value]) => name === "end" || typeof value === "number");
  if (!isSound) throw new Error("a message of another form");
  return {role, content, reasoning, tool_calls: calls, tool_call_id, tokens, error, stats};
}

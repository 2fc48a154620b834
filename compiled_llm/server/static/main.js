// Starts the page: tabs, the key, and what the server says of itself.

import {ask, hasKey, useKey} from "./api.js";
import {say, startChat, useModel} from "./chat.js";
import {$} from "./dom.js";
import {startServer} from "./server.js";
import {allowOnlyText} from "./settings.js";

const TABS = ["chat", "server"];
const NO_TEMPLATE = "This model has no chat template: it is a base model, which answers nobody. It goes on with the text that you write.";
let model = null;

function select(name) {
  for (const tab of TABS) {
    const button = $(`${tab}-tab`), isSelected = tab === name;
    button.setAttribute("aria-selected", isSelected);
    button.tabIndex = isSelected ? 0 : -1;
    $(tab).hidden = !isSelected;
  }
  history.replaceState(null, "", name === "server" ? "#tab=server" : location.pathname);
}

function startTabs() {
  for (const tab of TABS) $(`${tab}-tab`).addEventListener("click", () => select(tab));
  document.querySelector("[role=tablist]").addEventListener("keydown", ({key}) => {
    if (key !== "ArrowLeft" && key !== "ArrowRight") return;
    const other = TABS.find(tab => $(tab).hidden);
    select(other);
    $(`${other}-tab`).focus();
  });
  select(location.hash === "#tab=server" ? "server" : "chat");
}

function startSettingsButton() {
  const button = $("show-settings");
  const show = isShown => {
    $("settings").hidden = !isShown;
    button.setAttribute("aria-expanded", isShown);
  };
  button.addEventListener("click", () => show($("settings").hidden));
  show(matchMedia("(min-width: 60rem)").matches);
}

function askForKey() {
  $("key-title").textContent = hasKey() ? "The server does not know this key" : "The server needs a key";
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

// Once the server is ready: which model it has, and whether that has a chat template.
async function meet() {
  const {data: [{id, max_model_len: longest}]} = await (await ask("v1/models")).json();
  model = {id, longest};
  $("model").textContent = id;
  useModel(id);
  try {
    await ask("tokenize", {messages: [{role: "user", content: "a"}]});
  } catch (error) {
    if (error.status !== 400 || !/template|tokenizer/.test(error.message)) throw error;
    allowOnlyText();
    say(NO_TEMPLATE);
  }
}

async function watch() {
  for (;;) {
    if (!document.hidden) {
      let state = "ready", kind = "good";
      try {
        await ask("health");
        if (!model) await meet();
      } catch (error) {
        [state, kind] = [error.message, "bad"];
        if (error.status === 401) askForKey();
      }
      if ($("state").textContent !== state) $("state").textContent = state;
      $("state").className = kind;
    }
    await new Promise(resolve => setTimeout(resolve, model ? 5000 : 1000));
  }
}

$("key-dialog").addEventListener("close", () => {
  useKey($("key").value.trim());
  $("key").value = "";
});
startTabs();
startSettingsButton();
startChat(askForKey);
startServer(() => model && `${model.id}: at most ${model.longest.toLocaleString("en")} tokens`);
watch();

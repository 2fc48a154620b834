// Elements of the page. Whatever a model, a server or a file wrote comes in as text, and is never read as HTML.

export const $ = id => document.getElementById(id);

// el("p", {class: "a", onclick: f}, "text", others): an element with attributes, listeners and children, or lists of these.
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child != null) made.append(child);
  return made;
}

// A button that copies what text() gives, and says so.
export function copyButton(text) {
  const button = el("button", {type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";  // by the browser: pages over plain HTTP from another machine
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }}, "Copy");
  return button;
}

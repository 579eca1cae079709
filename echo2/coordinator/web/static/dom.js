// Small hands for the document. Texts from the run are only ever set as text, never as markup.
export const $ = (id) => document.getElementById(id);
export function make(tag, attributes = {}, ...children) {
  const element = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}
export function aged(tag, attributes, text) { // its text changes with time alone: the page tells it anew each second
  const element = make(tag, { ...attributes, "data-aged": true }, text());
  element.told = text;
  return element;
}
export const setText = (element, text) => { if (element.textContent !== String(text)) element.textContent = text; };
let timer = 0;
export function toast(text, isBad = false) {
  const box = $("toast");
  box.textContent = text; box.className = isBad ? "on bad" : "on";
  clearTimeout(timer); timer = setTimeout(() => { box.className = ""; }, isBad ? 20000 : 4000); // what to do about an error takes longer to read
}
let csrf = null;
export async function act(path, body) {
  try {
    const send = async () => {
      csrf ??= (await (await fetch("/api/session")).json()).csrf;
      return fetch(path, { method: "POST", headers: { "content-type": "application/json", "x-echo2-csrf": csrf }, body: JSON.stringify(body) });
    };
    let response = await send();
    if (response.status === 403) { csrf = null; response = await send(); } // the coordinator was started again: its word is a new one
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error || response.statusText);
    return answer;
  } catch (error) { toast(error instanceof TypeError ? "The coordinator did not answer: look whether it was done before you press again." : error.message, true); return null; }
}
export function ask(dialog) {
  dialog.showModal();
  const box = $("toast"); // outside of it, it is behind the dialog and read to nobody; a report has none
  if (box) { dialog.append(box); dialog.onclose = () => document.body.append(box); }
  dialog.querySelectorAll("[data-close]").forEach((button) => { button.onclick = () => dialog.close(); });
}

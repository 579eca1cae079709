// Machines: offers, what is rented, what the planner advises, and the journal of paid actions.
import { $, act, aged, ask, make, setText, toast } from "./dom.js";
import { clock, count, dash, joined, seconds, usd } from "./format.js";
const kinds = { wanted: "info", starting: "info", running: "good", ending: "warn", releasing: "warn", gone: "" };
const perHour = (x) => x ? `${usd(x)}/h` : "no price", change = (sign, x) => x ? `${sign}${perHour(x)}` : "at no price";
export function showCommand(command, text) {
  $("link-command").textContent = command; $("link-text").textContent = text;
  $("link-copy").onclick = async () => {
    try { await navigator.clipboard.writeText(command); toast("copied"); }
    catch { getSelection().selectAllChildren($("link-command")); toast("The browser lets no page copy here: it is marked, copy it with Ctrl+C"); }
  };
  ask($("link-dialog"));
}
export function confirm(title, text, go, run) {
  $("confirm-title").textContent = title; $("confirm-text").textContent = text; $("confirm-go").textContent = go;
  const form = $("confirm-form"); form.reset(); $("confirm-reason").hidden = false; form.onsubmit = () => run(form.elements.reason.value); ask($("confirm-dialog"));
}
const runThis = "Run this on the machine that you rented; it lets one worker in:";
async function tellCommand(machine) {
  const told = await act("/api/machines/command", { machine_id: machine.machine_id });
  if (told) showCommand(told.command, runThis);
}
export async function rent(offer, reason) { // the machine, or null where it is refused
  const machine = await act("/api/machines", { offer: offer.name, reason });
  if (!machine) return null;
  if (machine.command) showCommand(machine.command, runThis);
  else toast(`${machine.machine_id} is ${machine.state}`);
  return machine;
}
const askRent = (offer) => confirm(`Rent one ${offer.name}?`, `From ${offer.provider}, at ${perHour(offer.price)}, until it is released.`, "Rent", (reason) => rent(offer, reason));
const askRelease = (machine) => confirm(`Release ${machine.machine_id}?`, `Its workers hand their leases to others, then ${machine.provider === "manual" ? "end the machine where you rented it: nobody else does" : "the machine ends"}.`, "Release", (reason) => act("/api/machines/release", { machine_id: machine.machine_id, reason }).then((ok) => ok && toast("its release has begun: its state says when it is gone")));
let seen = {}; // the advice as it is shown: no other is approved
export const approve = () => act("/api/machines/approve", seen).then((ok) => ok && toast(`${count(ok.count, "machine")} rented or released`));
function drawAdvice(advice, mode) {
  seen = { rent: Object.fromEntries(advice.rent.map((w) => [w.offer, w.count])), release: advice.release.map((w) => w.machine_id) };
  const wishes = [...advice.rent.map((w) => [`Rent ${w.count} x ${w.offer}`, change("+", w.usd_per_hour), w.reason]), ...advice.release.map((w) => [`Release ${w.machine_id}`, change("-", w.usd_per_hour), w.reason])];
  if (!wishes.length) { $("advice").replaceChildren(make("p", { class: "quiet" }, `Nothing to rent or release: ${advice.reason}.`)); return; }
  const button = make("button", { type: "button", class: "primary", id: "approve", onclick: approve }, mode === "approve" ? "Approve" : "Do it");
  $("advice").replaceChildren(make("div", { class: "wish" }, make("div", { class: "grow" }, ...wishes.map(([what, cost, why]) => make("p", {}, make("b", {}, what), ` ${cost} `, make("span", { class: "quiet" }, why)))), button));
}
function offerRow(offer) {
  const facts = [offer.provider, offer.gpu, perHour(offer.price), offer.is_spot ? "spot" : "", offer.is_automatic ? "" : "by hand only"].filter(Boolean).join(" · ");
  return make("li", {}, make("div", { class: "grow" }, make("b", {}, offer.name), make("span", { class: "quiet" }, ` ${facts} · ${offer.rented} of ${offer.max} rented`), offer.problem ? make("div", { class: "problem" }, offer.problem) : null), make("button", { type: "button", "aria-label": `Rent ${offer.name}`, disabled: offer.rented >= offer.max, onclick: () => askRent(offer) }, "Rent"));
}
function machineRow(machine, now) {
  const lasted = () => Math.max(0, (machine.ended ?? now()) - machine.since), isOpen = machine.state !== "gone";
  const show = machine.has_command ? make("button", { type: "button", onclick: () => tellCommand(machine) }, "Command") : null;
  const release = isOpen ? make("button", { type: "button", class: "ban", "aria-label": `Release ${machine.machine_id}`, onclick: () => askRelease(machine) }, "Release") : null;
  const cell = (label, kind, ...parts) => make("td", { class: kind || null, "data-label": label }, make("span", {}, ...parts));
  return make("tr", { class: isOpen ? null : "gone" },
    cell("Machine", "name wide", machine.machine_id, aged("span", { class: "sub" }, () => [machine.label, seconds(lasted())].filter(Boolean).join(" · "))),
    cell("State", "", make("span", { class: "chip dot " + kinds[machine.state] }, machine.state), machine.notice ? make("span", { class: "sub", title: machine.notice }, machine.notice) : null),
    cell("Price", "n", perHour(machine.price)), cell("Cost", "n", aged("span", {}, () => usd(machine.price * lasted() / 3600))), cell("Workers", "", machine.workers.join(", ") || dash),
    make("td", { class: "n act wide" }, make("span", { class: "row-actions" }, show, release)));
}
export function drawMachines(state, mode, now) {
  setText($("machines-mode"), { auto: "planner rents by itself", advise: "planner advises", approve: "planner waits for your word" }[mode] || "");
  setText($("machines-note"), state.count ? `${state.count} rented` : "none rented");
  drawAdvice(state.advice, mode);
  const focused = document.activeElement?.getAttribute?.("aria-label");
  $("offers").replaceChildren(...state.offers.map(offerRow));
  $("machines-table").hidden = !state.machines.length;
  $("machines-body").replaceChildren(...state.machines.map((machine) => machineRow(machine, now)));
  if (focused) [...document.querySelectorAll("#machines [aria-label]")].find((one) => one.getAttribute("aria-label") === focused)?.focus();
}
export function drawJournal(money) {
  const all = joined([...(money.journal || [])].reverse(), (one) => `${one.action} ${one.reason}`);
  $("journal").replaceChildren(...(all.length ? all.map(({ first: one, count, all: few }) => make("li", {}, make("time", {}, clock(one.unix_s)), make("span", { class: "n" }, count > 1 ? `${count} times` : perHour(one.usd_per_hour)), make("span", {}, make("b", {}, `${one.action} ${few.map((each) => each.whom).join(", ")}${count > few.length ? ` and ${count - few.length} more` : ""}`), count === 1 && one.usd_spent ? ` ${usd(one.usd_spent)} so far` : "", make("span", { class: "sub" }, one.reason)))) : [make("li", { class: "empty" }, "Nothing has been paid for.")]));
}

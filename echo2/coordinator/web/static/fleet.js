// The fleet table: rows are kept and changed in place, so that 500 workers cost little.
import { $, act, ask, make, setText, toast } from "./dom.js";
import { bytes, compare, count, dash, number, rate, seconds, usd, whole } from "./format.js";
import { drawTotals } from "./totals.js";
import { openWorker } from "./worker.js";
const rows = new Map(), chosen = new Set();
let nowSeen = Date.now() / 1000;
let sortBy = "name", descending = false, filter = "", newest = null, showsGone = false, isFinished = false;
const lagText = (w) => { if (w.version == null || newest == null) return ""; const lag = Math.max(0, newest - w.version); return lag === 0 ? "newest" : `${lag} behind`; };
const good = { alive: "good", suspect: "warn", gone: "bad" };
const works = { active: "good", standby: "", draining: "warn", quarantined: "bad", banned: "bad" };
const SAID_S = 3600; // a mishap of an hour ago is told in the worker's own view alone
const costsIdle = (w) => w.price > 0 && w.state !== "gone" && ["standby", "draining"].includes(w.activation);
const isBarred = (w) => w.setting === "banned" || w.setting === "quarantined";
function kinds(links) {
  const counts = {};
  for (const link of links || []) counts[link.kind] = (counts[link.kind] || 0) + 1;
  return Object.entries(counts).map(([kind, count]) => `${count} ${kind}`).join(", ");
}
function ways(w) { return [w.can_be_dialled ? "can be dialled" : `cannot be dialled; is met at ${count(w.relays, "relay")}`, ...(w.links || []).map((link) => `${link.peer}: ${link.kind}: ${link.reason}`)].join("\n"); }
const COLUMNS = [
  { key: "name", label: "Worker", text: (w) => w.name, sub: (w) => [w.gpu, w.engine, w.provider, w.region, w.is_spot ? "spot" : ""].filter(Boolean).join(" · "), kind: "name wide", opens: true },
  { key: "state", label: "State", chip: (w) => [w.state, "dot " + good[w.state]], sub: (w) => w.waits_for && `waits for ${w.waits_for}` },
  { key: "activation", label: "Work", chip: (w) => [w.activation || dash, works[w.activation] || ""], sub: (w) => isBarred(w) ? w.reason : costsIdle(w) ? `still costs ${usd(w.price)}/h` : "", title: (w) => w.reason },
  { key: "price", label: "Price", text: (w) => usd(w.price) + "/h", sub: (w) => usd(w.usd_spent) + " at work", n: true },
  { key: "tokens_per_s", label: "Tokens/s", text: (w) => number(w.tokens_per_s), sub: (w) => number(w.rollouts_per_s) + " rollouts/s", n: true },
  { key: "usd_per_mtok", label: "USD per M tokens", title: () => "its whole bill, standby included, over its tokens that were trained on, in millions", text: (w) => usd(w.usd_per_mtok), n: true },
  { key: "version", label: "Version", text: (w) => w.version == null ? dash : "v" + w.version, sub: lagText, n: true },
  { key: "leases", label: "Leases", text: (w) => whole(w.leases), sub: (w) => `${w.running} of ${count(w.slots, "slot")}` + (w.memory_used ? ` · ${bytes(w.memory_used)}` : ""), title: (w) => [w.no_lease && `no lease now: ${w.no_lease}`, w.memory_used && `memory: ${bytes(w.memory_used)} of ${bytes(w.memory_total)}`].filter(Boolean).join("; "), n: true },
  { key: "uplink", label: "Link", text: (w) => `up ${rate(w.uplink)}`, sub: (w) => `down ${rate(w.downlink)}` + (w.rtt_s ? ` · ${seconds(w.rtt_s)}` : ""), n: true },
  { key: "chunks_held", label: "Chunks", text: (w) => w.chunk_count ? `${w.chunks_held} of ${w.chunk_count}` : dash, sub: (w) => [w.in_flight ? "v" + w.in_flight : "", kinds(w.links)].filter(Boolean).join(" · "), title: (w) => ways(w), n: true },
  { key: "joined", label: "Joined for", text: (w, now) => seconds(Math.max(0, (w.state === "gone" ? w.heard : now) - w.joined)), sub: (w) => w.given_up ? `${count(w.given_up, "lease")} lost` : "", title: (w) => w.given_up ? "" : "no lease lost", n: true },
  { key: "heard", label: "Heard", text: (w, now) => seconds(Math.max(0, now - w.heard)) + " ago", n: true },
];
const all = make("input", { type: "checkbox", "aria-label": "Select every worker shown" });
all.onchange = () => { for (const [id, row] of rows) if (row.tr.isConnected) mark(id, all.checked); drawBulk(); };
$("fleet-head").append(make("th", { scope: "col", class: "pick" }, all));
for (const column of COLUMNS) $("fleet-head").append(make("th", { class: column.n ? "n" : null, scope: "col", "data-key": column.key }, make("button", { type: "button", onclick: () => sort(column.key) }, column.label)));
$("fleet-head").append(make("th", { scope: "col", class: "n" }, "Actions"));
$("fleet-filter").addEventListener("input", (event) => { filter = event.target.value.toLowerCase(); order(); });
$("fleet-gone").addEventListener("change", (event) => { showsGone = event.target.checked; order(); });
function mark(peerId, isChosen) { isChosen ? chosen.add(peerId) : chosen.delete(peerId); const row = rows.get(peerId); if (row) row.pick.checked = isChosen; }
function drawBulk() {
  for (const id of [...chosen]) if (!rows.get(id)?.tr.isConnected) mark(id, false); // what is not seen is not acted on
  const shown = [...rows.values()].filter((row) => row.tr.isConnected).length;
  all.checked = shown > 0 && chosen.size === shown; all.indeterminate = chosen.size > 0 && chosen.size < shown;
  const price = [...chosen].reduce((sum, id) => sum + rows.get(id).worker.price, 0);
  $("bulk").hidden = !chosen.size; setText($("bulk-count"), `${chosen.size} selected, ${usd(price)}/h`);
}
async function setAll(activation) {
  const answer = await act("/api/workers/state", { peer_ids: [...chosen], activation, reason: "set on the page" });
  if (answer) { toast(`${count(answer.count, "worker")} set to ${activation}`); selectNone(); }
}
function selectNone() { for (const id of [...chosen]) mark(id, false); drawBulk(); }
function releaseAll() {
  const ids = [...chosen], form = $("confirm-form");
  $("confirm-title").textContent = `Release ${count(ids.length, "worker")}?`; $("confirm-text").textContent = "Their unfinished rollouts continue on other workers. Rented machines are given back with all that runs on them; on the other machines the worker process ends.";
  $("confirm-go").textContent = "Release"; form.reset(); $("confirm-reason").hidden = false;
  form.onsubmit = async () => { const answer = await act("/api/workers/release", { peer_ids: ids, reason: form.elements.reason.value || "released on the page" }); if (answer) { toast(`${count(answer.count, "worker")} released`); selectNone(); } };
  ask($("confirm-dialog"));
}
$("bulk-automatic").onclick = () => setAll("automatic"); $("bulk-active").onclick = () => setAll("active"); $("bulk-drain").onclick = () => setAll("draining"); $("bulk-release").onclick = releaseAll; $("bulk-none").onclick = selectNone;
function sort(key) { descending = key === sortBy ? !descending : key !== "name"; sortBy = key; order(); }
function set(peerId, activation, name) { act("/api/workers/state", { peer_id: peerId, activation, reason: "set on the page" }).then((ok) => ok && toast(`${name} is set to ${activation}`)); }
function ban(peerId, name) {
  $("confirm-title").textContent = `Ban ${name}?`; $("confirm-text").textContent = "Its leases go to other workers at once, and it is refused until the ban is lifted.";
  $("confirm-go").textContent = "Ban"; const form = $("confirm-form"); form.reset(); $("confirm-reason").hidden = false;
  form.onsubmit = () => act("/api/workers/state", { peer_id: peerId, activation: "banned", reason: form.elements.reason.value || "banned on the page" }).then((ok) => ok && toast(`${name} is banned`));
  ask($("confirm-dialog"));
}
function newRow(peerId) {
  const pick = make("input", { type: "checkbox" }); pick.onchange = () => { mark(peerId, pick.checked); drawBulk(); };
  const tr = make("tr", {}, make("td", { class: "pick", "data-label": "Select" }, pick)), said = make("span", { class: "sub problem said" }), cells = COLUMNS.map((column) => {
    const main = column.opens ? make("button", { type: "button", class: "link", onclick: () => openWorker(peerId, nowSeen) }) : make("span", { class: column.chip ? "chip" : null }), sub = column.sub ? make("span", { class: "sub" }) : null;
    tr.append(make("td", { class: [column.n ? "n" : "", column.kind || ""].join(" ").trim() || null, "data-label": column.label }, make("span", {}, main, sub, column.opens ? said : null)));
    return { main, sub };
  });
  const name = () => rows.get(peerId)?.worker.name || peerId;
  const activate = make("button", { type: "button", onclick: () => set(peerId, rows.get(peerId).worker.setting === "active" ? "automatic" : "active", name()) });
  const drain = make("button", { type: "button", onclick: () => set(peerId, "draining", name()) }, "Drain");
  const banned = make("button", { type: "button", class: "ban", onclick: () => isBarred(rows.get(peerId).worker) ? set(peerId, "automatic", name()) : ban(peerId, name()) });
  tr.append(make("td", { class: "act wide" }, make("span", { class: "row-actions" }, activate, drain, banned)));
  return { tr, pick, said, cells, activate, drain, banned };
}
function fill(row, now) {
  const w = row.worker;
  COLUMNS.forEach((column, i) => {
    const { main, sub } = row.cells[i];
    if (column.chip) { const [text, kind] = column.chip(w); setText(main, text); main.className = "chip " + kind; } else setText(main, column.text(w, now));
    if (sub) { setText(sub, column.sub(w)); sub.title = column.sub(w); }
    if (column.title) main.title = column.title(w);
  });
  row.tr.className = w.state === "gone" ? "gone" : "";
  setText(row.activate, w.setting === "active" ? "Auto" : "Activate"); row.activate.title = w.setting === "active" ? "leave it to the planner" : "keep it in the pool whatever the planner says";
  setText(row.said, w.said && now - w.said_at < SAID_S ? `${w.said_error ? "error" : "warning"}: ${w.said}` : ""); row.said.title = w.said || "";
  if (row.pick.ariaLabel !== `Select ${w.name}`) row.pick.ariaLabel = `Select ${w.name}`;
  setText(row.banned, w.setting === "banned" ? "Lift ban" : w.setting === "quarantined" ? "Lift quarantine" : "Ban");
  row.drain.disabled = w.setting === "draining" || w.state === "gone" || isBarred(w); row.activate.disabled = isBarred(w);
  for (const button of [row.activate, row.drain, row.banned]) { const told = `${button.textContent} ${w.name}`; if (button.ariaLabel !== told) button.ariaLabel = told; }
}
export function updateFleet(changes, now, finished) { // of a finished run its gone workers are shown: they are what is left of it
  if (finished !== isFinished) { isFinished = finished; if (finished) showsGone = $("fleet-gone").checked = true; }
  for (const [peerId, worker] of Object.entries(changes)) {
    if (!rows.has(peerId)) rows.set(peerId, newRow(peerId));
    const row = rows.get(peerId); row.worker = worker; fill(row, now);
  }
  order();
}
const HEARD = COLUMNS.length - 1, UP = COLUMNS.length - 2, VERSION = COLUMNS.findIndex((column) => column.key === "version");
export function ageFleet(now, version) { nowSeen = now; newest = version ?? newest; for (const row of rows.values()) { setText(row.cells[HEARD].main, COLUMNS[HEARD].text(row.worker, now)); setText(row.cells[UP].main, COLUMNS[UP].text(row.worker, now)); setText(row.cells[VERSION].sub, lagText(row.worker)); } }
function order() {
  for (const th of $("fleet-head").children) { if (th.dataset.key === sortBy) th.setAttribute("aria-sort", descending ? "descending" : "ascending"); else th.removeAttribute("aria-sort"); }
  const known = [...rows.values()];
  drawTotals(known.map((row) => row.worker));
  const gone = known.filter(({ worker: w }) => w.state === "gone").length;
  const shown = known.filter(({ worker: w }) => (showsGone || w.state !== "gone" || isBarred(w)) && (!filter || [w.name, w.gpu, w.engine, w.provider, w.region, w.state, w.activation, w.said].join(" ").toLowerCase().includes(filter)));
  shown.sort((a, b) => compare(a.worker[sortBy], b.worker[sortBy], descending));
  const body = $("fleet-body");
  const isSame = body.children.length === shown.length && shown.every((row, i) => body.children[i] === row.tr);
  if (!isSame) { const focused = document.activeElement; body.replaceChildren(...shown.map((row) => row.tr)); if (body.contains(focused)) focused.focus(); }
  drawBulk();
  const alive = known.filter(({ worker: w }) => w.state === "alive").length, active = known.filter(({ worker: w }) => w.activation === "active" && w.state !== "gone").length;
  setText($("fleet-count"), known.length ? `${active} active · ${alive} alive${gone ? ` · ${gone} gone` : ""}` : "");
  const empty = $("fleet-empty");
  empty.hidden = shown.length > 0;
  if (!shown.length) empty.replaceChildren(...(known.length ? [make("strong", {}, filter ? "No worker matches the filter" : "Every worker has gone"), filter ? "" : "Tick “show gone” to list them."] : isFinished ? [make("strong", {}, "No worker is left"), "The run is finished."] : [make("strong", {}, "No worker has joined yet"), "Make a join token below and run its command on a machine."]));
}
export const fleet = () => Object.fromEntries([...rows].map(([id, row]) => [id, row.worker]));
order();

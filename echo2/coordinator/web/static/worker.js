// One worker from near: what it is, what it costs, how it is met, what it said went wrong.
import { $, ask, make, setText, toast } from "./dom.js";
import { bytes, clock, count, number, rate, seconds, usd } from "./format.js";
// Every number and text of a heartbeat, by the unit at the end of its name: a new field needs no line here.
const told = (name, x) => `${name.replaceAll("_", " ")}: ${typeof x !== "number" ? x : name.endsWith("_bytes") ? bytes(x) : name.endsWith("_s") && !name.endsWith("_per_s") ? seconds(x) : number(x)}`;
const FACTS = [
  ["Machine", (w) => [w.gpu, w.engine, w.provider, w.region, w.is_spot ? "spot" : ""].filter(Boolean).join(" · ")],
  ["State", (w) => [w.state, w.activation, w.reason].filter(Boolean).join(" · ")],
  ["Waits for", (w) => w.waits_for || "nothing"],
  ["Next lease", (w) => w.no_lease || "as soon as a group waits"],
  ["Joined", (w, now) => `${clock(w.joined)}, ${seconds(Math.max(0, now - w.joined))} ago; heard ${seconds(Math.max(0, now - w.heard))} ago`],
  ["Cost", (w) => `${usd(w.price)}/h, ${usd(w.usd_spent)} at work so far, ${w.usd_per_mtok == null ? "no million useful tokens yet" : `${usd(w.usd_per_mtok)} per million useful tokens`}`],
  ["Work", (w) => `${number(w.tokens_per_s)} tokens/s, ${count(w.finished_rollouts, "rollout")} finished, ${count(w.leases, "lease")}, ${w.running} of ${count(w.slots, "slot")} busy`],
  ["Lost", (w) => w.given_up ? count(w.given_up, "lease") : "no lease"],
  ["Memory", (w) => w.memory_used ? `${bytes(w.memory_used)} of ${bytes(w.memory_total)}` : "not told"],
  ["Network", (w) => `${rate(w.uplink)} up, ${rate(w.downlink)} down, ${w.can_be_dialled ? "can be dialled" : `cannot be dialled; is met at ${count(w.relays, "relay")}`}`],
  ["Links", (w) => (w.links || []).map((link) => `${link.peer}: ${link.kind} (${link.reason})`).join("; ") || "none"],
  ["Heartbeat", (w) => Object.entries(w.heartbeat).map(([name, x]) => told(name, x)).join("; ") || "none yet"],
  ["Peer id", (w) => w.peer_id],
];
export async function openWorker(peerId, now) {
  let w;
  try {
    const response = await fetch("/api/worker?" + new URLSearchParams({ peer_id: peerId })); w = await response.json();
    if (!response.ok) throw new Error(w.error);
  } catch (error) { toast(error instanceof TypeError ? "The coordinator does not answer." : error.message, true); return; }
  setText($("worker-dialog-title"), w.name);
  $("worker-facts").replaceChildren(...FACTS.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text(w, now)))));
  $("worker-log").replaceChildren(...(w.log.length ? w.log.map((line) => make("li", {}, make("time", {}, clock(line.at)), make("span", { class: line.is_error ? "problem" : "quiet" }, line.is_error ? "error" : "warning"), make("span", {}, line.text))) : [make("li", { class: "empty" }, "None.")]));
  ask($("worker-dialog"));
}

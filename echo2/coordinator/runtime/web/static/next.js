// What next: what limits the run, the best actions with what each would bring, and how earlier predictions came out.
import { $, act, make, setText, toast } from "./dom.js";
import { number, percent, seconds, usd } from "./format.js";
import { confirm, rent } from "./machines.js";
const AGAIN_MS = 12000; // the coordinator weighs anew each 10 s at most
let shown = "", timer = 0, asking = false;
const hours = (x) => seconds(x * 3600);
const isKnown = (x) => x != null && x.expected != null;
const whole = (x) => percent(x, 0);
function range(x, say) { // 9 times of 10 between
  return !isKnown(x) || x.low == null || x.high == null || say(x.low) === say(x.high) ? "" : `${say(x.low)} to ${say(x.high)}`;
}
function change(x, than, say) {
  if (!isKnown(than) || say(x.expected) === say(than.expected)) return "as now";
  return `now ${say(than.expected)}`;
}
function earlier(x, than) {
  if (!isKnown(than)) return "";
  const saved = than.expected - x.expected;
  return Math.abs(saved) < 0.01 * than.expected ? "as now" : `${hours(Math.abs(saved))} ${saved > 0 ? "earlier" : "later"}`;
}
function price(x, than) {
  const more = x - than;
  return Math.abs(more) < 0.005 ? "as now" : `${more > 0 ? "+" : "−"}${usd(Math.abs(more))}/h`;
}
function cells(one, than) {
  const cell = (label, value, ...notes) => make("div", {}, make("span", {}, label), make("b", {}, value), ...notes.filter(Boolean).map((note) => make("em", {}, note)));
  const u = one.utilisation, tokens = one.usd_per_million_tokens, end = one.hours_left;
  return make("div", { class: "answer" },
    cell("Utilisation", whole(u.expected), than && change(u, than.utilisation, whole), range(u, whole)),
    cell("Price", one.usd_per_hour == null ? "unknown" : `${usd(one.usd_per_hour)}/h`, than && price(one.usd_per_hour, than.usd_per_hour)),
    cell("Per million useful tokens", isKnown(tokens) ? usd(tokens.expected) : "unknown", than && isKnown(tokens) && change(tokens, than.usd_per_million_tokens, usd), range(tokens, usd)),
    cell("Ends", isKnown(end) ? `in ${hours(end.expected)}` : "not known", than && isKnown(end) && earlier(end, than.hours_left), range(end, hours)));
}

// ---- actions
async function rentAll(action, reason) { // each machine is asked for alone, under the run's cap and budget; the first refusal ends it
  let done = 0;
  while (done < action.count && await rent({ name: action.offer }, reason || "advised: what next")) done += 1;
  if (done) toast(`${done} of ${action.count} machines of ${action.offer} asked for`);
  again(1000);
}
async function askRent(action) {
  const told = await act("/api/machines", { offer: action.offer, count: action.count, dry_run: true });
  if (!told) return;
  const q = told.quote, bounds = [q.usd_per_hour_cap && `the cap is ${usd(q.usd_per_hour_cap)}/h`, q.usd_budget && `${usd(Math.max(0, q.usd_budget - q.usd_spent))} of the budget is left: ${hours(q.budget_hours_after)} at that price`].filter(Boolean);
  const many = action.count > 1 ? `${action.count} machines` : "one machine";
  confirm(`Rent ${many} of ${action.offer}?`, `${usd(q.usd_per_hour)}/h more, ${usd(q.usd_per_hour_after)}/h in all, until they are released${bounds.length ? `; ${bounds.join("; ")}` : ""}.`, "Rent", (reason) => rentAll(action, reason));
}
function askRelease(action) {
  const ids = action.workers.map((one) => one.id);
  confirm(`End ${ids.length === 1 ? action.workers[0].name : `${ids.length} workers`}?`, "Their leases go to others; rented machines are given back, other workers are sent home.", "End", (reason) => act("/api/workers/release", { peer_ids: ids, reason: reason || "advised: the plan does not need it" }).then((ok) => { if (ok) { toast(`${ok.count} workers end`); again(1000); } }));
}
async function pause(action) {
  const ids = action.workers.filter((one) => one.is_at_work).map((one) => one.id);
  const ok = await act("/api/workers/state", { peer_ids: ids, activation: "standby", reason: "paused: the plan does not need it" });
  if (ok) { toast(`${ok.count} workers stand by`); again(1000); }
}
function buttons(action) {
  if (action.what === "rent" && action.offer) return [make("button", { type: "button", class: "primary", "aria-label": `Carry out: ${action.text}`, onclick: () => askRent(action) }, `Rent ${action.count}…`)];
  if (action.what !== "release" || !action.workers.length) return [];
  const atWork = action.workers.filter((one) => one.is_at_work).length;
  const stop = atWork ? make("button", { type: "button", "aria-label": `Pause: ${action.text}`, title: "They stay, and are given no work: no money of cap and budget goes on them. Their owners go on paying.", onclick: () => pause(action) }, `Pause ${atWork}`) : null;
  return [stop, make("button", { type: "button", class: "primary", "aria-label": `Carry out: ${action.text}`, onclick: () => askRelease(action) }, `End ${action.workers.length}…`)].filter(Boolean);
}
function note(action) {
  const seen = { 0: "its rate is by the data sheet alone", 1: "1 machine of this kind was measured" }[action.machines_measured] || `${action.machines_measured} machines of this kind were measured`;
  if (action.what === "rent") return action.offer ? `Offer ${action.offer}; ${seen}.` : `${seen[0].toUpperCase()}${seen.slice(1)}. To rent it from here, add it to the offers file; or rent it by hand and join it.`;
  if (action.what === "release") return action.workers.slice(0, 8).map((one) => one.name).join(", ") + (action.count > 8 ? ` and ${action.count - 8} more` : "");
  return action.what === "period" ? "The period is fixed by staleness.kappa; 0 lets the planner choose it." : "Set staleness.bound and start the learner again.";
}
const card = (action, before) => make("li", {}, make("div", { class: "head" }, make("strong", { class: "grow" }, action.text[0].toUpperCase() + action.text.slice(1)), ...buttons(action)), cells(action.after, before), make("p", { class: "quiet reason" }, note(action)));

// ---- how predictions came out
const WIDE = 220, HIGH = 176, LEFT = 44, BOTTOM = 30, TOP = 8, RIGHT = 8;
const CURVES = [["utilisation", "Utilisation", whole], ["rate", "Workers' rollouts/s", (x) => number(x, 2)], ["finish", "Time to the finish", (x) => seconds(x)]];
function bounds(rows, isShare) {
  const all = rows.flatMap((row) => [row.predicted, row.measured, row.low, row.high]), low = Math.min(...all), high = Math.max(...all), pad = 0.08 * (high - low || high || 1);
  return [Math.max(0, low - pad), isShare ? Math.min(1, high + pad) : high + pad];
}
function curve(rows, title, say, isShare) {
  const [low, high] = bounds(rows, isShare), part = (v) => (v - low) / (high - low || 1);
  const x = (v) => LEFT + part(v) * (WIDE - LEFT - RIGHT), y = (v) => HIGH - BOTTOM - part(v) * (HIGH - BOTTOM - TOP);
  const text = (at, down, words, anchor = "middle") => { const t = make("svg:text", { x: at, y: down, "text-anchor": anchor }); t.textContent = words; return t; };
  const points = rows.map((row) => {
    const kind = row.low <= row.measured && row.measured <= row.high ? "held" : "missed", told = make("svg:title");
    told.textContent = `${row.about}: predicted ${say(row.predicted)} (${say(row.low)} to ${say(row.high)}), came ${say(row.measured)}`;
    return make("svg:g", { class: kind }, told, make("svg:line", { x1: x(row.low), x2: x(row.high), y1: y(row.measured), y2: y(row.measured) }), make("svg:circle", { cx: x(row.predicted), cy: y(row.measured), r: 3.5 }));
  });
  return make("svg:svg", { class: "curve", viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `${title}: predicted against measured` },
    make("svg:path", { class: "axes", d: `M${LEFT} ${TOP}V${HIGH - BOTTOM}H${WIDE - RIGHT}` }), make("svg:path", { class: "ideal", d: `M${x(low)} ${y(low)}L${x(high)} ${y(high)}` }), ...points,
    text(LEFT - 5, y(low), say(low), "end"), text(LEFT - 5, y(high) + 8, say(high), "end"), text(LEFT, HIGH - 16, say(low)), text(WIDE - RIGHT, HIGH - 16, say(high), "end"), text((LEFT + WIDE) / 2, HIGH - 3, "predicted → measured ↑"));
}
function drawCurves(history) {
  const known = CURVES.filter(([name]) => history[name]?.newest?.length);
  const open = CURVES.reduce((sum, [name]) => sum + (history[name]?.open || 0), 0);
  if (!known.length) { $("curves").replaceChildren(make("div", { class: "empty" }, make("strong", {}, "Nothing to compare yet"), open ? `${open} predictions wait for what comes.` : "Predictions begin with a plan that is carried out.")); return; }
  $("curves").replaceChildren(...known.map(([name, title, say]) => {
    const one = history[name], off = name === "utilisation" ? `${number(100 * one.error)} points` : percent(one.error, 0);
    return make("figure", {}, make("figcaption", {}, make("b", {}, title), make("span", { class: "quiet" }, `off by ${off} on average; ${one.held} of ${one.count} within their interval (9 of 10 expected)`)), curve(one.newest, title, say, name === "utilisation"));
  }));
}

// ---- asking
function draw(told) {
  drawCurves(told.history || {});
  $("next-now").hidden = !told.is_known;
  if (!told.is_known) { setText($("next-limits"), `Nothing to advise yet: the run waits for ${told.waits_for || "a first plan"}.`); setText($("next-note"), ""); $("next-actions").replaceChildren(); return; }
  setText($("next-limits"), `What limits the run: ${told.limits}.`);
  setText($("next-note"), `prices: ${told.prices}`);
  $("next-now").replaceChildren(make("h3", {}, "Now"), cells(told.before, null));
  const focused = document.activeElement?.getAttribute?.("aria-label");
  $("next-actions").replaceChildren(...(told.actions.length ? told.actions.map((one) => card(one, told.before)) : [make("li", { class: "empty" }, "No action that was weighed comes nearer to the target or costs less.")]));
  if (focused) [...document.querySelectorAll("#next [aria-label]")].find((one) => one.getAttribute("aria-label") === focused)?.focus();
}
async function load() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    const response = await fetch("/api/outlook"), text = await response.text();
    if (response.ok && text !== shown) { shown = text; draw(JSON.parse(text)); }
  } catch { /* the banner says that the coordinator is away */ } finally { asking = false; }
}
function again(ms) { clearTimeout(timer); timer = setTimeout(() => load().finally(() => again(AGAIN_MS)), ms); }
export const startNext = () => again(0);
export const planChanged = () => again(500); // a new plan, another answer
document.addEventListener("visibilitychange", () => { if (!document.hidden) again(0); });

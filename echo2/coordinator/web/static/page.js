// The page: one stream of changes in, sections drawn from what they hold. Every action goes through the JSON API.
import { $, act, aged, ask, make, setText, toast } from "./dom.js";
import { clock, count, dash, joined, number, percent, rate, seconds, usd, whole } from "./format.js";
import { drawLags, drawSeries, redrawAll } from "./charts.js";
import { ageFleet, fleet, updateFleet } from "./fleet.js";
import { drawJournal, drawMachines, showCommand } from "./machines.js";
import { drawAdvice, drawControl } from "./next.js";
import { rolloutsAt } from "./rollouts.js";
import { drawAuditCost, drawBudget } from "./totals.js";
import { drawTree, drawVersions } from "./tree.js";

const state = { advice: { steps: [] }, run: {}, learner: {}, money: {}, plan: {}, broadcast: {}, leases: {}, machines: null, waits: [], tokens: [], events: [] };
let offset = 0, series = null, lastHeard = 0;
const now = () => Date.now() / 1000 + offset;

function tile(title, value, unit, note, more = {}) {
  return make("div", { class: "tile" + (more.alarm ? " alarm" : ""), title: more.title || note }, make("h3", {}, title), make("strong", { style: `--letters:${String(value).length + (unit ? 0.6 * unit.length : 0)}` }, value, unit ? make("small", {}, " " + unit) : null), more.part != null ? make("div", { class: "meter" }, make("i", { style: `width:${Math.min(100, 100 * more.part)}%` })) : null, make("p", {}, note || " "));
}
function toTheEnd() { // seconds and USD until the last step, as the coordinator tells them
  const hours = state.advice.hours_left;
  return hours == null ? null : { left: 3600 * hours, usd: hours * (state.money.per_hour || 0), chosen: hours * (state.money.chosen_per_hour || 0) };
}
function drawTiles() {
  const { learner: l, plan: p, money: m, run: r } = state;
  const workers = Object.values(fleet()).filter((w) => w.state !== "gone");
  const active = workers.filter((w) => w.activation === "active").length;
  const tokens = workers.reduce((sum, w) => sum + (w.running ? w.tokens_per_s || 0 : 0), 0);
  const end = toTheEnd(), unmeasured = r.finished ? "not measured" : "not yet";
  $("tiles").replaceChildren(
    tile("Step", whole(l.step), l.step_limit ? `of ${whole(l.step_limit)}` : "", r.finished ? "the run is finished" : l.train_s ? `${seconds(l.train_s)} a step` : l.step ? "its time is not known yet" : "no step yet", { part: l.step_limit ? l.step / l.step_limit : null }),
    tile("Reward", number(l.reward), "", l.is_known && !l.step_limit ? "its trainer computes it" : l.eval_reward == null ? `held out: ${unmeasured}` : `held out: ${number(l.eval_reward)}`),
    tile("Utilisation", state.advice.is_measured ? percent(state.advice.utilisation) : unmeasured, "", r.finished ? state.advice.is_measured ? "of the last steps" : "too few steps" : p.is_known && p.utilisation ? `predicted ${percent(p.utilisation)}` : "no prediction yet", { part: state.advice.is_measured ? state.advice.utilisation : 0 }),
    tile("Staleness bound", `${r.staleness_bound ?? dash}`, r.staleness_bound === 1 ? "step" : "steps", r.finished ? "" : p.is_known ? `a version every ${p.kappa === 1 ? "step" : `${p.kappa} steps`}; ${whole(l.open + l.buffered)} of at most ${count(p.cap, "rollout")} in flight` : "no plan yet"),
    tile("Over-stale tokens", whole(l.over_stale_tokens ?? 0), "", `${whole(l.trained_tokens ?? 0)} trained`, { alarm: l.over_stale_tokens > 0 }),
    tile("Pool", `${active}`, `of ${count(workers.length, "worker")}`, tokens ? `${number(tokens)} tokens/s now` : r.finished ? "the run is finished" : "none generates now"),
    tile("To the end", end ? seconds(end.left) : r.finished ? "ended" : "not known", "", end ? `about ${usd(end.usd)} more${m.chosen_per_hour < m.per_hour ? ", standby included" : ""}` : !r.finished ? l.is_known && !l.step_limit ? "its trainer ends it" : state.advice.is_measured ? "the run stands still" : "known after some steps" : l.step < l.step_limit ? `${count(l.step_limit - l.step, "step")} not trained` : "all steps are trained"),
    tile("Spent", usd(m.spent ?? 0), "", `${m.spent > 0 ? `${percent(m.useful / m.spent, 0)} for active workers · ` : ""}${usd(m.per_hour ?? 0)}/h${m.cap_per_hour != null ? `, ${usd(m.chosen_per_hour ?? 0)} of the cap of ${usd(m.cap_per_hour)}` : ""}${m.per_mtok ? ` · ${usd(m.per_mtok)} per M tokens` : ""}`, { part: m.budget ? m.chosen / m.budget : null, title: `the bill of all machines; ${usd(m.useful ?? 0)} of it for workers while they worked${m.budget ? `; ${usd(m.chosen ?? 0)} of the budget of ${usd(m.budget)}` : ""}` }),
  );
}
const USUAL_S = 5; // what waits no longer than this is life, not news
function drawHeader() {
  const { run, learner: l } = state;
  setText($("run-name"), run.run_id || "echo2"); document.title = `${run.run_id || "echo2"}${l.step != null ? ` · step ${l.step}` : ""}`;
  setText($("model"), l.is_known ? `${l.model} · version ${l.version} · batches of ${l.rollouts_per_step} rollouts in groups of ${l.rollouts_per_group}` : "waiting for the learner to join");
  $("what-if-panel").hidden = !!run.finished; // nothing is planned any more
  const isWell = state.advice.steps[0]?.kind === "good", waits = !isWell && state.waits.some((w) => w.what.startsWith("the learner waits") && now() - w.since > USUAL_S);
  const isSilent = state.waits.some((w) => w.what.startsWith("nothing is heard of the learner"));
  const [text, kind] = run.finished ? ["finished", "good"] : !l.is_known ? ["waiting for the learner", "info"] : l.is_finished ? ["finishing", "good"] : !l.is_connected ? ["learner away", "bad"] : isSilent ? ["learner silent", "bad"] : waits ? ["learner waits", "warn"] : state.advice.steps[0]?.kind === "bad" ? ["needs attention", "bad"] : l.step ? ["training", "good"] : ["first rollouts", "info"];
  setText($("status"), text); $("status").className = "pill " + kind;
}
function drawWaits() {
  const all = state.waits.filter((w) => now() - w.since > USUAL_S);
  $("waits-panel").classList.toggle("calm", !all.length);
  $("waits").replaceChildren(...(all.length ? all.slice(0, 8).map((w) => make("li", {}, make("b", {}, seconds(Math.max(0, now() - w.since))), make("span", {}, w.what))) : [make("li", {}, make("span", {}, state.run.finished ? "Nothing: the run is finished." : state.advice.steps[0]?.kind === "good" ? "Nothing: the learner is fed and every lease moves." : "Nothing waits longer than usual."))]));
}
const TERM_NAMES = { throughput: "Throughput", rewards: "Rewards", broadcast: "Broadcast", staleness: "Staleness", usd_per_hour: "Price cap", usd_budget: "Budget" };
const TIGHT = 0.25; // less slack than this, and the term is what limits the run
function termRow(t) {
  const top = Math.max(t.value ?? 0, t.limit ?? 0) || 1, wantsMore = t.kind === "throughput" || t.kind === "rewards", limits = t.is_binding && (!t.is_met || (t.slack ?? 1) < TIGHT);
  const [word, kind] = !t.is_met ? ["short", "bad"] : limits ? ["limiting", "warn"] : ["OK", "good"];
  return make("div", { class: "term" + (limits ? " binding" : "") }, make("span", { class: "name" }, TERM_NAMES[t.kind] || t.kind, make("span", { class: "said" }, t.text)), make("span", { class: "gauge" + (t.is_met ? "" : " broken") }, make("i", { style: `width:${Math.min(100, 100 * (t.value ?? top) / top)}%` }), make("u", { style: `left:calc(${100 * (t.limit ?? 0) / top}% - 2px)`, title: wantsMore ? "needed" : "allowed" })), make("span", { class: "n" }, make("span", { class: "chip " + kind }, word)), t.remedy ? make("span", { class: "remedy" }, t.remedy) : null);
}
function drawPlan() {
  const p = state.plan;
  setText($("plan-mode"), p.mode ? { auto: "acts by itself", advise: "advises", approve: "waits for your word" }[p.mode] || p.mode : "");
  $("apply-plan").hidden = !p.is_known || p.mode === "auto";
  if (!p.is_known) { $("terms").replaceChildren(make("div", { class: "empty" }, make("strong", {}, state.run.finished ? "No plan" : "No plan yet"), state.run.finished ? "The run is finished." : `The planner waits for ${p.waits_for || "measurements"}.`)); setText($("plan-reason"), ""); setText($("plan-errors"), ""); return; }
  $("terms").replaceChildren(...p.terms.map(termRow)); setText($("plan-reason"), p.reason);
  setText($("plan-errors"), p.utilisation ? errorsText(p.errors || {}) : "A few steps, heartbeats and the first delta are needed for a prediction to be trusted.");
}
function errorsText(e) {
  const of = { utilisation: (x) => `utilisation by ${number(100 * x)} points`, broadcast_s: (x) => `broadcasts by ${seconds(x)}`, usd_per_hour: (x) => `cost by ${usd(x)}/h` };
  const told = Object.entries(of).filter(([name]) => e[name]?.count).map(([name, say]) => `${say(e[name].error)} (${e[name].count} compared)`);
  return told.length ? `Predictions were off, on average: ${told.join(", ")}.` : "No prediction has met a measurement yet.";
}
function drawLeases() {
  const l = state.leases, counts = { out: l.open, queued: l.queued, sampled: l.produced, granted: l.granted, continued: l.continued, "handed back": l.handed_back, moved: l.moved, expired: l.expired, refused: l.refused };
  $("lease-counts").replaceChildren(...Object.entries(counts).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, whole(value ?? 0)))));
  const slow = l.slowest || [];
  $("slowest-table").hidden = !slow.length; $("slowest-empty").hidden = slow.length > 0;
  $("slowest").replaceChildren(...slow.map((one) => make("tr", {}, make("td", {}, one.group), make("td", {}, one.worker), make("td", { class: "n" }, one.attempt), make("td", { class: "n" }, whole(one.tokens)), aged("td", { class: "n" }, () => seconds(Math.max(0, now() - one.progress_at))), aged("td", { class: "n" }, () => seconds(Math.max(0, one.deadline - now()))))));
}
function drawTokens() {
  $("token-list").replaceChildren(...state.tokens.map((t) => {
    const left = t.expires - now(), isDead = t.is_revoked || left <= 0 || Boolean(t.problem);
    const uses = t.use_limit ? `${t.uses} of ${count(t.use_limit, "use")}` : count(t.uses, "use");
    return make("li", { class: isDead ? "dead" : null }, make("span", { class: "chip " + (isDead ? "" : "info") }, t.role), make("div", { class: "grow" }, make("div", {}, t.label || t.id), aged("div", { class: "sub" }, () => `${uses} · ${t.is_revoked ? "revoked" : t.expires > now() ? `${seconds(t.expires - now())} left` : "expired"}`)), t.is_revoked || left <= 0 ? null : make("button", { type: "button", "aria-label": `Revoke ${t.label || t.id}`, onclick: () => revoke(t) }, "Revoke"));
  }));
  if (!state.tokens.length) $("token-list").replaceChildren(make("li", { class: "empty" }, "No token: nobody can join."));
}
function revoke(token) {
  $("confirm-title").textContent = `Revoke ${token.label || token.id}?`; $("confirm-text").textContent = token.role === "operator" ? "Nobody operates the run with it any more." : "Nobody joins with it any more. Those who joined stay.";
  $("confirm-go").textContent = "Revoke"; $("confirm-reason").hidden = true; $("confirm-form").onsubmit = () => act("/api/tokens/revoke", { token_id: token.id }).then((ok) => ok && toast("revoked"));
  ask($("confirm-dialog"));
}
const kinds = new Set();
const IS = " is "; // in "NAME is standby now: REASON"
const alike = (e) => e.kind === "activation" ? e.text.slice(e.text.indexOf(IS)) : e.kind === "plan" ? "plan" : e; // others each stand alone
function eventText({ first, count, all }) {
  if (count === 1) return first.text;
  if (first.kind === "plan") return `${first.text} (the newest of ${count} plans)`;
  const names = all.map((e) => e.text.slice(0, e.text.indexOf(IS)));
  return `${names.join(", ")}${count > names.length ? ` and ${count - names.length} more` : ""}${alike(first)}`;
}
function drawEvents() {
  const select = $("event-kind");
  for (const { kind } of state.events) if (!kinds.has(kind)) { kinds.add(kind); select.append(make("option", {}, kind)); }
  const shown = state.events.filter((e) => !select.value || e.kind === select.value).reverse();
  $("event-list").replaceChildren(...joined(shown, alike).slice(0, 120).map((one) => make("li", {}, make("time", {}, clock(one.first.at)), make("span", { class: "quiet" }, one.first.kind), make("span", {}, eventText(one)))));
}
$("event-kind").onchange = drawEvents;

// ---- folded sections
function unfold(hash) { const target = $(hash?.slice(1)); if (target?.tagName === "DETAILS") target.open = true; }
document.querySelector(".bar nav").onclick = (event) => unfold(event.target.hash);
unfold(location.hash);

// ---- what if
let whatIfTimer = 0, touched = false, fleetNow = 1;
const FLEET_MOST = 2000; // that the coordinator adds copies up to
const mayWork = (w) => w.state === "alive" && ["automatic", "active"].includes(w.setting);
const sliders = { s: $("w-s"), up: $("w-up"), fleet: $("w-fleet") };
const outputs = [...document.querySelectorAll("#what-if output")];
function showSliders() {
  setText(outputs[0], sliders.s.value); const uplink = state.learner.uplink, factor = 10 ** Number(sliders.up.value);
  setText(outputs[1], uplink ? rate(uplink * factor) : factor === 1 ? "as now" : `${number(factor)} times`); setText(outputs[2], sliders.fleet.value);
}
function resetSliders() {
  fleetNow = Object.values(fleet()).filter(mayWork).length || 1;
  sliders.fleet.max = Math.max(12, fleetNow, Math.min(4 * fleetNow, FLEET_MOST)); sliders.s.min = state.run.staleness_bound === 0 ? 0 : 1; sliders.s.max = Math.max(16, state.run.staleness_bound ?? 0); sliders.s.value = state.run.staleness_bound ?? 4; sliders.up.value = 0; sliders.fleet.value = fleetNow;
  touched = false; showSliders(); askWhatIf();
}
function askWhatIf() {
  if (!state.plan.is_known) { $("what-if-answer").replaceChildren(make("div", { class: "empty" }, "Answers come with the first plan.")); return; } clearTimeout(whatIfTimer); whatIfTimer = setTimeout(answerWhatIf, 180);
  if (!$("what-if-answer").childElementCount) $("what-if-answer").replaceChildren(make("div", { class: "empty" }, "The planner is asked…")); }
async function answerWhatIf() {
  const size = Number(sliders.fleet.value), fleet_size = size === fleetNow ? 0 : size; // 0: those of now, whom the planner knows better
  const query = new URLSearchParams({ staleness_bound: sliders.s.value, uplink_factor: 10 ** Number(sliders.up.value), fleet_size });
  const host = $("what-if-answer");
  try {
    const response = await fetch("/api/what-if?" + query), p = await response.json();
    if (response.ok && !p.is_known) { host.replaceChildren(make("div", { class: "empty" }, `The planner waits for ${p.waits_for}.`)); return; }
    if (!response.ok) { host.replaceChildren(make("div", { class: "empty" }, p.error || "no answer")); return; }
    const here = state.plan, than = (a, b, f) => here.is_known && b != null && f(a) !== f(b) ? `now ${f(b)}` : "as now";
    const cell = (label, value, note) => make("div", {}, make("span", {}, label), make("b", {}, value), make("em", {}, note));
    host.replaceChildren(make("div", { class: "answer" }, cell("Utilisation", percent(p.utilisation), than(p.utilisation, here.utilisation, percent)), cell("Publish every", count(p.kappa, "step"), than(p.kappa, here.kappa, whole)), cell("Pool", count(p.pool_size, "worker"), than(p.pool_size, here.pool_size, whole)), cell("Price", usd(p.usd_per_hour) + "/h", than(p.usd_per_hour, here.usd_per_hour, usd))), make("p", { class: "quiet reason" }, p.reason));
  } catch { host.replaceChildren(make("div", { class: "empty" }, "The coordinator does not answer.")); }
}
for (const slider of Object.values(sliders)) slider.addEventListener("input", () => { touched = true; showSliders(); askWhatIf(); });
$("what-if-reset").onclick = resetSliders; $("what-if").onsubmit = (event) => event.preventDefault();

// ---- actions
$("apply-plan").onclick = () => act("/api/plan/apply", {}).then((ok) => ok && toast("the plan is carried out"));
$("token-new").onclick = () => { $("token-form").reset(); ask($("token-dialog")); };
$("token-form").onsubmit = async (event) => {
  const f = event.target.elements, role = f.role.value;
  const made = await act("/api/tokens", { role, label: f.label.value, lifetime_s: Number(f.lifetime_s.value), use_limit: Number(f.use_limit.value) });
  if (!made) return;
  showCommand(made.command, `It is shown this once: only a hash is kept. ${role === "operator" ? "Who runs this sees the run from afar" : "Run this on the machine that shall join"}:`);
};
$("theme").onclick = () => {
  const isDark = (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.documentElement.dataset.theme = isDark ? "light" : "dark"; try { localStorage.setItem("echo2-theme", document.documentElement.dataset.theme); } catch { /* storage is off */ }
  redrawAll(); if (series) drawSeries(series); drawLagsNow();
};

// ---- the stream
const drawLagsNow = () => { const l = state.learner, histogram = l.lag_histogram || [], total = histogram.reduce((a, b) => a + b, 0); drawLags(histogram, state.run.staleness_bound || 1); const mean = histogram.reduce((sum, count, lag) => sum + lag * count, 0) / (total || 1); setText($("lag-note"), total ? `mean ${number(mean)}, bound ${state.run.staleness_bound}` : ""); };
async function loadSeries() { const response = await fetch("/api/series"); if (response.ok) { series = await response.json(); drawSeries(series); } }
let seriesTimer = 0, whatIfReady = false, planShown = "";
const planKey = () => { const p = state.plan; return [p.kappa, p.pool_size, p.usd_per_hour, p.reason].join("|"); };
function take(message) {
  if (state.run.coordinator && message.run && message.run.coordinator !== state.run.coordinator) { location.reload(); return; } // another run answers at this address
  offset = message.now - Date.now() / 1000; lastHeard = Date.now();
  for (const name of Object.keys(state)) if (message[name] !== undefined) state[name] = message[name];
  if (message.workers || message.run) updateFleet(message.workers || {}, now(), !!state.run.finished);
  if (message.run || message.learner || message.waits || message.advice) drawHeader();
  if (message.advice || message.run || message.learner || message.money || message.plan || message.workers || message.broadcast) drawTiles();
  if (message.waits || message.run || message.advice) drawWaits();
  if (message.advice) drawAdvice(state.advice);
  if (message.run || message.money) drawControl(state.run, state.money);
  if (message.plan) drawPlan();
  if (message.plan?.is_known && !whatIfReady) { whatIfReady = true; resetSliders(); } else if (message.plan && !message.plan.is_known && !touched) resetSliders();
  else if (message.plan?.is_known && planShown !== planKey()) touched ? askWhatIf() : resetSliders(); // the answer beside it is of now, too
  if (message.plan && planShown !== planKey()) { planShown = planKey(); }
  if (message.learner || message.run) drawLagsNow();
  if (message.learner || message.run) { rolloutsAt(state.learner, state.run.finished); drawAuditCost(state.learner); }
  if (message.advice || message.money || message.run) drawBudget(state.money, toTheEnd());
  if (message.broadcast || message.workers || message.run) { drawTree(state.broadcast, fleet(), state.learner, state.run.finished); drawVersions(state.broadcast); }
  if (message.leases) drawLeases();
  if (message.machines || message.run) state.machines && drawMachines(state.machines, state.run.planner_mode, now);
  if (message.money) drawJournal(state.money);
  if (message.tokens) drawTokens();
  if (message.events) drawEvents();
  if (message.samples_changed && !seriesTimer) seriesTimer = setTimeout(() => { seriesTimer = 0; loadSeries().catch(() => {}); }, series ? 900 : 0);
  document.body.dataset.ready = "yes";
}
async function loadMetrics() { // as scrapers get them, so a metric is declared once
  if (!$("metrics").open) return;
  const texts = new Map(), rows = [];
  for (const line of (await (await fetch("/metrics")).text()).split("\n")) {
    const help = line.match(/^# HELP (\S+) (.*)$/), value = line.match(/^(\w+)(?:\{worker="(.*)"\})? (\S+)$/);
    if (help) texts.set(help[1], help[2]);
    if (value) rows.push(make("tr", {}, make("th", { scope: "row" }, `${texts.get(value[1])} ${value[2] || ""}`), make("td", { class: "n" }, number(Number(value[3])))));
  }
  $("metrics-rows").replaceChildren(...rows);
}
$("metrics").ontoggle = () => loadMetrics().catch(() => {});
setInterval(() => loadMetrics().catch(() => {}), 5000);
const SILENT_MS = 6000; // the coordinator says the time each 2 s at least
function isAway(what, status = "coordinator away") {
  $("banner").hidden = false; setText($("banner"), `${what} Workers and learner go on by themselves; the page tries again.`);
  setText($("status"), status); $("status").className = "pill bad";
}
let stream = null;
function connect() {
  stream?.close();
  stream = new EventSource("/api/stream");
  stream.onopen = () => { $("banner").hidden = true; };
  stream.onmessage = (event) => { const wasAway = !$("banner").hidden; $("banner").hidden = true; take(JSON.parse(event.data)); if (wasAway) drawHeader(); };
  stream.onerror = async () => {
    const isRefused = stream.readyState === EventSource.CLOSED;
    if (isRefused) setTimeout(connect, 2000);
    const answer = isRefused ? await fetch("/api/session").catch(() => null) : null; // a stream does not say why
    answer?.status === 401 ? isAway(`No access any more: ${(await answer.json()).error}.`, "no access") : isAway("The coordinator does not answer.");
  };
}
setInterval(() => {
  const wasAway = !$("banner").hidden;
  if (lastHeard && Date.now() - lastHeard > SILENT_MS && !wasAway) { isAway("Nothing is heard of the coordinator."); connect(); } // of a connection that leads nowhere a browser may know nothing
  if ($("banner").hidden && lastHeard) drawHeader();
  ageFleet(now(), state.learner.version); drawWaits(); document.querySelectorAll("[data-aged]").forEach((one) => setText(one, one.told())); setText($("footer"), lastHeard ? `heard ${seconds((Date.now() - lastHeard) / 1000)} ago · up ${seconds(now() - (state.run.started || now()))}` : ""); }, 1000);
connect();

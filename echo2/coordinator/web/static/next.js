// What next: the coordinator's advice in order, and the operator's controls of the run (budget, cap, S, prices; pause, resume, stop).
import { $, act, make, setText, toast } from "./dom.js";
import { count } from "./format.js";
import { approve, confirm } from "./machines.js";

export const BUTTONS = {
  make_link: () => $("token-new").click(),
  apply_plan: () => act("/api/plan/apply", {}).then((ok) => ok && toast("the plan is carried out")),
  approve,
  dismiss: () => act("/api/workers/dismiss", {}).then((ok) => ok && toast(`sent home: ${count(ok.count, "worker")}; end their machines where you rented them`)),
  resume: () => act("/api/run/resume", {}).then((ok) => ok && toast("the run goes on")),
};
export function drawAdvice(advice) {
  const [first, ...more] = advice.steps, go = $("todo-go");
  setText($("todo-text"), first.text); $("todo").className = "panel todo " + first.kind;
  go.hidden = !first.act; setText(go, first.label); go.onclick = BUTTONS[first.act] || null;
  setText($("next-limits"), `What limits the run: ${advice.limits}.`);
  $("next-actions").replaceChildren(...(more.length ? more.map((step) => make("li", {}, make("div", { class: "head" }, make("strong", { class: "grow" }, step.text), step.act ? make("button", { type: "button", onclick: BUTTONS[step.act] }, step.label) : null))) : []));
  $("assumed").hidden = !advice.assumed.length;
  $("next-assumed").replaceChildren(...advice.assumed.map((text) => make("li", {}, text)));
}

// ---- the operator's controls
const form = $("control");
export function drawControl(run, money) {
  form.elements.staleness_bound.max = run.staleness_bound_max ?? 64;
  for (const [name, value] of [["usd_budget", money.budget], ["usd_per_hour_cap", money.cap_per_hour], ["staleness_bound", run.staleness_bound]])
    if (document.activeElement !== form.elements[name] && !form.dataset.touched) form.elements[name].value = form.elements[name].dataset.told = value ?? "";
  $("run-pause").hidden = run.is_held || !!run.finished; $("run-resume").hidden = !run.is_held; $("run-stop").hidden = !!run.finished;
}
form.oninput = () => { form.dataset.touched = "yes"; };
form.onsubmit = async (event) => {
  event.preventDefault();
  const f = form.elements, changed = ["usd_budget", "usd_per_hour_cap", "staleness_bound"].filter((name) => f[name].value !== f[name].dataset.told);
  const body = Object.fromEntries(changed.map((name) => [name, f[name].value === "" ? null : Number(f[name].value)])); // the rest may have changed elsewhere
  if (f.offer.value && f.price.value !== "") body.prices = { [f.offer.value]: Number(f.price.value) };
  if (await act("/api/run/settings", body)) { delete form.dataset.touched; f.offer.value = f.price.value = ""; toast("changed"); }
};
$("run-pause").onclick = () => confirm("Pause the run?", "Workers end what they hold and get no more, until you resume. Rented machines go on costing money.", "Pause", (reason) => act("/api/run/pause", { reason }).then((ok) => ok && toast("paused")));
$("run-resume").onclick = BUTTONS.resume;
$("run-stop").onclick = () => confirm("Stop the run?", "Workers are sent home, rented machines are given back, and the learner is told that the run is over. Resume lets it go on from its last checkpoint.", "Stop", (reason) => act("/api/run/stop", { reason }).then((ok) => ok && toast("stopped")));

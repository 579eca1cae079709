// Sums over the fleet by GPU, provider and region, and the budget.
import { $, make, setText } from "./dom.js";
import { number, percent, seconds, usd } from "./format.js";
const BY = [["GPU", (w) => w.gpu], ["Provider", (w) => [w.provider || "not known", w.is_spot ? "spot" : ""].filter(Boolean).join(", ")], ["Region", (w) => w.region || "not known"]];
function sums(workers, of) {
  const found = new Map();
  for (const w of workers) {
    const sum = found.get(of(w)) || { all: 0, active: 0, price: 0, tokens: 0 };
    sum.all += 1; sum.active += w.activation === "active"; sum.price += w.price; sum.tokens += w.running ? w.tokens_per_s || 0 : 0;
    found.set(of(w), sum);
  }
  return [...found].sort(([a], [b]) => a.localeCompare(b));
}
function table([title, of], workers) {
  const rows = sums(workers, of);
  if (rows.length === 1 && rows[0][0] === "not known") return null;
  return make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, title), make("th", { class: "n", scope: "col" }, "Active"), make("th", { class: "n", scope: "col" }, "Price"), make("th", { class: "n", scope: "col" }, "Tokens/s"))),
    make("tbody", {}, ...rows.map(([name, s]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", { class: "n" }, `${s.active} of ${s.all}`), make("td", { class: "n" }, usd(s.price) + "/h"), make("td", { class: "n" }, number(s.tokens))))));
}
export function drawTotals(all) {
  const workers = all.filter((w) => w.state !== "gone");
  $("fleet-sums").hidden = !workers.length;
  $("fleet-totals").replaceChildren(...BY.map((one) => table(one, workers)).filter(Boolean));
}
export function drawAuditCost(l) {
  const own = l.audit_s || 0;
  $("audit-cost").hidden = !own;
  setText($("audit-cost"), `Audit: the learner scores ${seconds(own)} a step on its own device.`);
}
export function drawBudget(m, end) { // `end`: what is left until the last step, or null
  $("budget").hidden = m.budget == null;
  if (m.budget == null) return;
  // active workers and rented machines: what stands by without being rented is on the bill alone
  const spent = m.chosen < m.budget ? m.chosen / m.budget : 1, left = Math.max(0, m.budget - m.chosen), ahead = end && spent < 1 ? Math.min(1 - spent, end.chosen / m.budget) : 0;
  const [done, next] = $("budget-bar").children;
  done.style.width = `${100 * spent}%`; next.style.width = `${100 * ahead}%`;
  const isShort = end && end.chosen > left;
  $("budget").className = "panel budget" + (left <= 0 || isShort ? " bad" : "");
  const lasts = m.chosen_per_hour > 0 ? `, ${usd(left)} left: ${seconds(left / m.chosen_per_hour * 3600)} at ${usd(m.chosen_per_hour)}/h` : `, ${usd(left)} left`;
  const need = end ? isShort ? `. The last step is about ${usd(end.chosen)} away: the budget ends before it` : `. The last step is about ${usd(end.chosen)} away` : "";
  setText($("budget-text"), `Budget: ${usd(m.chosen)} of ${usd(m.budget)} spent (${percent(spent, 0)})${lasts}${need}.`);
  $("budget-bar").setAttribute("aria-label", $("budget-text").textContent);
}

// Recent rollouts, and one of them token by token. All texts come from models and workers: they are only ever set as text.
import { $, ask, make, setText } from "./dom.js";
import { number, whole } from "./format.js";
const AGAIN_MS = 5000, PAGE = 512;
let askedAt = 0, isAsking = false, isSeen = false, stepShown = -1, shown = null, isFinished = false;
const versions = (r) => r.oldest_version === r.newest_version ? `v${r.newest_version}` : `v${r.oldest_version} to v${r.newest_version}`;
const turnsOf = (r) => r.turns > 1 ? `, ${whole(r.turns)} turns` : "";
const label = (text) => text.trim() ? text : "(nothing but spaces)";
function row(r) {
  const open = make("button", { type: "button", class: "link", "aria-label": `Tokens of rollout ${r.id}`, onclick: () => openRollout(r.id, 0) }, label(r.completion));
  const cell = (name, text, kind) => make("td", { class: kind, "data-label": name }, make("span", {}, text));
  return make("tr", {}, make("td", { class: "wide name completion", "data-label": "Completion" }, open), cell("Reward", number(r.reward), "n"), cell("Step", whole(r.step), "n"), cell("Tokens", `${whole(r.token_count)}${turnsOf(r)}${r.finish_reason === "length" ? " (cut)" : ""}`, "n"), cell("Versions", versions(r)), cell("Worker", r.workers.join(", ") || "unknown"));
}
const kept = $("rollouts-kept"); // in the report of a finished run the answers lie beside, for there is no server
async function fetched(path) {
  if (kept) { const answer = JSON.parse(kept.textContent)[path]; if (!answer) throw new Error("The report has no more tokens of it."); return answer; }
  const response = await fetch(path), answer = await response.json();
  if (!response.ok) throw new Error(answer.error || response.statusText);
  return answer;
}
const AWAY = "The learner keeps them, and it is not connected.", ENDED = "The learner kept them, and the run is finished: report.html in the learner's run folder shows the newest.";
function tell(text) { $("rollouts-table").hidden = true; $("rollouts-empty").hidden = false; setText($("rollouts-empty"), text); setText($("rollouts-note"), ""); }
async function load() {
  if (isAsking) return;
  isAsking = true; askedAt = Date.now();
  try {
    const { rollouts, problem } = await fetched("/api/rollouts");
    if (!rollouts.length) { tell(isFinished ? ENDED : problem || "Rollouts are shown once a step has trained on them, since the learner was started."); return; }
    $("rollouts-table").hidden = false; $("rollouts-empty").hidden = true;
    setText($("rollouts-note"), `the ${rollouts.length} newest that were trained on`);
    $("rollouts-body").replaceChildren(...rollouts.map(row));
  } catch (error) { tell(error instanceof TypeError ? "The coordinator does not answer." : error.message); }
  finally { isAsking = false; }
}
export function rolloutsAt(learner, finished) { // called with each change of the learner
  isFinished = !!finished;
  if (!learner.is_connected) { if (learner.is_known && stepShown < 0) tell(isFinished ? ENDED : AWAY); return; }
  if (!isSeen || learner.step === stepShown || !learner.step || Date.now() - askedAt < AGAIN_MS) return;
  stepShown = learner.step; load();
}
new IntersectionObserver((entries) => { isSeen = entries.some((one) => one.isIntersecting); if (isSeen && !askedAt) load(); }).observe($("rollouts"));
$("rollouts-again").onclick = load; if (kept) { $("rollouts-again").hidden = true; load(); }

function colourOf(token, by) {
  const kind = { version: token.version, worker: shown.workers.indexOf(token.worker) + 1 }[by];
  if (kind != null) return `hsl(${(kind * 47) % 360} 60% 50% / .28)`;
  const doubt = Math.min(1, -Math.min(0, token.logprob) / 4); // 0: certain; 1: drawn at e^-4 or less
  return `color-mix(in srgb, var(--bad) ${Math.round(70 * doubt)}%, transparent)`;
}
const chance = (logprob) => { const p = Math.exp(Math.min(0, logprob)); return p >= 0.0001 ? `${(100 * p).toFixed(2)} %` : "under 0.01 %"; };
function point(i) {
  const token = shown.tokens[i];
  setText($("rollout-token"), `Token ${whole(shown.offset + i + 1)} of ${whole(shown.token_count)}: id ${token.id}, log-probability ${token.logprob} (${chance(token.logprob)}), sampled by version ${token.version}${token.worker ? ` on ${token.worker}` : ""}`);
}
function turnMark({ turn, text }) { // what the environment said before a turn, folded to its first line
  const said = text.trim();
  return make("details", { class: "turn" }, make("summary", {}, make("strong", {}, `Turn ${whole(turn)}`), said ? ` after: ${said.split("\n", 1)[0].slice(0, 120)}` : " begins"), make("div", { class: "said" }, said || "Nothing was said before it."));
}
function drawTokens() {
  const by = $("rollout-colour").value;
  const first = (name) => [...new Map(shown.tokens.map((token) => [token[name], token])).values()]; // a token of each kind
  const legend = { version: (token) => `v${token.version}`, worker: (token) => token.worker || "unknown" }[by];
  $("rollout-legend").replaceChildren(...(legend ? first(by).map((token) => make("span", { class: "kind", style: `background:${colourOf(token, by)}` }, legend(token))) : ["red: unlikely when it was drawn"]));
  $("rollout-tokens").replaceChildren(...shown.tokens.flatMap((token, i) => {
    const span = make("span", { class: "token", tabindex: i ? -1 : 0, style: `background:${colourOf(token, by)}` }, token.text || "·");
    span.onmouseenter = span.onfocus = () => point(i);
    return [...shown.said.filter((turn) => turn.position === shown.offset + i).map(turnMark), span];
  }));
}
async function openRollout(id, offset) {
  try {
    shown = await fetched("/api/rollout?" + new URLSearchParams({ id, offset }));
  } catch (error) { tell(error instanceof TypeError ? "The coordinator does not answer." : error.message); $("rollout-dialog").close(); return; }
  setText($("rollout-title"), `Rollout ${shown.id}`);
  setText($("rollout-facts"), `reward ${number(shown.reward)} · trained on in step ${whole(shown.step)} · ${whole(shown.token_count)} tokens${turnsOf(shown)}, ended by ${shown.finish_reason === "length" ? "the length limit" : shown.finish_reason} · ${versions(shown)} · sampled on ${shown.workers.join(", ") || "an unknown worker"}`);
  setText($("rollout-prompt"), shown.prompt); setText($("rollout-token"), "Point at a token, or move through them with the arrow keys.");
  $("rollout-back").disabled = !offset; $("rollout-on").disabled = offset + shown.tokens.length >= shown.token_count;
  $("rollout-back").onclick = () => openRollout(id, Math.max(0, offset - PAGE)); $("rollout-on").onclick = () => openRollout(id, offset + shown.tokens.length);
  drawTokens();
  if (!$("rollout-dialog").open) ask($("rollout-dialog"));
}
$("rollout-colour").onchange = drawTokens;
$("rollout-tokens").onkeydown = (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], here = document.activeElement;
  if (!step || !here.classList.contains("token")) return;
  const all = [...$("rollout-tokens").querySelectorAll(".token")], next = all[all.indexOf(here) + step];
  if (next) { here.tabIndex = -1; next.tabIndex = 0; next.focus(); } event.preventDefault();
};

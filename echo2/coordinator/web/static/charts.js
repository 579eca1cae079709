// The three charts, drawn by uPlot; colours follow the theme.
import { $, make } from "./dom.js";
import { number, percent, whole } from "./format.js";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const charts = new Map();
function axes(xName, yFormat) {
  const look = () => ({ stroke: colour("--soft"), grid: { stroke: colour("--line-soft"), width: 1 }, ticks: { show: false }, font: "11px system-ui", labelFont: "11px system-ui" });
  return [{ ...look(), label: xName, labelSize: 18, size: 28, values: (_, all) => all.map((v) => whole(v)), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5] }, { ...look(), size: 46, values: (_, all) => all.map(yFormat) }];
}
const line = (label, name, more = {}) => ({ label, stroke: colour(name), width: 2, points: { show: (u) => u.data[0].length < 3 }, spanGaps: true, ...more });
function draw(id, data, options, empty) {
  const host = $(id);
  const isEmpty = !data[0]?.length;
  const old = charts.get(id);
  if (isEmpty) {
    old?.plot.destroy(); charts.delete(id);
    host.replaceChildren(make("div", { class: "empty" }, make("strong", {}, empty[0]), empty[1]));
    return;
  }
  if (old) { old.plot.setData(data); return; }
  host.replaceChildren();
  const size = { width: host.clientWidth || 300, height: host.clientHeight || 190 };
  const plot = new uPlot({ ...size, cursor: { points: { size: 7 }, drag: { x: true, y: false } }, legend: { show: false }, padding: [10, 10, 0, 0], ...options }, data, host);
  charts.set(id, { plot });
}
export function redrawAll() { for (const { plot } of charts.values()) plot.destroy(); charts.clear(); }
new ResizeObserver((entries) => {
  for (const { target } of entries) { const chart = charts.get(target.id); if (chart && target.clientWidth) chart.plot.setSize({ width: target.clientWidth, height: target.clientHeight }); }
}).observe($("reward-chart"));
for (const id of ["utilisation-chart", "lag-chart"]) new ResizeObserver(() => { const chart = charts.get(id), host = $(id); if (chart && host.clientWidth) chart.plot.setSize({ width: host.clientWidth, height: host.clientHeight }); }).observe($(id));
function tooltip() {
  let box;
  return { hooks: {
    init: (u) => { box = make("div", { class: "tip" }); u.over.append(box); u.over.addEventListener("mouseleave", () => { box.style.display = "none"; }); },
    setCursor: (u) => {
      const i = u.cursor.idx;
      if (i == null) { box.style.display = "none"; return; }
      const said = u.series.slice(1).map((s, k) => u.data[k + 1][i] == null ? null : `${s.label} ${s.say ? s.say(u.data[k + 1][i]) : number(u.data[k + 1][i])}`).filter(Boolean);
      box.textContent = `${u.series[0].label} ${whole(u.data[0][i])}: ${said.join(" · ")}`;
      box.style.display = "block";
      box.style.left = Math.min(u.cursor.left + 10, u.over.clientWidth - box.offsetWidth) + "px";
      box.style.top = "4px";
    } } };
}
export function drawSeries(series) {
  const x = series.step;
  draw("reward-chart", [x, series.reward, series.eval], { scales: { x: { time: false }, y: { range: (u, low, high) => low === high ? [low - 0.5, high + 0.5] : uPlot.rangeNum(low, high, 0.1, true) } }, plugins: [tooltip()], axes: axes("step", (v) => number(v)), series: [{ label: "step" }, line("batch", "--accent", { width: 1.5 }), line("held out", "--second", { width: 2.5 })] }, ["No step yet", "The curve begins with the learner's first step."]);
  draw("utilisation-chart", [x, series.utilisation, series.predicted], { scales: { x: { time: false }, y: { range: [0, 1.02] } }, plugins: [tooltip()], axes: axes("step", (v) => percent(v, 0)), series: [{ label: "step" }, line("measured", "--accent", { fill: colour("--accent") + "1c", say: percent }), line("predicted", "--second", { dash: [5, 4], say: percent })] }, ["No step yet", "Measured and predicted appear side by side."]);
}
export function drawLags(histogram, bound) {
  const total = histogram.reduce((a, b) => a + b, 0);
  const count = Math.max(bound + 1, histogram.length);
  const data = total ? [Array.from({ length: count }, (_, i) => i), Array.from({ length: count }, (_, i) => (histogram[i] || 0) / total)] : [[], []];
  const old = charts.get("lag-chart");
  if (old && old.count !== count) { old.plot.destroy(); charts.delete("lag-chart"); }
  draw("lag-chart", data, { scales: { x: { time: false, range: [-0.6, count - 0.4] }, y: { range: (u, low, high) => [0, Math.max(high * 1.1, 0.1)] } }, plugins: [tooltip()], axes: axes("lag in steps", (v) => percent(v, 0)), series: [{ label: "lag" }, { label: "of all tokens", stroke: colour("--accent"), fill: colour("--accent") + "b0", width: 0, paths: uPlot.paths.bars({ size: [0.62, 60] }), points: { show: false }, say: percent }] }, ["Nothing trained yet", "Each trained token is counted by its lag."]);
  const made = charts.get("lag-chart"); if (made) made.count = count;
}

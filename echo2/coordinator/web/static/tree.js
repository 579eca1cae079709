// How the newest version travels: the seed, then each worker with the share it relays and what it holds of it.
import { $, make, setText } from "./dom.js";
import { bytes, percent, seconds } from "./format.js";
const SHOWN = 12;
function times(broadcast, index, isNarrow) {
  const predicted = broadcast.predicted_s?.[index - 1], actual = broadcast.actual_s?.[index - 1];
  if (actual != null) return isNarrow ? seconds(actual) : `took ${seconds(actual)}${predicted != null ? `, predicted ${seconds(predicted)}` : ""}`;
  return predicted != null ? `${isNarrow ? "in " : "predicted "}${seconds(predicted)}` : "";
}
export function drawTree(broadcast, workers, learner, finished) {
  const host = $("tree"), nodes = broadcast.nodes || [];
  $("broadcast-topology").textContent = broadcast.topology ? broadcast.topology.replaceAll("_", " ") : "";
  $("broadcast-reason").textContent = (broadcast.reason || "").replaceAll("_", " ");
  if (nodes.length < 2) {
    const many = broadcast.node_count > 2;
    host.replaceChildren(make("div", { class: "empty" }, make("strong", {}, many ? `${broadcast.node_count} nodes` : finished ? "Nobody to send to" : "Nobody to send to yet"), many ? "The trees of so large a fleet are not drawn." : finished ? "The run is finished." : "The plan appears with the learner and the first worker."));
    return;
  }
  const newest = broadcast.versions?.at(-1);
  const share = nodes.map((_, i) => broadcast.trees.filter((tree) => i > 0 && tree.parents.includes(i)).reduce((sum, tree) => sum + tree.weight, 0));
  const direct = broadcast.trees.filter((tree) => tree.parents.every((parent) => parent === 0)).reduce((sum, tree) => sum + tree.weight, 0);
  const order = nodes.map((_, i) => i).slice(1).sort((a, b) => share[b] - share[a]).slice(0, SHOWN);
  const isNarrow = host.clientWidth > 0 && host.clientWidth < 560;
  const at = isNarrow ? { width: 370, seed: 78, box: 118, text: 126, bar: 236, barWidth: 54, side: 298, name: 15 } : { width: 760, seed: 138, box: 282, text: 294, bar: 452, barWidth: 110, side: 572, name: 22 };
  const rowHeight = 44, width = at.width, height = Math.max(order.length * rowHeight, 88), middle = height / 2;
  const svg = make("svg:svg", { class: "tree", viewBox: `0 0 ${width} ${height + 8}`, role: "img", "aria-label": `${broadcast.topology} from the learner to ${nodes.length - 1} workers` });
  order.forEach((index, row) => {
    const y = row * rowHeight + rowHeight / 2, node = nodes[index], worker = workers[node.id] || {};
    const fromSeed = broadcast.trees.filter((tree) => tree.parents[index - 1] === 0).reduce((sum, tree) => sum + tree.weight, 0);
    svg.append(make("svg:path", { class: fromSeed > 0.999 && share[index] < 1e-6 ? "edge direct" : "edge", "stroke-width": 1 + 6 * fromSeed, d: `M${at.seed},${middle} C${(at.seed + at.box) / 2},${middle} ${(at.seed + at.box) / 2},${y} ${at.box},${y}` }));
    svg.append(make("svg:rect", { class: "node", x: at.box, y: y - 18, width: at.width - at.box - 6, height: 36, rx: 8 }));
    svg.append(make("svg:text", { x: at.text, y: y - 2 }, node.name.slice(0, at.name)));
    svg.append(make("svg:text", { x: at.text, y: y + 12, class: "soft" }, share[index] > 1e-6 ? `relays ${percent(share[index], 0)}${isNarrow ? "" : " to the others"}` : "receives only"));
    const isCurrent = newest && worker.version != null && worker.version >= newest.version;
    const part = isCurrent ? 1 : worker.chunk_count ? worker.chunks_held / worker.chunk_count : 0;
    svg.append(make("svg:rect", { class: "track", x: at.bar, y: y - 4, width: at.barWidth, height: 8, rx: 4 }), make("svg:rect", { class: part >= 1 ? "held done" : "held", x: at.bar, y: y - 4, width: at.barWidth * part, height: 8, rx: 4 }));
    const chunks = isCurrent ? `v${worker.version} live` : worker.chunk_count ? `${worker.chunks_held}/${worker.chunk_count} of v${worker.in_flight}` : worker.version == null ? "no version yet" : `v${worker.version}`;
    svg.append(make("svg:text", { x: at.side, y: y - 2 }, isNarrow ? chunks.replace(/ of .*/, "") : chunks));
    svg.append(make("svg:text", { x: at.side, y: y + 12, class: "soft" }, times(broadcast, index, isNarrow)));
  });
  svg.append(make("svg:rect", { class: "node seed", x: 2, y: middle - 28, width: at.seed - 2, height: 56, rx: 10 }), make("svg:text", { class: "seed-text", x: isNarrow ? 12 : 20, y: middle - 5 }, "learner"), make("svg:text", { class: "seed-text", x: isNarrow ? 12 : 20, y: middle + 12, style: "font-size:11px;font-weight:400" }, newest ? `v${newest.version}${isNarrow ? "" : " · " + bytes(newest.bytes)}` : learner.version != null ? `v${learner.version}` : ""));
  const rest = nodes.length - 1 - order.length;
  host.replaceChildren(svg, ...(rest > 0 ? [make("p", { class: "quiet" }, `and ${rest} more workers`)] : []), ...(direct > 0.001 && direct < 0.999 ? [make("p", { class: "quiet" }, `${percent(direct, 0)} of the chunks go from the learner to everybody directly`)] : []));
}
export function drawVersions(broadcast) {
  const versions = [...(broadcast.versions || [])].reverse();
  $("versions-empty").hidden = versions.length > 0;
  setText($("versions-empty"), broadcast.full_bytes ? "None was published since the coordinator was started." : "No version has been published.");
  const saved = broadcast.full_bytes ? `${bytes(broadcast.artifact_bytes)} sent for ${bytes(broadcast.full_bytes)} of snapshots` : "";
  $("versions-note").textContent = saved;
  $("versions").replaceChildren(...versions.slice(0, 10).map((v) => make("tr", {}, make("td", {}, `v${v.version}`, make("span", { class: "sub" }, v.parent == null ? "keyframe" : `from v${v.parent}`)), make("td", { class: "n" }, bytes(v.bytes)), make("td", { class: "n" }, v.full_bytes ? percent(v.bytes / v.full_bytes) : "unknown"), make("td", { class: "n" }, v.predicted_s ? seconds(v.predicted_s) : "none"), make("td", { class: "n" }, v.waiting ? "on its way" : seconds(v.actual_s)), make("td", { class: "n" }, `${v.live} of ${v.pool}`))));
}

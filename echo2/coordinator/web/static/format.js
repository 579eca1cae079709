// Numbers as people read them.
export const dash = "none"; // of what has no value yet, or never had one
export const number = (x, digits = 3) => x == null ? dash : x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(2) : x.toLocaleString("en", { maximumSignificantDigits: digits });
export const whole = (x) => x == null ? dash : Math.round(x).toLocaleString("en");
export const count = (n, what) => `${whole(n)} ${what}${n === 1 ? "" : "s"}`;
export const percent = (x, digits = 1) => x == null ? dash : (100 * x).toFixed(digits) + " %";
export const usd = (x) => x == null ? dash : x >= 100 ? "$" + whole(x) : x >= 0.1 || x === 0 ? "$" + x.toFixed(2) : x < 0.0001 ? "under $0.0001" : "$" + Number(x.toPrecision(2));
const scaled = (x, units, step) => { let i = 0; while (Math.abs(x) >= step && i < units.length - 1) { x /= step; i++; } return Number(x.toPrecision(3)) + " " + units[i]; };
export const bytes = (x) => x == null ? dash : scaled(x, ["B", "kB", "MB", "GB", "TB"], 1000);
export const rate = (x) => x ? scaled(x * 8, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s"], 1000) : "unknown";
export const seconds = (x) => x == null ? dash : x < 0.0005 ? "0 s" : x < 1 ? Math.round(x * 1000) + " ms" : x < 100 ? Number(x.toPrecision(3)) + " s" : x < 7200 ? Math.round(x / 60) + " min" : x < 172800 ? Math.round(x / 3600) + " h" : Math.round(x / 86400) + " d";
export function compare(x, y, descending) { // who has no value comes last either way
  if (x == null || y == null) return (x == null) - (y == null);
  return (descending ? -1 : 1) * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
}
export function joined(entries, same, most = 3) { // neighbours of one kind as one: [first, how many, names of the first few]
  const found = [];
  for (const one of entries) { const last = found.at(-1); if (last && same(last.first) === same(one)) { last.count += 1; if (last.all.length < most) last.all.push(one); } else found.push({ first: one, count: 1, all: [one] }); }
  return found;
}
export function clock(unix) { // of another day with its date: runs take weeks
  const at = new Date(unix * 1000), time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}

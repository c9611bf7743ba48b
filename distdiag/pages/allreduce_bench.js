
// ---- allreduce-bench

const { results, arrivals, verdict: expectation, device_name, nodes } = data.data;
showVerdict(
  [device_name, counted(nodes, "node")].filter(Boolean).join(", "),
  ...(expectation?.lines ?? []));

const UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
const size = (bytes) => { const [factor, unit] = UNITS.find(([least]) => bytes >= least) ?? UNITS.at(-1); return `${+(bytes / factor).toFixed(1)} ${unit}`; };
const time = (seconds) => (seconds >= 1 ? `${seconds.toFixed(2)} s` : seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(2)} ms` : `${(seconds * 1e6).toFixed(1)} us`);
const speed = (value) => (value === null ? "-" : (value / 1e9).toPrecision(3));

function chart(rows) {
  const points = rows.filter((row) => row.busbw_bytes_per_s !== null && row.size_bytes > 0);
  if (points.length < 2) return null;
  const [low, high] = [Math.log2(points[0].size_bytes), Math.log2(points.at(-1).size_bytes)];
  const most = Math.max(...points.map((row) => row.busbw_bytes_per_s), expectation?.expected_busbw_bytes_per_s ?? 0);
  const width = Math.min(912, byId("page").clientWidth);
  const end = width - 32;
  const x = (row) => 60 + ((end - 60) * (Math.log2(row.size_bytes) - low)) / (high - low || 1);
  const y = (value) => 250 - (220 * value) / most;
  const svg = draw(element("div", "wide"), "svg", { viewBox: `0 0 ${width} 290`, width, role: "img", "aria-label": "bus bandwidth by size" });
  for (const part of [0, 0.5, 1]) {
    draw(svg, "path", { d: `M 60 ${y(part * most)} H ${end}`, class: "grid" });
    draw(svg, "text", { x: 4, y: y(part * most) + 4, class: "quiet" }, `${speed(part * most)}`);
  }
  draw(svg, "path", { d: points.map((row, at) => `${at ? "L" : "M"} ${x(row)} ${y(row.busbw_bytes_per_s)}`).join(" "), class: "line" });
  for (const row of points) draw(svg, "circle", { cx: x(row), cy: y(row.busbw_bytes_per_s), r: 3 });
  const expected = expectation?.expected_busbw_bytes_per_s;
  if (expected) {
    draw(svg, "path", { d: `M 60 ${y(expected)} H ${end}`, "stroke-dasharray": "6 4" });
    draw(svg, "text", { x: end - 150, y: y(expected) - 6, class: "quiet" }, `expected ${speed(expected)} GB/s`);
  }
  for (const row of [points[0], points.at(-1)]) draw(svg, "text", { x: Math.min(x(row), end - 40) - 10, y: 276, class: "quiet" }, size(row.size_bytes));
  return svg.parentNode;
}

for (const op of [...new Set(results.map((row) => row.op))]) {
  const rows = results.filter((row) => row.op === op);
  section(`${op}: bus bandwidth in GB/s by size`, chart(rows), table(
    [["size", "number"], ["type", "key"], ["time", "number"], ["algbw", "number"], ["busbw", "number"], ["wrong", "number"], ["", "text"]],
    rows.map((row) => [
      size(row.size_bytes), row.dtype, row.time_s ? time(row.time_s.p50) : "-", speed(row.algbw_bytes_per_s),
      speed(row.busbw_bytes_per_s), row.wrong === null ? "-" : `${row.wrong}`, row.skipped,
    ])));
}
if (arrivals.length) {
  const latest = [...arrivals].sort((a, b) => b.late_s - a.late_s);
  section("How late each rank entered", table(
    [["rank", "number"], ["host", "key"], ["collective", "key"], ["size", "number"], ["late", "number"], ["inside", "number"]],
    latest.slice(0, ROWS_AT_ONCE).map((row) => [`${row.rank}`, row.host, row.op, size(row.size_bytes), time(row.late_s), time(row.inside_s)])));
}

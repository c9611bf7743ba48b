
// ---- flight-recorder

const { ranks, world_size } = data.data;
const waiting = ranks.filter((rank) => rank.status === "waits").length;
showVerdict(`${counted(ranks.length, "rank")} of ${world_size}: ${waiting} waiting, ${ranks.length - waiting} not`);

const several = new Set(ranks.flatMap((rank) => rank.recent.map((call) => call.group))).size > 1;

function callCell(call, start) {
  const kind = { ended: "", failed: "failed" }[call.state] ?? "open";
  const peer = call.number === null ? `${call.source}->${call.target}` : `#${call.number}`;
  const site = call.file ? `, ${call.function} (${call.file.split("/").at(-1)}:${call.line})` : "";
  return [
    `${several ? `${call.group} ` : ""}${call.operation} ${peer}${call.state === "ended" ? "" : ` (${call.state})`}`,
    kind,
    `${call.group}, ${call.state}, +${((call.created_ns - start) / 1e6).toFixed(1)} ms${site}`,
  ];
}

const start = Math.min(...ranks.flatMap((rank) => rank.recent.slice(0, 1).map((call) => call.created_ns)));
const ordered = [...ranks].sort((a, b) => b.accused - a.accused || a.rank - b.rank);
section("The last calls of each rank", timeline(ordered.map((rank) => ({
  rank: `${rank.rank}`,
  about: [rank.host, `${rank.status}${rank.accused ? ", stuck" : ""}`],
  stuck: rank.accused,
  calls: rank.recent.map((call) => callCell(call, start)),
}))));

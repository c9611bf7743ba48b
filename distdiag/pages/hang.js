
// ---- hang

const NAMES = ["host", "job", "doing", "stuck", "waits", "recorder", "rank", "local_rank", "pid", "moving", "since_s", "waits_for", "counters", "frames", "recent"];
const TEXTS = new Set(["host", "job", "doing", "stuck", "waits", "recorder", "counters"]);
const STACKS = new Set(["frames", "recent"]);
const rows = data.rows.map((values) => Object.fromEntries(NAMES.map((name, n) =>
  [name, TEXTS.has(name) ? data.strings[values[n]] : STACKS.has(name) ? data.stacks[values[n]] : values[n]])));
function kind(row) {
  if (row.doing === "communication wait" || row.doing === "gpu wait") return "comm";
  if (["data loading", "storage", "checkpoint", "network"].includes(row.doing)) return "data";
  if (["lock", "gil", "debugger"].includes(row.doing)) return "lock";
  if (["exited", "no process", "stopped", "unreadable"].includes(row.doing)) return "dead";
  return "work";
}

function nameOf(row) {
  return row.rank === null ? `pid ${row.pid}` : `rank ${row.rank}`;
}

function picture() {
  const shown = section(`${counted(rows.length, "rank")} by host and local rank`);
  shown.className = rows.length <= 64 ? "big" : rows.length > 256 ? "small" : "";
  const hosts = element("div", "hosts");
  const detail = element("div", "detail");
  detail.hidden = true;
  detail.setAttribute("aria-live", "polite");
  shown.append(legend(), hosts, detail);
  const byHost = new Map();
  for (const row of rows) byHost.set(row.host, [...(byHost.get(row.host) ?? []), row]);
  let pressed = null;
  for (const [host, own] of byHost) {
    const squares = element("div", "squares");
    const label = element("span", "", host || "unknown host");
    label.title = host;
    hosts.append(element("div", "host", label, squares));
    own.sort((a, b) => (a.local_rank ?? a.rank ?? 0) - (b.local_rank ?? b.rank ?? 0));
    for (const row of own) {
      const square = button(data.letters[row.doing] ?? "?", () => {
        if (pressed) pressed.setAttribute("aria-pressed", "false");
        pressed = square;
        square.setAttribute("aria-pressed", "true");
        show(detail, row);
      }, `square ${kind(row)}${row.stuck ? " stuck" : ""}`);
      square.title = `${nameOf(row)}: ${row.doing}${row.stuck ? `, ${row.stuck}` : ""}`;
      square.setAttribute("aria-label", square.title);
      square.setAttribute("aria-pressed", "false");
      squares.append(square);
    }
  }
  const stuck = rows.find((row) => row.stuck);
  if (stuck) show(detail, stuck);
}

function legend() {
  const counts = new Map();
  for (const row of rows) counts.set(row.doing, (counts.get(row.doing) ?? 0) + 1);
  const entry = (letter, kinds, words) => element("span", "", element("span", `square ${kinds}`, letter), words);
  const stuck = rows.filter((row) => row.stuck).length;
  return element("div", "legend",
    ...[...counts].map(([doing, count]) => entry(data.letters[doing] ?? "?", kind({ doing }), `${doing} (${count})`)),
    stuck ? entry("!", "stuck", `holds the others up (${stuck})`) : null);
}

function show(detail, row) {
  const since = row.since_s === null ? "" : `, asleep for ${Math.round(row.since_s)} s`;
  const calls = element("p", row.stuck ? "stuck" : "", ...row.recent.map((text) => element("span", `call ${openOr(text)}`, text)));
  const others = data.sources.filter((each) => row.rank !== null && numbersIn(each.ranks).includes(row.rank));
  detail.hidden = false;
  detail.replaceChildren(...[
    element("h3", "", `${nameOf(row)} on ${row.host}${row.pid === null ? "" : `, pid ${row.pid}`}: ${row.doing}${since}${row.stuck ? ` - ${row.stuck}` : ""}`),
    row.counters && element("p", "", row.counters),
    row.waits && element("p", "", `/proc: ${row.waits}${row.waits_for === null ? "" : ` (rank ${row.waits_for})`}`),
    row.recorder && element("p", "", `recorder: ${row.recorder}`),
    element("pre", "", row.frames.length ? row.frames.join("\n") : "no stack"),
    row.recent.length ? calls : "",
    ...others.map((source) => element("p", "", `${source.source} (${source.stand}): ${source.says}`)),
  ].filter(Boolean));
}

function openOr(call) {
  return call.endsWith("ended") ? "" : "open";
}

function sources() {
  const stands = { agrees: "ok", disagrees: "fail" };
  section("What each source says", table(
    [["source", "key"], ["verdict", "key"], ["says", "text"], ["what would make it say more", "text"]],
    data.sources.map((source) => [
      source.source,
      element("span", stands[source.stand] ?? "quiet", source.stand),
      source.says,
      source.hint && element("span", "quiet", source.hint),
    ])));
}

function waits() {
  if (!data.edges.length) return;
  section("Which rank waits for which", table(
    [["ranks", "text"], ["in", "key"], ["wait for", "key"]],
    data.edges.map((edge) => [brief(edge.from), edge.doing, element("span", "fail", brief(edge.to))])));
}

function recorder() {
  const recorded = rows.filter((row) => row.recent.length).sort((a, b) => Number(Boolean(b.stuck)) - Number(Boolean(a.stuck)) || a.rank - b.rank);
  if (!recorded.length) return;
  section("The last calls of each rank", timeline(recorded.map((row) => ({
    rank: `${row.rank ?? "-"}`,
    about: [row.host],
    stuck: Boolean(row.stuck),
    calls: row.recent.map((text) => [text, openOr(text)]),
  }))));
}

showVerdict(...data.jobs.map((job) => `job ${job.job} (${job.launcher}): ${job.ranks}${job.world_size ? ` of ${job.world_size}` : ""} ranks on ${job.hosts}`));
picture();
waits();
sources();
recorder();

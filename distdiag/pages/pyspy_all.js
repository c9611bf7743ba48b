
// ---- pyspy-all

const ROWS_A_PAGE = 100;
const BRANCHES_AT_ONCE = 40;
const NODES_OPEN = 500; // with more groups than this, only branches with outliers start unfolded
const STATES = new Map(Object.entries({
  S: "sleeping", R: "running", D: "uninterruptible", T: "stopped", t: "traced", Z: "zombie",
}));
const library = new Set(data.library);
const processes = data.rows.map(processOf);
const groups = data.groups.map((group) => ({
  ...group,
  path: [...data.stacks[group.stack]].reverse(),
  members: numbersIn(group.members),
  label: [group.class, movement(group)].filter(Boolean).join(", "),
}));
const outlierKinds = new Map(
  data.outliers.flatMap((outlier) => numbersIn(outlier.members).map((member) => [member, outlier.kind.toUpperCase()])));
const jobs = jobsOf(groups);
const opened = new Set(); // processes with stacks shown in the table
let chosen = null; // the set of processes that match the filter; null: all
let firstRow = 0;

function processOf(row) {
  const process = Object.fromEntries(data.columns.map((column, at) => [column, row[at]]));
  for (const field of ["host", "job", "role", "state", "class", "status", "reason"]) {
    process[field] = data.strings[process[field]];
  }
  process.lowerHost = process.host.toLowerCase();
  return process;
}

function movement({ class: kind, moving }) {
  if (moving === null) return "";
  if (moving) return "moving";
  return kind === "compute" || kind === "compile" ? "same line in each sample" : "no progress";
}

function whoAre(members) {
  const ranked = members.filter((member) => processes[member].rank !== null);
  const nameless = members.filter((member) => processes[member].rank === null);
  const pids = folded(nameless.map((member) => processes[member].pid));
  return [
    named("rank", folded(ranked.map((member) => processes[member].rank))),
    nameless.length ? `${counted(nameless.length, "process", "processes")} without a rank (pid ${brief(pids)})` : "",
  ].filter(Boolean).join(" and ");
}

function showOutliers() {
  if (!data.outliers.length) return;
  const shown = withId("outliers", section("Outliers"));
  for (const outlier of data.outliers) {
    const { class: kind, frame, reason, ranks } = outlier;
    const text = [kind, frame ? `in ${frameText([frame.function, frame.file, frame.line])}` : "", data.summary.includes(reason) ? "" : reason].filter(Boolean).join("; ");
    const title = element("strong", "outlier", `${outlier.kind.toUpperCase()} ${whereText(outlier)}: `);
    const show = ranks ? button("Show below", () => setFilter(ranks)) : null;
    shown.append(element("p", "", title, element("span", "", text), " ", show));
  }
}

// ---- the merged call tree

function jobsOf(all) {
  const known = data.jobs.map((job) => ({ job: job.job, title: jobTitle(job) }));
  for (const { job } of all) if (!known.some((shown) => shown.job === job)) known.push({ job, title: job });
  return known.map((shown) => ({ ...shown, roots: branches(all.filter((group) => group.job === shown.job), 0) }));
}

function jobTitle(job) {
  const size = job.world_size === null ? counted(job.ranks, "rank") : `${job.ranks} of ${counted(job.world_size, "rank")}`;
  return [job.job, job.launcher, size, job.hosts ? `on ${brief(job.hosts)}` : ""].filter(Boolean).join(", ");
}

function branches(some, depth) {
  const byFrame = new Map();
  for (const group of some) {
    const frame = group.path[depth];
    if (!byFrame.has(frame)) byFrame.set(frame, []);
    byFrame.get(frame).push(group);
  }
  const nodes = [...byFrame.values()].map((alike) => run(alike, depth));
  return nodes.sort((a, b) => b.hasOutlier - a.hasOutlier || b.members.length - a.members.length);
}

// A node is a run of frames without a branch or an end of a group.
function run(some, depth) {
  const start = depth;
  const path = some[0].path;
  while (depth < path.length && some.every((group) => group.path[depth] === path[depth])) depth += 1;
  const longer = some.filter((group) => group.path.length > depth);
  const members = some.flatMap((group) => group.members);
  const hasOutlier = members.some((member) => outlierKinds.has(member));
  return {
    frames: path.slice(start, depth),
    members,
    ended: some.filter((group) => group.path.length === depth),
    children: branches(longer, depth),
    hasOutlier,
    open: hasOutlier || groups.length <= NODES_OPEN,
    limit: BRANCHES_AT_ONCE,
  };
}

function frameText([name, file, line]) {
  return `${name} (${file}${line ? `:${line}` : ""})`;
}

function frameLine(frame) {
  const quiet = library.has(frame);
  return { text: frameText(data.frames[frame]) + (quiet ? " [library]" : ""), className: quiet ? "library" : "" };
}

function listed(lines) {
  return element("ol", "frames", ...lines.map((line) => element("li", line.className, line.text)));
}

// Lines of a run: one per frame; library frames are folded into one line naming the innermost.
function linesOf(frames) {
  const lines = [];
  let hidden = [];
  const flush = () => {
    if (!hidden.length) return;
    const last = frameText(data.frames[hidden.at(-1)]);
    lines.push({ text: `\u2026 ${counted(hidden.length, "library frame")}, the innermost ${last}`, className: "library" });
    hidden = [];
  };
  for (const frame of frames) {
    if (library.has(frame) && !byId("library").checked) {
      hidden.push(frame);
      continue;
    }
    flush();
    lines.push(frameLine(frame));
  }
  flush();
  return lines.length ? lines : [{ text: "no Python frames", className: "library" }];
}

function passing(members) {
  return chosen === null ? members : members.filter((member) => chosen.has(member));
}

function outlierMark(members) {
  const outliers = members.filter((member) => outlierKinds.has(member));
  if (!outliers.length) return null;
  const kinds = [...new Set(outliers.map((member) => outlierKinds.get(member)))].join(", ");
  return element("strong", "outlier", outliers.length === members.length ? kinds : `${kinds} inside: ${whoAre(outliers)}`);
}

function labelsOf(node, members) {
  const own = new Set(members);
  const labels = new Set();
  const visit = (branch) => {
    for (const group of branch.ended) if (group.members.some((member) => own.has(member))) labels.add(group.label);
    branch.children.forEach(visit);
  };
  visit(node);
  return labels.size > 2 ? `${labels.size} classes` : [...labels].join("; ");
}

function showNode(node) {
  const members = passing(node.members);
  const [first, ...rest] = linesOf(node.frames);
  const mark = outlierMark(members);
  const some = members.length < node.members.length ? ` of ${node.members.length}` : "";
  const shown = element("details", "node",
    element("summary", "",
      element("span", `frame ${first.className}`, first.text),
      " ",
      element("span", "ranks", `${whoAre(members)} (${members.length}${some})`),
      " ",
      element("span", "quiet", labelsOf(node, members)),
      " ",
      mark));
  shown.classList.toggle("is-outlier", mark !== null && members.every((member) => outlierKinds.has(member)));
  shown.open = node.open;
  const fill = () => { if (node.open && shown.children.length === 1) shown.append(insideOf(node, rest)); };
  shown.addEventListener("toggle", () => { node.open = shown.open; fill(); });
  fill();
  return shown;
}

function insideOf(node, lines) {
  const inside = element("div", "inside");
  if (lines.length) inside.append(listed(lines));
  if (node.children.length || node.ended.length > 1) {
    for (const group of node.ended.filter((ended) => passing(ended.members).length)) {
      inside.append(element("p", "", `ends here: ${whoAre(passing(group.members))} (${passing(group.members).length}): ${group.label}`));
    }
  }
  showBranches(node.children, inside, node);
  return inside;
}

function showBranches(nodes, place, owner, from = 0) {
  const matching = nodes.filter((node) => passing(node.members).length);
  place.append(...matching.slice(from, owner.limit).map(showNode));
  const left = matching.length - owner.limit;
  if (left <= 0) return;
  place.append(button(`Show ${Math.min(left, BRANCHES_AT_ONCE)} of ${left} more branches`, (pressed) => {
    const before = pressed.previousElementSibling;
    const start = owner.limit;
    owner.limit += BRANCHES_AT_ONCE;
    pressed.remove();
    showBranches(nodes, place, owner, start);
    before.nextElementSibling.firstElementChild.focus();
  }));
}

function showTree() {
  const place = element("div", "");
  for (const job of jobs) {
    job.limit ??= BRANCHES_AT_ONCE;
    if (job.roots.some((node) => passing(node.members).length)) {
      place.append(element("h3", "", job.title));
      showBranches(job.roots, place, job);
    }
  }
  if (!place.children.length) {
    place.append(element("p", "", groups.length ? "No branch matches the filter." : "No stacks were read."));
  }
  byId("tree").replaceChildren(place);
}

function setAll(open) {
  const visit = (node) => {
    node.open = open;
    node.children.forEach(visit);
  };
  for (const job of jobs) job.roots.forEach(visit);
  showTree();
}

// ---- the filter

function setFilter(text) {
  byId("filter").value = text;
  applyFilter();
  byId("filter").focus();
}

function applyFilter() {
  const { tests, wrong } = readFilter(byId("filter").value);
  byId("filter").setAttribute("aria-invalid", String(wrong !== ""));
  chosen = wrong || !tests.length ? null : choose(tests);
  byId("message").textContent = wrong || messageOf(tests);
  firstRow = 0;
  showTree();
  showRows();
}

function readFilter(text) {
  const parts = text.replace(/,\s*$/, "").split(",").map((part) => part.trim()); // a trailing comma: the next part may still be typed
  if (parts.length === 1 && !parts[0]) return { tests: [], wrong: "" };
  const tests = parts.map(readPart);
  const bad = tests.find((test) => test.wrong);
  return { tests, wrong: bad ? `${bad.wrong}. Write ranks, such as 3 or 0-7,12, or part of a host name. No filter is applied.` : "" };
}

function readPart(part) {
  const [, low, high = low] = /^(\d+)(?:\s*-\s*(\d+))?$/.exec(part) ?? [];
  if (low !== undefined && Number(low) > Number(high)) return { wrong: `"${part}": the range ends before it starts` };
  if (low !== undefined) {
    return { part, matches: ({ rank }) => rank !== null && rank >= Number(low) && rank <= Number(high) };
  }
  if (!/[^\d\s-]/.test(part)) return { wrong: part ? `"${part}" is neither a rank nor a host` : "Empty entry between commas" };
  return { part, matches: ({ lowerHost }) => lowerHost.includes(part.toLowerCase()) };
}

function choose(tests) {
  const found = new Set();
  for (const test of tests) {
    test.count = 0;
    processes.forEach((process, at) => {
      if (!test.matches(process)) return;
      test.count += 1;
      found.add(at);
    });
  }
  return found;
}

function messageOf(tests) {
  if (!tests.length) return "";
  const without = tests.filter((test) => !test.count).map((test) => `"${test.part}"`);
  const nothing = without.length ? ` No rank or host matches ${brief(without.join(", "))}.` : "";
  return `${chosen.size} of ${counted(processes.length, "process", "processes")}.${nothing}`;
}

// ---- the table of processes

function showRows() {
  const matching = passing([...processes.keys()]);
  const page = matching.slice(firstRow, firstRow + ROWS_A_PAGE);
  byId("rows").replaceChildren(...page.flatMap(rowsOf));
  byId("shown").textContent = matching.length
    ? `${firstRow + 1}-${firstRow + page.length} of ${matching.length}`
    : processes.length ? "No process matches the filter." : "No processes found.";
  byId("previous").disabled = firstRow === 0;
  byId("next").disabled = firstRow + ROWS_A_PAGE >= matching.length;
}

function rowsOf(at) {
  const process = processes[at];
  const toggle = button(process.rank === null ? "none" : `${process.rank}`, () => toggleStacks(at, row, toggle), "rank");
  toggle.setAttribute("aria-expanded", String(opened.has(at)));
  toggle.setAttribute("aria-label", `${process.rank === null ? "no rank" : `rank ${process.rank}`}: show stacks`);
  const role = [process.role === "rank" ? "" : process.role, jobs.length > 1 ? process.job : ""].filter(Boolean).join(", ");
  const mark = outlierKinds.has(at) ? element("strong", "outlier", ` ${outlierKinds.get(at)}`) : null;
  const state = process.state ? `${process.state} ${STATES.get(process.state) ?? ""}` : "-";
  const row = element("tr", "",
    element("td", "key", toggle, role ? ` ${role}` : "", mark),
    ...[process.host || "-", `${process.pid ?? "-"}`, state, process.class, process.status].map((text) => element("td", "key", text)),
    element("td", "", process.reason));
  return opened.has(at) ? [row, stacksRow(at)] : [row];
}

function toggleStacks(at, row, toggle) {
  if (opened.delete(at)) row.nextElementSibling.remove();
  else {
    opened.add(at);
    row.after(stacksRow(at));
  }
  toggle.setAttribute("aria-expanded", String(opened.has(at)));
}

function stacksRow(at) {
  const process = processes[at];
  const threads = data.threads[process.threads];
  const cell = element("td", "", element("p", "quiet", factsOf(process)));
  cell.colSpan = 7;
  threads.forEach(([name, kind, stack], number) => {
    const frames = data.stacks[stack].map(frameLine);
    const title = [`thread ${name}`, `os thread ${process.os_thread_ids[number]}`, kind].filter(Boolean).join(", ");
    cell.append(element("h4", "", title), frames.length ? listed(frames) : element("p", "", "no Python frames"));
  });
  if (!threads.length) cell.append(element("p", "", `No stack was read: ${process.reason || process.status}`));
  return element("tr", "stacks", cell);
}

function factsOf(process) {
  return [
    `job ${process.job}`,
    process.local_rank === null ? "" : `local rank ${process.local_rank}`,
    movement(process),
    process.cpu_s === null ? "" : `${process.cpu_s} s of CPU`,
    ...data.counters[process.counters].map(([name, value]) => `${name} ${value}`),
    process.helpers.length ? named("helper", `pid ${folded(process.helpers)}`) : "",
    "innermost frame first",
  ].filter(Boolean).join(", ");
}

function turnPage(rows) {
  firstRow = Math.max(0, firstRow + rows);
  showRows();
}

function tools() {
  const filter = element("input");
  filter.id = "filter";
  filter.type = "text";
  filter.placeholder = "3 or 0-7,12 or a host";
  filter.autocomplete = "off";
  filter.spellcheck = false;
  filter.setAttribute("aria-describedby", "message");
  filter.addEventListener("input", applyFilter);
  const library = element("input");
  library.id = "library";
  library.type = "checkbox";
  library.addEventListener("change", showTree);
  const label = element("label", "", "Ranks or host");
  label.htmlFor = "filter";
  const bar = element("div", "tools", label, filter,
    withId("clear", button("Clear", () => setFilter(""), "")),
    element("label", "", library, " Show library frames"),
    withId("expand", button("Expand all", () => setAll(true), "")),
    withId("collapse", button("Collapse all", () => setAll(false), "")),
    status("message", "p"));
  bar.setAttribute("role", "search");
  return bar;
}

function withId(id, made) {
  made.id = id;
  return made;
}

function status(id, tag) {
  const made = withId(id, element(tag));
  made.setAttribute("role", "status");
  return made;
}

function processTable() {
  const titles = ["rank", "host", "pid", "state", "class", "status", "reason"];
  const head = element("tr", "", ...titles.map((title) => element("th", title === "reason" ? "" : "key", title)));
  const pager = element("p", "pager",
    withId("previous", button("Previous", () => turnPage(-ROWS_A_PAGE), "")), " ",
    withId("next", button("Next", () => turnPage(ROWS_A_PAGE), "")), " ",
    status("shown", "span"));
  const rows = withId("rows", element("tbody"));
  section("Processes", pager, element("div", "wide", element("table", "", element("thead", "", head), rows)));
}

showVerdict(`${counted(data.samples, "sample")}${data.samples > 1 ? `, ${data.interval_s} s apart` : ""}`);
showOutliers();
byId("page").append(tools());
section("Where the ranks are (outermost frame first)", withId("tree", element("div")));
processTable();
showTree();
showRows();

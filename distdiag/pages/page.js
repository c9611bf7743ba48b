"use strict";

// Shared by all pages: the verdict, findings, tables, timelines. A page's own script follows.
// Names, files, hosts and reasons are untrusted: always insert them as text nodes, never as markup.

const PARTS_OF_A_SET = 24;
const ROWS_AT_ONCE = 256;
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function button(text, act, className = "act") {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", () => act(made));
  return made;
}

function section(title, ...children) {
  const made = element("section", "", element("h2", "", title), ...children);
  byId("page").append(made);
  return made;
}

// ---- words and sets of numbers: "0-1,3-511"

function counted(count, word, plural = `${word}s`) {
  return `${count} ${count === 1 ? word : plural}`;
}

function numbersIn(folded) {
  const numbers = [];
  for (const part of folded ? folded.split(",") : []) {
    const [first, last = first] = part.split("-").map(Number);
    for (let number = first; number <= last; number += 1) numbers.push(number);
  }
  return numbers;
}

function folded(numbers) {
  const ranges = [];
  for (const number of [...new Set(numbers)].sort((a, b) => a - b)) {
    const range = ranges.at(-1);
    if (range && number === range[1] + 1) range[1] = number;
    else ranges.push([number, number]);
  }
  return ranges.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(",");
}

function brief(text) {
  const parts = text.split(",");
  if (parts.length <= PARTS_OF_A_SET) return text;
  return `${parts.slice(0, PARTS_OF_A_SET).join(",")} \u2026 (${parts.length - PARTS_OF_A_SET} more parts)`;
}

function named(word, set) {
  if (!set) return "";
  return `${word}${/[,-]/.test(set) ? "s" : ""} ${brief(set)}`;
}

function whereText(where) {
  const hosts = where.hosts ? `${/[,[]/.test(where.hosts) ? "hosts" : "host"} ${brief(where.hosts)}` : "";
  return [named("rank", where.ranks), hosts, named("pid", where.pids)].filter(Boolean).join(", ");
}

// ---- verdict and findings: if the first finding is the verdict, its title is shown only in the heading

function showVerdict(...facts) {
  const badge = element("span", `badge ${data.verdict}`, element("span", "", data.verdict.toUpperCase()));
  byId("head").append(
    element("p", "brand quiet", `distdiag ${data.command}`),
    element("h1", "", badge, " ", element("span", "", data.summary)),
    ...facts.filter(Boolean).map((fact) => element("p", "quiet", fact)));
  document.title = `${data.verdict.toUpperCase()} - distdiag ${data.command}`;
  byId("page").append(...data.findings.map((one, at) => finding(one, at === 0 && data.summary.startsWith(one.title))));
  byId("foot").append(`distdiag ${data.version}, exit status ${data.exit_code}`);
}

function finding(one, isVerdict) {
  const shown = element("article", `finding ${one.level}`);
  if (!isVerdict) shown.append(element("h3", "", element("span", one.level, one.level.toUpperCase()), " ", element("span", "", one.title)));
  if (one.detail) shown.append(element("p", "", one.detail));
  const where = whereText(one.where);
  shown.append(element("p", "quiet", [where, one.id].filter(Boolean).join(" \u00b7 ")));
  if (one.evidence.length) shown.append(element("pre", "evidence", one.evidence.join("\n")));
  if (one.fix) {
    const [, next, text] = /^(next: )?(.*)$/s.exec(one.fix.text);
    shown.append(element("p", "", element("strong", "", next ? "Next: " : "Fix: "), element("span", "", text)));
    for (const command of one.fix.commands) shown.append(commandToCopy(command));
  }
  return shown;
}

function commandToCopy(command) {
  const text = element("pre", "command", command);
  return element("div", "to-copy", text, button("Copy", (pressed) => copy(text, pressed)));
}

async function copy(shown, pressed) {
  getSelection().selectAllChildren(shown);
  try {
    await navigator.clipboard.writeText(shown.textContent);
    pressed.textContent = "Copied";
  } catch {
    pressed.textContent = "Selected: press Ctrl-C"; // clipboard access denied, or not a local page
  }
}

// ---- tables. A column is [title, class of its cells]; a cell is a text, or an element. Empty columns are omitted.

function table(every, cellsOf) {
  const used = every.map((column, at) => at).filter((at) => cellsOf.some((cells) => cells[at] !== "" && cells[at] !== null));
  const columns = used.map((at) => every[at]);
  const rows = cellsOf.map((cells) => used.map((at) => cells[at]));
  const head = element("tr", "", ...columns.map(([title, kind]) => element("th", kind, title)));
  const body = element("tbody", "", ...rows.map((cells) => element("tr", "",
    ...cells.map((cell, at) => element("td", columns[at][1], typeof cell === "number" ? `${cell}` : cell)))));
  return element("div", "wide", element("table", "", element("thead", "", head), body));
}

// ---- timelines: a row for each rank, calls aligned at the newest, on the right

function timeline(rows) {
  const head = element("tr", "", element("th", "key", "rank"), element("th", "calls", "calls, newest last"));
  const body = element("tbody");
  const box = element("div", "timeline", element("table", "", element("thead", "", head), body));
  box.tabIndex = 0;
  const place = element("div", "", box);
  const show = (from) => {
    for (const row of rows.slice(from, from + ROWS_AT_ONCE)) {
      const calls = element("td", `calls${row.stuck ? " stuck" : ""}`);
      for (const [text, kind, hint] of row.calls) {
        const call = element("span", `call ${kind}`, text);
        if (hint) call.title = hint;
        calls.append(call);
      }
      const about = row.about.filter(Boolean).map((text) => element("span", "quiet", text));
      body.append(element("tr", "", element("th", "key", element("span", row.stuck ? "rank fail" : "rank", row.rank), ...about), calls));
    }
    const left = rows.length - from - ROWS_AT_ONCE;
    if (left > 0) place.append(button(`Show ${Math.min(left, ROWS_AT_ONCE)} of ${left} more ranks`, (pressed) => { pressed.remove(); show(from + ROWS_AT_ONCE); }));
  };
  show(0);
  requestAnimationFrame(() => { box.scrollLeft = box.scrollWidth; });
  return place;
}

// ---- drawings

function draw(parent, tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.textContent = text;
  parent.append(made);
  return made;
}

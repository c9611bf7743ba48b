
// ---- doctor

const { nodes, exclude, differences, unchecked } = data.data;
showVerdict();
if (exclude) section("To start without the nodes that are not fit", commandToCopy(`--exclude=${exclude}`));

const LEVEL = { fit: "ok", "fit with warnings": "warn", "not fit": "fail", unknown: "unknown" };
const facts = [...new Set(nodes.flatMap((node) => Object.keys(node.facts)))];
const order = Object.keys(LEVEL).reverse();
const worstFirst = [...nodes].sort((a, b) => order.indexOf(a.fit) - order.indexOf(b.fit));
section("Nodes", table(
  [["node", worstFirst.some((node) => node.host.includes("[")) ? "text" : "key"], ["fit", "key"], ["findings", "text"], ...facts.map((name) => [name, "text fact"])],
  worstFirst.map((node) => [
    node.host,
    element("span", LEVEL[node.fit], node.fit),
    node.findings.join(", ") || "-",
    ...facts.map((name) => node.facts[name] ?? "-"),
  ])));

if (differences.length) {
  section("What differs between the nodes", table(
    [["fact", "key"], ["value", "text"], ["nodes", "text"]],
    differences.flatMap((difference) => Object.entries(difference.values).map(([value, hosts], at) =>
      [at ? "" : difference.fact, value, hosts]))));
}
if (unchecked.length) section("Not checked here", element("ul", "", ...unchecked.map((line) => element("li", "", line))));

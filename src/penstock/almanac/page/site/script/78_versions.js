/* Versions over time: the highest output rate of each release that was measured for this question, an engine's joined. */

/** An axis of places 1, 2, ... with a name each. */
function namedScale(names, from, to) {
  const scale = (value) => from + ((value - 0.5) / names.length) * (to - from);
  scale.ticks = names.map((_, at) => at + 1);
  scale.domain = [0.5, names.length + 0.5];
  return scale;
}

function showVersions(records) {
  const found = records.map((record) => ({ record, rate: highest(record, "output_rate") })).filter(({ rate, record }) => rate && !isWrong(record));
  const engines = new Map();
  for (const each of found) {
    const { engine } = each.record;
    const key = `${engine.name}${engine.configuration.name === "default" ? "" : ` · ${engine.configuration.name}`}`;
    engines.set(key, [...(engines.get(key) ?? []), each]);
  }
  const sorted = [...engines].sort(([a], [b]) => (a < b ? -1 : 1));
  const several = [...engines.values()].some((of) => unique(of.map(({ record }) => record.engine.version)).length > 1);
  byId("versions-part").hidden = !several;
  if (!several) return;
  const name = ({ record }) => `${record.engine.name} ${record.engine.version}`;
  const ordered = [...found].sort((a, b) => (a.record.when < b.record.when ? -1 : 1));
  const names = unique(ordered.map(name));
  const chart = frame(byId("versions"), {
    title: "Releases over time", about: "Highest output tokens a second of each release, in the order in which they were measured.",
    x: names, y: extent(found.flatMap(({ rate }) => rate), 1.3), xText: "releases, in the order measured →", yText: "output tokens a second ↑", xUnit: (at) => names[at - 1],
  });
  legend(byId("versions-legend"), sorted.map(([engine], at) => [engine, at % COLOURS]));
  const marks = [];
  sorted.forEach(([, of], at) => {
    const line = [...of].sort((a, b) => (a.record.when < b.record.when ? -1 : 1)).map((each) => ({ ...each, x: chart.x(names.indexOf(name(each)) + 1), y: chart.y(each.rate[0]) }));
    chart.plot.append(svg("path", { class: "joined", "data-colour": at % COLOURS, d: path(line.map((each) => [each.x, each.y])) }));
    for (const { record, rate, x, y } of line) {
      const node = svg("g", { class: "mark", "data-colour": at % COLOURS }, svg("circle", { class: "hit", cx: x, cy: y, r: 12 }),
        svg("line", { class: "whisker", x1: x, x2: x, y1: chart.y(rate[1] ?? rate[0]), y2: chart.y(rate[2] ?? rate[0]) }), svg("circle", { class: "dot", cx: x, cy: y, r: 4.5 }));
      chart.plot.append(node);
      marks.push({ node, x, y, text: `${name({ record })}, ${record.when.slice(0, 10)}: ${peakText(rate)} output tokens a second`, open: () => change({ point: `${record.run}/` }) });
    }
  });
  reachable(chart, marks);
  put(byId("versions-table"), table("Releases", ["Engine", "Measured", "Highest output tokens/s"], ordered.map((each) => [nameOf(each.record), each.record.when.slice(0, 10), peakText(each.rate)]), { file: "versions.csv", numeric: [2] }));
}

/* Rate against the latency that the asked share of requests keeps: what was measured (filled marks with their
   intervals), what is interpolated between (dashes, with a band), and where it crosses the goal. */

function showCurve(answers, colours) {
  const box = byId("curve");
  const shown = answers.filter((answer) => answer.ready.some((each) => each.rows));
  byId("curve-part").hidden = !shown.length;
  if (!shown.length) return put(box);
  const grid = gridFor(shown, state.first);
  const curves = shown.map((answer) => ({ answer, colour: colours.get(answer.record), ...curveOf(answer, questionNow(), grid) }));
  const others = shown.flatMap((answer) => beside(answer, colours.get(answer.record)));
  // What is beside the lines may lie beyond the top: it is drawn at the edge, its table row has the value.
  const rates = [...curves.flatMap(({ line }) => line.map((each) => each.rate)), ...others.map((each) => each.rate)];
  const alone = others.filter((each) => each.ready.point.kind === "single");
  const times = [...curves.flatMap(({ measured }) => measured.flatMap((each) => [each.value, each.low, each.high])), ...alone.map((each) => each.value), state.first];
  const chart = frame(box, {
    title: "Latency along the rates", about: `Requests a second against the first-token latency that ${share(state.quantile)} of requests keep.`,
    x: extent(rates, 1.3) ?? [0.1, 10], y: extent(times, 1.3) ?? [0.01, 10],
    xText: "requests a second →", yText: `first token of ${share(state.quantile)} ↑`, yUnit: seconds,
  });
  legend(byId("curve-legend"), shown.map((answer) => [seriesName(answer.record), colours.get(answer.record)]));
  const marks = [];
  drawGoal(chart);
  for (const curve of curves) marks.push(...drawCurve(chart, curve));
  for (const each of others) marks.push(drawBeside(chart, each));
  for (const curve of curves) drawCrossing(chart, curve);
  reachable(chart, marks);
  curveTable(curves, others);
}

/** Seconds on an axis: one unit, so that a step is a step. */
const seconds = (value) => `${number(value)} s`;

/** Points that carry no line: all at once, one at a time, a closed loop, and those whose client was short. */
function beside(answer, colour) {
  const question = questionNow();
  return answer.ready.filter((each) => !each.usable && each.rows && each.offered > 0).map((each) => {
    const need = Math.ceil(question.quantile * each.rows - 1e-9);
    return { ready: each, answer, colour, rate: each.rate || each.offered, value: need && need <= each.sorted.length ? each.sorted[need - 1] : need ? Infinity : each.sorted[0] };
  });
}

const clamped = (chart, value) => Math.min(Math.max(chart.y(Math.min(value, chart.y.domain[1])), chart.edge.top), chart.height - chart.edge.bottom);

function drawGoal(chart) {
  const y = clamped(chart, state.first);
  chart.plot.append(svg("line", { class: "goal", x1: chart.edge.left, x2: chart.width - chart.edge.right, y1: y, y2: y }),
    svg("text", { class: "goal-text", x: chart.edge.left + 6, y: y - 6, text: `goal: under ${time(state.first)}` }));
}

function drawCurve(chart, { answer, colour, line, measured }) {
  const at = (rate, value) => [chart.x(rate), clamped(chart, value)];
  if (line.length > 1) {
    const band = [...line.map((each) => at(each.rate, each.high)), ...[...line].reverse().map((each) => at(each.rate, each.low))];
    const drawn = line.filter((each, place) => Number.isFinite(each.value) || Number.isFinite(line[place - 1]?.value ?? Infinity));
    chart.plot.append(svg("path", { class: "band", "data-colour": colour, d: `${path(band)}Z` }),
      svg("path", { class: "between", "data-colour": colour, d: path(drawn.map((each) => at(each.rate, each.value))) }));
  }
  return measured.map((each) => {
    const [x, y] = at(each.rate, each.value);
    const node = svg("g", { class: "mark measured", "data-colour": colour, "data-point": `${answer.record.run}/${each.ready.point.name}` },
      svg("circle", { class: "hit", cx: x, cy: y, r: 12 }),
      svg("line", { class: "whisker", x1: x, x2: x, y1: clamped(chart, each.low), y2: clamped(chart, each.high) }),
      Number.isFinite(each.value) ? svg("circle", { class: "dot", cx: x, cy: y, r: 4.5 }) : svg("path", { class: "dot", d: `M${x - 5},${y + 9}L${x},${y}L${x + 5},${y + 9}Z` }));
    chart.plot.append(node);
    return { node, x, y, text: `${nameOf(answer.record)}, ${pointText(each.ready.point)}: ${latencyText(each)}; measured`, open: () => openPoint(answer.record, each.ready.point) };
  });
}

const latencyText = ({ value, low, high }) => `${time(value)}${low === undefined ? "" : ` (${time(low)} to ${time(high)})`}`;

function pointText(point) {
  if (point.kind === "open") return `${number(sustained(point).offered)} requests a second`;
  if (point.kind === "closed") return `closed loop, ${plural(point.concurrency ?? 0, "user")}`;
  return point.kind === "single" ? "one at a time" : "all at once";
}

const openPoint = (record, point) => change({ point: `${record.run}/${point.name}` });

function drawBeside(chart, { ready, answer, colour, rate, value }) {
  const [x, y] = [chart.x(rate), clamped(chart, value)];
  const { kind } = ready.point;
  const shape = ready.short ? svg("path", { class: "outline", d: `M${x - 4},${y - 4}L${x + 4},${y + 4}M${x + 4},${y - 4}L${x - 4},${y + 4}` })
    : kind === "saturation" ? svg("path", { class: "outline", d: `M${x},${y - 6}L${x + 6},${y + 5}L${x - 6},${y + 5}Z` })
    : svg("rect", { class: "outline", x: x - 4, y: y - 4, width: 8, height: 8 });
  const node = svg("g", { class: `mark aside ${ready.short ? "short" : kind}`, "data-colour": colour }, svg("circle", { class: "hit", cx: x, cy: y, r: 12 }), shape);
  chart.plot.append(node);
  return { node, x, y, text: `${nameOf(answer.record)}, ${pointText(ready.point)}: ${time(value)} at ${number(rate)} a second${ready.short ? "; the client may have been the limit, not ranked" : "; measured, for comparison"}`, open: () => openPoint(answer.record, ready.point) };
}

function drawCrossing(chart, { answer, colour }) {
  if (!answer.rate) return;
  const [value, low, high] = answer.rate;
  const y = clamped(chart, state.first);
  const x = chart.x(value);
  const place = (rate, otherwise) => (rate === null ? otherwise : chart.x(rate));
  const mark = !isOpen(answer)
    ? svg("path", { class: "crossing", d: `M${x},${y - 7}L${x + 7},${y}L${x},${y + 7}L${x - 7},${y}Z` })
    : svg("path", { class: "crossing", d: `M${x - 4},${y - 7}L${x + 6},${y}L${x - 4},${y + 7}` });
  chart.plot.append(svg("g", { class: "crossed", "data-colour": colour },
    low === null && high === null ? null : svg("line", { class: "crossing-range", x1: place(low, chart.edge.left), x2: place(high, chart.width - chart.edge.right), y1: y, y2: y }), mark));
}

function curveTable(curves, others) {
  const row = (record, each, how) => [
    el("button", { type: "button", class: "link", text: nameOf(record), onclick: () => openPoint(record, each.ready.point) }),
    pointText(each.ready.point), number(each.rate), time(each.value), each.low === undefined ? "–" : `${time(each.low)} to ${time(each.high)}`,
    share(shareAt(each.ready, state.first)[0]), thousands.format(each.ready.point.requests), how,
  ];
  const rows = [
    ...curves.flatMap(({ answer, measured }) => measured.map((each) => row(answer.record, each, "measured"))),
    ...others.map((each) => row(each.answer.record, each, each.ready.short ? "client short: not ranked" : "measured, for comparison")),
    ...curves.filter(({ answer }) => answer.state === "crossing").map(({ answer }) =>
      [nameOf(answer.record), "crossing of the goal", number(answer.rate[0]), time(state.first), answer.rate[1] === null && answer.rate[2] === null ? "–" : `rate ${answer.rate[1] === null ? "?" : number(answer.rate[1])} to ${answer.rate[2] === null ? "?" : number(answer.rate[2])}`, share(state.quantile), "–", answer.between ? "interpolated" : "measured"]),
  ];
  put(byId("curve-table"), table(`Points of the chart: the latency that ${share(state.quantile)} keep`,
    ["Engine", "Point", "Requests/s", "First token", "95 % interval", `Under ${time(state.first)}`, "Requests", "How known"], rows, { file: "rate-and-latency.csv", numeric: [2, 3, 4, 5, 6] }));
}

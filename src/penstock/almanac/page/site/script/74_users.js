/* What a user sees against what a GPU does (a machine without one counts whole): tokens a second for one user, and output
   tokens a second. Every point is a measured one. A solid line joins those that no other point of the record beats in
   both (Pareto's front); points that miss the question's goal are faint. */

function showUsers(answers, colours) {
  const box = byId("users");
  const series = answers.map((answer) => ({ answer, colour: colours.get(answer.record), points: usersOf(answer.record) })).filter(({ points }) => points.length);
  byId("users-part").hidden = !series.length;
  if (!series.length) return put(box);
  const all = series.flatMap(({ points }) => points);
  const chart = frame(box, {
    title: "Speed for one user along the rate", about: "Output tokens a second a GPU against tokens a second for one user.",
    x: extent(all.map((each) => each.x), 1.3), y: extent(all.flatMap((each) => [each.y, each.low, each.high]), 1.3),
    xText: `output tokens a second${series.some(({ answer }) => answer.record.machine.gpu) ? " a GPU" : ", all users"} →`, yText: "tokens a second for one user ↑",
  });
  legend(byId("users-legend"), series.map(({ answer, colour }) => [seriesName(answer.record), colour]));
  const marks = [];
  for (const { answer, colour, points } of series) {
    const line = frontOf(points.filter((each) => !each.point.client.short));
    chart.plot.append(svg("path", { class: "front", "data-colour": colour, d: path(line.map((each) => [chart.x(each.x), chart.y(each.y)])) }));
    for (const each of points) marks.push(userMark(chart, answer, colour, each));
  }
  reachable(chart, marks);
  usersTable(series);
}

function usersOf(record) {
  const found = [];
  for (const point of record.points) {
    const pace = told(record, point, point.figures.per_token?.[1]);
    const whole = told(record, point, point.figures.output_rate);
    const rate = whole?.map((each) => (each === null ? null : each / Math.max(record.machine.gpu?.count ?? 1, 1)));
    if (!pace || !rate || !(pace[0] > 0) || !(rate[0] > 0)) continue;
    const turned = (value) => (value ? 1 / value : null);
    found.push({ point, x: rate[0], rate, y: 1 / pace[0], low: turned(pace[2]), high: turned(pace[1]) });
  }
  return found.sort((a, b) => a.x - b.x);
}

/** Points that none beats in both, by rising rate: each is slower for a user than the one before it. */
function frontOf(points) {
  return points.filter((one) => !points.some((other) => other !== one && other.x >= one.x && other.y >= one.y && (other.x > one.x || other.y > one.y)));
}

/** Whether a point kept the question's goal; null: its shares are not known. */
function keepsGoal(answer, point) {
  const ready = answer.ready.find((each) => each.point === point);
  return ready && (ready.rows || ready.goals.length) ? shareAt(ready, state.first)[0] >= state.quantile : null;
}

function userMark(chart, answer, colour, each) {
  const { record } = answer;
  const [x, y] = [chart.x(each.x), chart.y(each.y)];
  const { kind, client } = each.point;
  const dot = client.short ? svg("path", { class: "outline", d: `M${x - 4},${y - 4}L${x + 4},${y + 4}M${x + 4},${y - 4}L${x - 4},${y + 4}` })
    : kind === "open" ? svg("circle", { class: "dot", cx: x, cy: y, r: 4 })
    : kind === "closed" ? svg("rect", { class: "outline", x: x - 4, y: y - 4, width: 8, height: 8 })
    : kind === "saturation" ? svg("path", { class: "outline", d: `M${x},${y - 6}L${x + 6},${y + 5}L${x - 6},${y + 5}Z` })
    : svg("circle", { class: "dot", cx: x, cy: y, r: 4 });
  const keeps = keepsGoal(answer, each.point);
  const node = svg("g", { class: `mark${keeps === false ? " missed" : ""}`, "data-colour": colour }, svg("circle", { class: "hit", cx: x, cy: y, r: 12 }),
    svg("line", { class: "whisker", x1: x, x2: x, y1: chart.y(each.low ?? each.y), y2: chart.y(each.high ?? each.y) }), dot);
  chart.plot.append(node);
  return { node, x, y, text: `${nameOf(record)}, ${pointText(each.point)}: ${number(each.y)} tokens a second for one user, ${number(each.x)} ${record.machine.gpu ? "a GPU" : "for all"}${keeps === null ? "" : keeps ? "; keeps the goal" : "; misses the goal"}; measured${client.short ? "; the client may have been the limit" : ""}`, open: () => openPoint(record, each.point) };
}

function usersTable(series) {
  const rows = series.flatMap(({ answer, points }) => points.map((each) => [
    el("button", { type: "button", class: "link", text: nameOf(answer.record), onclick: () => openPoint(answer.record, each.point) }),
    pointText(each.point), interval(each.rate), interval([each.y, each.low, each.high]), each.point.client.short ? "client short" : "measured",
  ]));
  put(byId("users-table"), table("Points of the chart: speed for one user and for all", ["Engine", "Point", "Output tokens/s a GPU", "Tokens/s, one user (median)", "How known"], rows, { file: "speed-for-users.csv", numeric: [2, 3] }));
}

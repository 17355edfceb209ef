/* Two records side by side: each figure, its ratio with an interval, and in words what that says. Knows answers. */

/** What is compared: [name, unit, whether more is better, record's [value, low, high] or null, its text if special]. */
const COMPARED = [
  ["Rate that keeps the goal", number, true, (answer) => answer.rate],
  ["Highest rate, requests/s", number, true, (answer) => highest(answer.record, "request_rate"), peakText],
  ["Highest output rate, tokens/s", number, true, (answer) => highest(answer.record, "output_rate"), peakText],
  ["Joules an output token, fewest", number, false, (answer) => fewestJoules(answer.record)],
  ["First token alone, median", time, false, (answer) => alone(answer.record, "first_token")],
  ["A token alone, median", time, false, (answer) => alone(answer.record, "per_token")],
  ["Whole answer alone, median", time, false, (answer) => alone(answer.record, "end_to_end")],
];

function alone(record, name) {
  const point = record.points.find((each) => each.kind === "single" && !each.client.short);
  return point ? told(record, point, point.figures[name]?.[1] ?? null) : null;
}

function showCompare(answers) {
  const part = byId("compare-part");
  part.hidden = answers.length < 2;
  if (part.hidden) return;
  const named = answers.map((answer) => [answer.record.run, nameOf(answer.record)]);
  const pick = (run, otherwise) => answers.find((answer) => answer.record.run === run) ?? otherwise;
  const left = pick(state.left, answers[0]);
  const right = pick(state.right, answers.find((answer) => answer !== left));
  choices(byId("compare-left"), named, left.record.run);
  choices(byId("compare-right"), named, right.record.run);
  const [one, two] = [nameOf(left.record), nameOf(right.record)];
  const rows = COMPARED.map(([name, unit, more, of, told = (three) => interval(three, unit)]) => {
    const [a, b] = [of(left), of(right)];
    const ratio = ratioOf(a, b);
    return [name, stacked(a, unit, told(a)), stacked(b, unit, told(b)), ratio ? stacked(ratio) : "–", saidOf(ratio, more, one, two)];
  });
  put(byId("compare-said"), comparedWords(left, right, one, two));
  put(byId("compare-table"), table(`${one} against ${two}`, ["", one, two, "Ratio (95 % interval)", "So"], rows, { file: "compared.csv", numeric: [1, 2, 3] }));
}

function saidOf(ratio, more, one, two) {
  const said = verdict(ratio);
  if (said === "same") return "no significant difference";
  if (said === "unknown") return "cannot be said";
  return `${(said === "more") === more ? one : two} is better`;
}

function comparedWords(left, right, one, two) {
  if (left === right) return "These are the same record.";
  const wrong = [left, right].filter((answer) => isWrong(answer.record));
  if (wrong.length) return `${listed(wrong.map((answer) => nameOf(answer.record)))} ${wrong.length === 1 ? "answers" : "answer"} wrongly: how fast says nothing.`;
  if (!left.rate || !right.rate) return `${noRate(left.rate ? right : left)}, so there is no ratio of those.`;
  const ratio = ratioOf(left.rate, right.rate);
  const said = verdict(ratio);
  const lacks = lacksOf(left.record, right.record);
  if (said === "same") return `No significant difference in the rate that keeps ${goalText()}: ratio ${interval(ratio)}${lacks}.`;
  if (said === "unknown") return `One of the two has no interval on the side that matters, so nothing can be said of the ratio ${number(ratio[0])}${lacks}.`;
  return `Keeping ${goalText()}, ${one} takes ${interval(ratio)} times the rate of ${two}${lacks}.`;
}

function listenToCompare() {
  byId("compare-left").addEventListener("change", (event) => change({ left: event.target.value }));
  byId("compare-right").addEventListener("change", (event) => change({ right: event.target.value }));
}

/* --- failures of the same subject */

function showFailures(records) {
  const failed = records.flatMap((record) => record.failures.map((failure) => ({ record, failure })));
  byId("failures-part").hidden = !failed.length;
  put(byId("failures"), failed.map(({ record, failure }) => el("li", {},
    el("p", {}, el("strong", { text: `${nameOf(record)}: ${failure.kind}` }), ` ${failure.point ? `at ${failure.point}` : "before any point"}. ${failure.message}`),
    el("details", {}, el("summary", { text: "The log's tail" }), el("pre", { tabindex: "0", text: failure.log || "(empty)" })),
    el("button", { type: "button", class: "small", text: "How it was run", onclick: () => change({ point: `${record.run}/${failure.point ?? ""}` }) }))));
}

/* Sentences that are computed from the index: how rates move when one thing changes. Each has the table that it came
   from. Every number in them was measured; nothing is interpolated. Knows heads, no group. */

/** [value, low, high] of the middle of many ratios: their median, with the order statistics of the binomial 95 %. */
function middleOf(ratios) {
  const sorted = ratios.map((each) => each[0]).sort((a, b) => a - b);
  const count = sorted.length;
  if (count === 1) return ratios[0];
  let cut = -1; // the k-th smallest and largest bracket the median with P = 1 - 2 P(Bin(n, 1/2) < k)
  for (let k = 0, below = 0, term = 0.5 ** count; k < count / 2; term *= (count - k) / (k + 1), k++) {
    below += term;
    if (2 * below > 1 - LEVEL) break;
    cut = k;
  }
  return [median(sorted), cut < 0 ? null : sorted[cut], cut < 0 ? null : sorted[count - 1 - cut]];
}

const sameBut = (head, ...leave) => JSON.stringify(["engine", "version", "configuration", "model", "machine", "kind", "input", "output", "n"]
  .filter((name) => !leave.includes(name)).map((name) => head[name]));

/** Heads by a key; the newest of each `whole` key alone, so that a run measured again counts once. */
function gathered(heads, key) {
  const newestOf = new Map();
  for (const head of heads) {
    const whole = sameBut(head, "version");
    if (!newestOf.has(whole) || newestOf.get(whole).when < head.when) newestOf.set(whole, head);
  }
  const found = new Map();
  for (const head of newestOf.values()) found.set(key(head), [...(found.get(key(head)) ?? []), head]);
  return found;
}

/** All findings: {title, text, heads, rows}. */
function findings(heads) {
  const measured = heads.filter((head) => head.peak && !head.wrong);
  return [releases(measured), tokensMoved(measured), whoLeads(measured), goalsCost(measured), tuningPays(measured), samplesShare(measured), whatFails(heads), whoAnswersWrongly(heads), whoWasShort(heads)].filter(Boolean);
}

/** What each release gained or lost over the one measured before it, with the same configuration's name. */
function releases(heads) {
  const rows = [];
  const of = new Map();
  for (const head of heads) of.set(sameBut(head, "version"), [...(of.get(sameBut(head, "version")) ?? []), head]);
  for (const group of of.values()) {
    const newestOf = new Map([...group].sort((a, b) => (a.when < b.when ? -1 : 1)).map((head) => [head.version, head]));
    const ordered = [...newestOf.values()];
    ordered.slice(1).forEach((head, at) => {
      const ratio = ratioOfKnown(head.tokens, ordered[at].tokens);
      if (ratio) rows.push([headName(head), headName(ordered[at]), head.model, head.machine, workName(head), interval(head.tokens), interval(ordered[at].tokens), interval(ratio)]);
    });
  }
  if (!rows.length) return null;
  return { title: "What a release changed", text: `${plural(rows.length, "pair")} of releases ${rows.length === 1 ? "was" : "were"} measured at the same model, machine and lengths.`,
    caption: "A release against the one before", heads: ["Release", "Before", "Model", "Machine", "Lengths", "Output tokens/s", "Before", "Ratio"], rows };
}

function whoAnswersWrongly(heads) {
  const wrong = heads.filter((head) => head.wrong);
  if (!wrong.length) return null;
  return { title: "Who answers wrongly", text: `${plural(wrong.length, "run")} ${wrong.length === 1 ? "is" : "are"} of engines whose logprobs are far from those of transformers in float32. They are ranked last, and in no other finding.`,
    caption: "Runs of engines that answer wrongly", heads: ["Engine", "Model", "Machine", "Lengths"], rows: wrong.map((head) => [subjectLink(head), head.model, head.machine, workName(head)]) };
}

/** The ratio of two highest rates, null where one of them is only a lower bound. */
const ratioOfKnown = (a, b) => (isLeast(a) || isLeast(b) ? null : ratioOf(a, b));

/** Requests a second when tokens move from the output to the input. */
function tokensMoved(heads) {
  const rows = [];
  const ratios = new Map();
  for (const group of gathered(heads.filter((head) => head.kind === "exact"), (head) => sameBut(head, "input", "output", "version")).values()) {
    for (const reads of group) {
      const writes = group.find((head) => head.input === reads.output && head.output === reads.input);
      if (!writes || reads.input <= reads.output) continue;
      const ratio = ratioOfKnown(reads.peak, writes.peak);
      if (!ratio) continue;
      const pair = `${thousands.format(reads.input)} in and ${thousands.format(reads.output)} out`;
      ratios.set(pair, [...(ratios.get(pair) ?? []), ratio]);
      rows.push([headName(reads), reads.model, reads.machine, pair, interval(reads.peak), interval(writes.peak), interval(ratio)]);
    }
  }
  if (!rows.length) return null;
  const parts = [...ratios].map(([pair, all]) => `${interval(middleOf(all))} times as many requests a second at ${pair} as the other way round (${all.length === 1 ? "one pair" : `the middle of ${all.length} pairs`})`);
  return { title: "When tokens move from the output to the input", text: `With the same tokens in all, engines answer ${listed(parts)}.`,
    caption: "Highest rates with lengths exchanged", heads: ["Engine", "Model", "Machine", "Lengths", "Requests/s", "Exchanged", "Ratio"], rows };
}

const headName = (head) => `${head.engine} ${head.version}${head.configuration === "default" ? "" : ` · ${head.configuration}`}${head.yours ? " · yours" : ""}`;

/** The share of requests that a kept rate is told for where runs stand beside each other: one that was measured for
    another share keeps its goals at another rate. */
const KEPT_SHARE = 0.95;

/** How often each engine has the highest rate, and how often none has it significantly: each of the others must be surely
    slower, which one that was cut off before its end never is. */
function whoLeads(heads) {
  const machines = new Map(); // machine -> {gpus, of: comparisons, leads: engine -> how many}
  const rows = [];
  for (const group of gathered(heads, (head) => sameBut(head, "engine", "version", "configuration")).values()) {
    const engines = new Map();
    for (const head of group) if (!engines.has(head.engine) || surest(head.peak, engines.get(head.engine).peak) < 0) engines.set(head.engine, head);
    if (engines.size < 2) continue;
    const [first, ...others] = [...engines.values()].sort((a, b) => surest(a.peak, b.peak));
    const rival = others.find((head) => verdict(ratioOf(first.peak, head.peak)) !== "more");
    const here = machines.get(first.machine) ?? { gpus: first.gpus, of: 0, leads: new Map() };
    machines.set(first.machine, { ...here, of: here.of + 1 });
    if (!rival) here.leads.set(first.engine, (here.leads.get(first.engine) ?? 0) + 1);
    const ratio = ratioOf(first.peak, (rival ?? others[0]).peak);
    rows.push([first.model, first.machine, workName(first), headName(first), headName(rival ?? others[0]), interval(ratio),
      !rival ? "ahead of all" : verdict(ratio) === "same" ? "no significant difference" : "cannot be said"]);
  }
  if (!rows.length) return null;
  const said = [...machines].sort((a, b) => b[1].gpus - a[1].gpus).map(([machine, { of, leads }]) => {
    const ahead = [...leads].sort((a, b) => b[1] - a[1]).map(([engine, count]) => `${engine} in ${count}`);
    const same = of - [...leads.values()].reduce((sum, count) => sum + count, 0);
    return `On ${machine}, in ${plural(of, "comparison")}, ${listed([...ahead, same ? `in ${same} no significant leader` : null].filter(Boolean))}.`;
  });
  return { title: "Who reaches the highest rate", text: `By a significant difference, with the same model and lengths. ${said.join(" ")}`,
    caption: "The fastest, and the next or the first that may be as fast", heads: ["Model", "Machine", "Lengths", "Fastest", "Against", "Ratio", "So"], rows };
}

const workName = (head) => (head.kind === "exact" ? `${number(head.input)} in, ${number(head.output)} out` : `${head.shapeName}: ${number(head.input)} in, ${number(head.output)} out, n = ${head.n}`);

/** What share of the highest rate is left when a first-token goal is kept for 95 % of requests; of runs that know their
    highest, and a rate that misses it: else the part would be that of the rates that were tried. */
function goalsCost(heads) {
  const parts = new Map();
  const rows = [];
  for (const head of heads.filter((each) => each.quantile === KEPT_SHARE)) {
    for (const [seconds, rate, missed] of head.kept ?? []) {
      if (!(rate > 0) || !missed || isLeast(head.peak)) continue;
      const part = rate / head.peak[0]; // chance may put it above
      parts.set(seconds, [...(parts.get(seconds) ?? []), Math.min(part, 1)]);
      rows.push([headName(head), head.model, head.machine, workName(head), time(seconds), number(rate), interval(head.peak), part > 1 ? "all, as far as was measured" : share(part)]);
    }
  }
  if (!rows.length) return null;
  const said = [...parts].sort((a, b) => a[0] - b[0]).map(([seconds, all]) => `${share(Number(median(all).toFixed(2)))} under ${time(seconds)} (${plural(all.length, "run")})`);
  return { title: "What a goal leaves of the rate", text: `Of the highest rate, the fastest measured rate that still kept the first-token goal for ${share(KEPT_SHARE)} of requests was, in the middle, ${listed(said)}.`,
    caption: `Rates that kept a goal for ${share(KEPT_SHARE)} of requests`, heads: ["Engine", "Model", "Machine", "Lengths", "Goal", "Fastest measured that kept it", "Highest", "Part"], rows };
}

/** What a tuned configuration gains over the default one. */
function tuningPays(heads) {
  const rows = [];
  const ratios = [];
  for (const group of gathered(heads, (head) => sameBut(head, "configuration", "version")).values()) {
    const usual = group.find((head) => head.configuration === "default");
    for (const tuned of group) {
      const ratio = usual && tuned !== usual ? ratioOfKnown(tuned.peak, usual.peak) : null;
      if (!ratio) continue;
      ratios.push(ratio);
      rows.push([headName(tuned), tuned.model, tuned.machine, workName(tuned), interval(tuned.peak), interval(usual.peak), interval(ratio)]);
    }
  }
  if (!rows.length) return null;
  return { title: "What tuning gains", text: `A configuration that is not the default has ${interval(middleOf(ratios))} times the default's highest rate (${ratios.length === 1 ? "one pair" : `the middle of ${ratios.length} pairs`}).`,
    caption: "Tuned against default", heads: ["Engine", "Model", "Machine", "Lengths", "Requests/s", "Default", "Ratio"], rows };
}

/** Output tokens when many samples share a prompt. */
function samplesShare(heads) {
  const rows = [];
  const ratios = [];
  for (const group of gathered(heads.filter((head) => head.tokens), (head) => sameBut(head, "kind", "input", "output", "n", "version")).values()) {
    const shared = group.find((head) => head.kind === "monkeys");
    const usual = group.filter((head) => head.kind === "exact").sort((a, b) => distanceOf(a, shared) - distanceOf(b, shared))[0];
    const ratio = shared && usual ? ratioOfKnown(shared.tokens, usual.tokens) : null;
    if (!ratio) continue;
    ratios.push(ratio);
    rows.push([headName(shared), shared.model, shared.machine, workName(shared), workName(usual), interval(shared.tokens), interval(usual.tokens), interval(ratio)]);
  }
  if (!rows.length) return null;
  return { title: "Many samples of one prompt", text: `With samples that share their prompt, engines write ${interval(middleOf(ratios))} times the output tokens a second of the exact shape nearest in length (${ratios.length === 1 ? "one pair" : `the middle of ${ratios.length} pairs`}).`,
    caption: "Shared prompts against single ones", heads: ["Engine", "Model", "Machine", "Shared", "Single", "Tokens/s shared", "Tokens/s single", "Ratio"], rows };
}

const distanceOf = (a, b) => (b ? Math.abs(Math.log(a.input / b.input)) + Math.abs(Math.log(a.output / b.output)) : 0);

function whatFails(heads) {
  const failed = heads.filter((head) => head.failures);
  if (!failed.length) return null;
  const engines = unique(failed.map((head) => head.engine)).map((engine) => `${engine} in ${failed.filter((head) => head.engine === engine).length} of ${heads.filter((head) => head.engine === engine).length}`);
  return { title: "What failed", text: `${plural(failed.length, "run")} of ${thousands.format(heads.length)} had a failure: ${listed(engines)}. They are records too.`,
    caption: "Runs with failures", heads: ["Engine", "Model", "Machine", "Lengths", "Failures", "Points measured"], rows: failed.map((head) => [subjectLink(head), head.model, head.machine, workName(head), head.failures, head.points]) };
}

function whoWasShort(heads) {
  const short = heads.filter((head) => head.short);
  if (!short.length) return null;
  const points = short.reduce((sum, head) => sum + head.short, 0);
  return { title: "Where the client was the limit", text: `At ${plural(points, "point")} of ${plural(short.length, "run")} the measuring client may have been the limit. They are shown, marked, and never ranked.`,
    caption: "Runs with such points", heads: ["Engine", "Model", "Machine", "Lengths", "Points"], rows: short.map((head) => [subjectLink(head), head.model, head.machine, workName(head), head.short]) };
}

const subjectLink = (head) => el("a", { href: addressOf({ ...fresh(), ...subjectOf(head) }), text: headName(head) });

function showFindings() {
  const box = byId("findings-body");
  const all = findings(allHeads());
  put(box, all.length ? all.map((each) => el("section", { class: "finding" },
    el("h2", { text: each.title }), el("p", { class: "told", text: each.text }),
    lazyDetails(`The ${plural(each.rows.length, "row")} that it came from`, () => table(each.caption, each.heads, each.rows.slice(0, 500), { file: "finding.csv", numeric: [] })))) : el("p", { text: "There are too few records for a finding yet." }));
}

/** Details whose content is made when they are opened. */
function lazyDetails(summary, make) {
  const details = el("details", {}, el("summary", { text: summary }));
  details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(make()); });
  return details;
}

/* The executive summary: what the almanac holds, its first findings, and for each subject the fastest engine. Knows heads. */

const SUMMARY_ROWS = 200;

function showSummary() {
  const { heads } = data;
  const all = allHeads(); // the reader's own are shown, and are none of the almanac's
  const measured = all.filter((head) => head.peak);
  const count = (name) => unique(heads.map((head) => head[name])).length;
  const newestWhen = heads.reduce((latest, head) => (head.when > latest ? head.when : latest), "");
  const brief = heads.filter((head) => head.brief === 1).length;
  const editions = heads.filter((head) => head.brief === 2).length;
  put(byId("summary-body"),
    el("p", { class: "told", text: heads.length
      ? `The almanac holds ${plural(heads.length, "run")} of ${plural(count("engine"), "engine")}, ${plural(count("model"), "model")} and ${plural(count("machine"), "machine")}, ${thousands.format(heads.reduce((sum, head) => sum + head.points, 0))} measured points in all; the newest is of ${newestWhen.slice(0, 10)}.${brief ? ` ${plural(brief, "run")} had short windows and ${brief === 1 ? "is a hint" : "are hints"}.` : ""}${editions ? ` ${plural(editions, "run")} ${editions === 1 ? "is" : "are"} by the edition's method, with intervals that hold another machine of the kind.` : ""}`
      : "The almanac holds no run yet." }),
    data.yours.length ? el("p", { class: "aside", text: `${plural(data.yours.length, "run")} of yours ${data.yours.length === 1 ? "stands" : "stand"} among them below, marked as yours.` }) : null,
    machineSentences(all),
    el("p", {}, el("a", { href: addressOf({ ...fresh(), view: "findings" }), text: "All findings, with their tables" })),
    leadersTable(measured));
}

/** A sentence a machine, GPUs before CPUs: of the works that two engines or more did there, who writes the most tokens, by
    how much, and who loses. */
function machineSentences(heads) {
  const measured = heads.filter((head) => head.tokens && !head.wrong);
  const machines = gathered(measured, (head) => head.machine);
  const ordered = [...machines.values()].sort((a, b) => b[0].gpus - a[0].gpus || (a[0].machine < b[0].machine ? -1 : 1));
  return ordered.map((of) => el("p", { class: "machine" }, el("strong", { text: `${of[0].machine}. ` }), machineSentence(of)));
}

function machineSentence(heads) {
  const wins = new Map();
  const alike = [];
  for (const group of gathered(heads, (head) => sameBut(head, "engine", "version", "configuration")).values()) {
    const best = new Map();
    for (const head of group) if (!best.has(head.engine) || surest(head.tokens, best.get(head.engine).tokens) < 0) best.set(head.engine, head);
    const [first, second] = [...best.values()].sort((a, b) => surest(a.tokens, b.tokens));
    if (!second) continue;
    const ratio = ratioOf(first.tokens, second.tokens);
    if (verdict(ratio) !== "more") { alike.push(first); continue; }
    const key = JSON.stringify([first.engine, second.engine]);
    wins.set(key, [...(wins.get(key) ?? []), { ratio: ratio[0], first }]);
  }
  const count = alike.length + [...wins.values()].reduce((sum, each) => sum + each.length, 0);
  const models = listed(unique(heads.map((head) => head.model)));
  if (!count) return `${models}: one engine alone was measured at each length, so there is nothing to compare.`;
  const parts = [...wins].sort((a, b) => b[1].length - a[1].length).map(([key, each]) => {
    const [first, second] = JSON.parse(key);
    const ratios = each.map(({ ratio }) => ratio).sort((a, b) => a - b);
    const range = ratios.length === 1 ? number(ratios[0]) : `${number(ratios[0])} to ${number(ratios[ratios.length - 1])}`;
    return `${first} is ahead of ${second} in ${each.length}, by ${range} times`;
  });
  const lacking = unique(heads.filter((head) => head.lacks).map((head) => `${head.engine} ${head.version} ran without ${head.lacks}`));
  if (alike.length) parts.push(`in ${alike.length} no significant leader`);
  return `${models}: of ${plural(count, "comparison")} of output tokens a second, ${listed(parts)}.${lacking.length ? ` ${listed(lacking)}.` : ""}`;
}

/** For each subject the engine with the highest rate, its cost, and the rate that keeps a second for 95 % of requests. */
function leadersTable(heads) {
  const rows = [];
  const gpusOf = new Map(heads.map((head) => [head.machine, head.gpus]));
  const about = (head) => sameBut(head, "engine", "version", "configuration");
  const keeping = gathered(heads.filter((head) => head.quantile === KEPT_SHARE && !head.wrong), about);
  for (const [subject, group] of gathered(heads.filter((head) => !head.wrong), about)) {
    const first = group.reduce((top, head) => (surest(head.peak, top.peak) < 0 ? head : top));
    const kept = (keeping.get(subject) ?? []).filter((head) => keptUnder(head, 1) > 0).sort((a, b) => keptUnder(b, 1) - keptUnder(a, 1))[0];
    const price = state.price ?? first.price;
    rows.push([
      el("a", { href: addressOf({ ...fresh(), ...subjectOf(first), price: state.price }), text: workName(first) }), first.model, first.machine, String(unique(group.map((head) => head.engine)).length),
      headName(first), peakText(first.peak),
      first.joules ? number(first.joules[0]) : "–",
      price === null || !first.tokens ? "–" : `${isLeast(first.tokens) ? "≤ " : ""}${money((price / 3600 / first.tokens[0]) * 1e6)}`,
      kept ? `${headName(kept)}: ${number(keptUnder(kept, 1))}` : "–",
    ]);
  }
  rows.sort((a, b) => gpusOf.get(b[2]) - gpusOf.get(a[2]) || (a[1] + a[2] < b[1] + b[2] ? -1 : 1));
  if (!rows.length) return null;
  return [el("h2", { text: "The fastest, subject by subject" }),
    rows.length > SUMMARY_ROWS ? el("p", { class: "aside", text: `The first ${SUMMARY_ROWS} of ${rows.length}; the data page has all.` }) : null,
    table("Highest measured rate of each model, machine and shape", ["Lengths", "Model", "Machine", "Engines", "Fastest", "Highest requests/s", "J/token out", "$/M tokens out at its highest", `Fastest measured with 1 s kept for ${share(KEPT_SHARE)}`], rows.slice(0, SUMMARY_ROWS), { file: "fastest.csv", numeric: [3, 5, 6, 7] })];
}

/** The highest measured rate that kept first tokens under so many seconds; 0 or -1 where there is none. */
function keptUnder(head, seconds) {
  return (head.kept ?? []).find((each) => each[0] === seconds)?.[1] ?? -1;
}

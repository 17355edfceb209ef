/* The executive summary: what the almanac holds, its first findings, and for each subject the fastest engine. Knows heads. */

const SUMMARY_ROWS = 200;

function showSummary() {
  const { heads } = data;
  const all = allHeads(); // the reader's own are shown, and are none of the almanac's
  const measured = all.filter((head) => head.peak);
  const count = (name) => unique(heads.map((head) => head[name])).length;
  const newestWhen = heads.reduce((latest, head) => (head.when > latest ? head.when : latest), "");
  const brief = heads.filter((head) => head.brief).length;
  put(byId("summary-body"),
    el("p", { class: "told", text: heads.length
      ? `The almanac holds ${plural(heads.length, "run")} of ${plural(count("engine"), "engine")}, ${plural(count("model"), "model")} and ${plural(count("machine"), "machine")}, ${thousands.format(heads.reduce((sum, head) => sum + head.points, 0))} measured points in all; the newest is of ${newestWhen.slice(0, 10)}.${brief ? ` ${plural(brief, "run")} had short windows and ${brief === 1 ? "is a hint" : "are hints"}.` : ""}`
      : "The almanac holds no run yet." }),
    data.yours.length ? el("p", { class: "aside", text: `${plural(data.yours.length, "run")} of yours ${data.yours.length === 1 ? "stands" : "stand"} among them below, marked as yours.` }) : null,
    findings(all).slice(0, 4).map((each) => el("p", {}, el("strong", { text: `${each.title}. ` }), each.text)),
    el("p", {}, el("a", { href: addressOf({ ...fresh(), view: "findings" }), text: "All findings, with their tables" })),
    leadersTable(measured));
}

/** For each subject the engine with the highest rate, its cost, and the rate that keeps a second for 95 % of requests. */
function leadersTable(heads) {
  const rows = [];
  const about = (head) => sameBut(head, "engine", "version", "configuration");
  const keeping = gathered(heads.filter((head) => head.quantile === KEPT_SHARE), about);
  for (const [subject, group] of gathered(heads, about)) {
    const first = group.reduce((top, head) => (surest(head.peak, top.peak) < 0 ? head : top));
    const kept = (keeping.get(subject) ?? []).filter((head) => keptUnder(head, 1) > 0).sort((a, b) => keptUnder(b, 1) - keptUnder(a, 1))[0];
    const price = state.price ?? first.price;
    rows.push([
      el("a", { href: addressOf({ ...fresh(), ...subjectOf(first), price: state.price }), text: workName(first) }), first.model, first.machine, String(unique(group.map((head) => head.engine)).length),
      headName(first), peakText(first.peak),
      price === null || !first.tokens ? "–" : `${isLeast(first.tokens) ? "≤ " : ""}${money((price / 3600 / first.tokens[0]) * 1e6)}`,
      kept ? `${headName(kept)}: ${number(keptUnder(kept, 1))}` : "–",
    ]);
  }
  rows.sort((a, b) => (a[1] + a[2] < b[1] + b[2] ? -1 : 1));
  if (!rows.length) return null;
  return [el("h2", { text: "The fastest, subject by subject" }),
    rows.length > SUMMARY_ROWS ? el("p", { class: "aside", text: `The first ${SUMMARY_ROWS} of ${rows.length}; the data page has all.` }) : null,
    table("Highest measured rate of each model, machine and shape", ["Lengths", "Model", "Machine", "Engines", "Fastest", "Highest requests/s", "$/M tokens out at its highest", `Fastest measured with 1 s kept for ${share(KEPT_SHARE)}`], rows.slice(0, SUMMARY_ROWS), { file: "fastest.csv", numeric: [3, 5, 6] })];
}

/** The highest measured rate that kept first tokens under so many seconds; 0 or -1 where there is none. */
function keptUnder(head, seconds) {
  return (head.kept ?? []).find((each) => each[0] === seconds)?.[1] ?? -1;
}

/* The answer in words, and the ranking under it. Reads answers; changes the state only where somebody chooses. */

const COLOURS = 8; // --c0 to --c7 in the style

/** A name for a record: engine, version, configuration; its date where older ones stand beside it. */
function nameOf(record) {
  const { engine } = record;
  const tuned = engine.configuration.name === "default" ? "" : ` · ${engine.configuration.name}`;
  return `${engine.name} ${engine.version}${tuned}${record.yours ? " · yours" : ""}${state.older ? ` · ${record.when.slice(0, 10)}` : ""}`;
}

/** What an engine's installation lacks, beside each of its ratios; null: nothing that is known. */
const lackText = ({ engine }) => (engine.lacks?.length ? `without ${listed(engine.lacks)}` : null);
const lacksOf = (...records) => records.filter(lackText).map((record) => ` (${nameOf(record)} ${lackText(record)})`).join("");

/** The same in a legend. */
const seriesName = (record) => `${nameOf(record)}${isWrong(record) ? " (answers wrongly)" : ""}`;

const priceOf = (record) => state.price ?? record.method.price_per_hour ?? null;

/** A price with who said it and when. */
const priceText = (record) => (state.price !== null ? `your ${money(state.price)} an hour` : `the ${money(record.method.price_per_hour)} an hour stated on ${record.when.slice(0, 10)}`);

/** A colour's number for each record, the same whatever their order: by name. */
function coloursOf(answers) {
  const names = [...answers].sort((a, b) => (nameOf(a.record) < nameOf(b.record) ? -1 : 1));
  return new Map(names.map((answer, at) => [answer.record, at % COLOURS]));
}

function goalText() {
  const also = [
    state.perToken === null ? null : `a token every ${time(state.perToken)}`,
    state.endToEnd === null ? null : `all of the answer in ${time(state.endToEnd)}`,
  ].filter(Boolean);
  return `${share(state.quantile)} of ${also.length ? `requests with the first token under ${time(state.first)}, ${listed(also)}` : `first tokens under ${time(state.first)}`}`;
}

/** One sentence for the best answer, what is known of it, and then how it stands to the next: in this order, so that
    nobody takes what is said of the one for the other's. */
function showAnswer(answers) {
  const box = byId("answer");
  if (!answers.length) return put(box, notMeasured(shown.like));
  const right = answers.filter((answer) => !isWrong(answer.record));
  if (!right.length) return put(box, el("p", { class: "told" }, el("strong", { text: "None that answers rightly." }), ` ${unique(answers.map((answer) => `${nameOf(answer.record)}: ${answersText(answer.record)}`)).join("; ")}.`));
  const [best, second] = right;
  if (best.state !== "crossing" && best.state !== "beyond") return put(box, noneKept(right));
  const [value, low, high] = best.rate;
  const cost = costAt(priceOf(best.record), value, best);
  const strong = (text) => el("strong", { text });
  const range = low === null && high === null ? "no interval can be given"
    : best.state === "beyond" && high === null ? `95 % interval from ${low === null ? "below the slowest measured rate" : number(low)} up`
    : `95 % interval ${low === null ? "below the slowest measured rate" : number(low)} to ${high === null ? "above the fastest measured" : number(high)}`;
  const whole = best.record.points.find((point) => point.kind === "saturation" && !point.client.short);
  const atOnce = whole && told(best.record, whole, whole.figures.request_rate);
  const reached = atOnce ? ` All at once, with nobody waiting, it reached ${peakText(atOnce)}${best.capped ? ", and no more than that is claimed" : ""}.` : "";
  const how = best.state === "beyond" ? `${beyondText(best)}${reached}`
    : !best.between ? `At ${number(best.after.offered)} requests a second, the slowest that misses the goal, it completed ${number(completed(best.after.point)?.[0] ?? 0)} and kept the goal for ${share(best.after.shares[0])}.${best.capped ? reached : ""}`
    : `Interpolated between two measured points, ${number(best.before.rate)} (${share(best.before.shares[0])}) and ${number(best.after.rate)} requests a second (${share(best.after.shares[0])}).`;
  const rate = strong(`${number(value)} requests a second`);
  put(box,
    el("p", { class: "told" },
      isOpen(best) ? [`${nameOf(best.record)} keeps ${goalText()} up to `, rate, `, ${topText(best)} (${range})`]
        : [`${nameOf(best.record)} takes `, rate, ` (${range}) and keeps ${goalText()}`],
      cost ? [", for ", strong(`${money(cost.requests)} a thousand requests`), ` or ${money(cost.tokens)} a million output tokens, at ${priceText(best.record)}.`] : "; give a price an hour for its cost."),
    el("p", { class: "aside", text: how }),
    el("p", { class: "aside", text: standing(best, second) }),
    best.record.method.edition ? el("p", { class: "aside", text: EDITION_TEXT }) : best.record.method.short ? el("p", { class: "aside warn", text: SHORT_TEXT }) : null);
}

/** Whether a rate is only known to be no less: no point misses the goal, and all at once gave more than the rate. */
const isOpen = (answer) => answer.state === "beyond" && !answer.capped;

/** What the rate of an open answer is. Not "at least": its interval's low end may lie below it. */
function topText(answer) {
  const fastest = answer.line[answer.line.length - 1];
  if (fastest.rate < fastest.offered) return "the most that it was seen to serve with the goal kept";
  return shortAbove(answer) ? "the fastest that can be ranked" : "the fastest that was offered";
}

/** Why a rate is only known to be kept: no faster one was measured, or none that says something of the engine. With what
    was completed, where that was less than was offered. */
function beyondText(answer) {
  const [value] = answer.rate;
  const fastest = answer.line[answer.line.length - 1];
  const done = completed(fastest.point);
  if (fastest.rate < fastest.offered) return `Offered more, up to ${number(fastest.offered)} a second, it still kept the goal ${done[0] < fastest.offered ? "but" : "and"} completed ${number(done[0])}.`;
  const less = done[0] < fastest.offered ? `; of ${number(fastest.offered)} offered it completed ${interval(done)}` : "";
  return shortAbove(answer) ? `${number(value)} is the fastest rate that can be ranked, and it still kept the goal${less}; where more was offered, the client may have been the limit.`
    : `It still kept the goal there, and no faster rate was measured${less}.`;
}

/** Whether more was offered at a point whose client was short: measured, but nothing can be said of the engine there. */
const shortAbove = ({ ready, line }) => ready.some((each) => each.short && each.point.kind === "open" && each.offered > line[line.length - 1].offered);

function standing(best, second) {
  if (!second) return "Nothing else was measured here.";
  if (!second.rate) return `${noRate(second)}.`;
  const ratio = ratioOf(best.rate, second.rate);
  const name = nameOf(second.record);
  const lacks = lacksOf(best.record, second.record);
  const words = { more: `${nameOf(best.record)} takes ${interval(ratio)} times the rate of ${name}, the next${lacks}.`, same: `No significant difference from ${name}, the next: ratio ${interval(ratio)}${lacks}.` };
  return words[verdict(ratio)] ?? `${name} follows with ${number(second.rate[0])}; no interval can be given for the ratio.`;
}

/** Why an answer has no rate: it missed the goal, or nobody measured it. */
const noRate = (answer) => (hasMissed(answer) ? `${nameOf(answer.record)} has no measured rate that keeps ${goalText()}` : `${nameOf(answer.record)} cannot be ranked (${stateText(answer)})`);

const hasMissed = ({ state: found }) => found === "never" || found === "unsure";

/** The sentence where records are there and none kept the goal. */
function noneKept(answers) {
  const missed = answers.filter(hasMissed);
  if (!missed.length) {
    const other = answers.find((answer) => answer.state !== "failed");
    return [
      el("p", { class: "told" }, el("strong", { text: "Not measured:" }), ` no record here has a point that can answer this. ${unique(answers.map((answer) => `${nameOf(answer.record)}: ${stateText(answer)}`)).join("; ")}.`),
      other ? commandPart(other.record, "To measure it, run this:") : commandPart(answers[0].record, triedText(answers[0].record)),
    ];
  }
  const best = missed.reduce((a, b) => (b.before.shares[0] > a.before.shares[0] ? b : a));
  const [value, low, high] = best.before.shares;
  return [el("p", { class: "told" }, el("strong", { text: "None." }),
    ` No measured rate keeps ${goalText()}. Nearest is ${nameOf(best.record)}: ${share(value)} (${share(low)} to ${share(high)}) at ${number(best.before.offered)} requests a second, its slowest.`)];
}

/** Over a command that was run and failed: with what, so that nobody runs it again as it is. */
function triedText({ failures: [{ kind, message }] }) {
  return `It was tried with this, and failed (${kind}${message ? `: ${message.slice(0, 300).replace(/[.\s]+$/, "")}` : ""}). Change what made it fail before you run it again:`;
}

/** The sentence where no record is there. `like`: a record whose command serves, null: none. */
function notMeasured(like) {
  const text = ({ machine, input, output, kind, shapeName }) => `${machine}, ${kind === "exact" ? "" : `${shapeName}, `}${number(input)} in and ${number(output)} out`;
  const nearest = nearestHeads((head) => !state.engine || head.engine === state.engine).slice(0, 3);
  return [
    el("p", { class: "told" }, el("strong", { text: "Not measured." }), ` The almanac ${allHeads().length ? "has no record of this, and does not guess" : "holds no record yet"}.`),
    commandPart(like, "Run this, and add the record:", "penstock almanac add bench-out"),
    nearest.length ? el("p", { class: "aside" }, "Measured near it: ", nearest.map((head, at) => [at ? "; " : "",
      el("a", { href: addressOf({ ...state, ...subjectOf(head), point: "" }), text: text(head) })])) : null,
  ];
}

/** The command that measures what is asked, with those that come after it and what has to be put in by hand. */
function commandPart(like, title, ...after) {
  const { text, notes } = runCommand(like);
  return [
    text ? [el("p", { class: "aside", text: title }), [text, ...after].map(commandBox)] : null,
    notes.map((note) => el("p", { class: "aside", text: note })),
  ];
}

function stateText(answer) {
  if (hasMissed(answer)) {
    const [value, low, high] = answer.before.shares;
    const at = `it even at ${number(answer.before.offered)} a second`;
    return answer.state === "never" ? `misses ${at} (${share(value)})` : `missed ${at}, though not surely (${share(value)}, ${share(low)} to ${share(high)})`;
  }
  if (answer.state === "unserved") return "a rate was tried, and nothing was served in its window";
  if (answer.state === "short") return "the client may have been the limit: not ranked";
  if (answer.state === "failed") return `failed: ${answer.record.failures[0].kind}`;
  return "no open-loop rate measured";
}

/* --- the ranking */

const rankRows = new Map(); // record -> its row, kept so that it can move while the slider does

function showRanking(answers, colours) {
  const box = byId("ranking");
  const top = Math.max(...answers.map((answer) => (answer.rate ? answer.rate[2] ?? answer.rate[0] : 0)), 0);
  const before = new Map([...rankRows].map(([record, row]) => [record, row.isConnected ? row.getBoundingClientRect().top : null]));
  const held = document.activeElement;
  let place = 0;
  const rows = answers.map((answer) => rankRow(answer, top, colours.get(answer.record), answer.rate && !isWrong(answer.record) ? ++place : null));
  for (const record of rankRows.keys()) if (!answers.some((answer) => answer.record === record)) rankRows.delete(record);
  if (rows.some((row, at) => box.children[at] !== row) || box.children.length !== rows.length) {
    put(box, rows);
    if (held && box.contains(held)) held.focus();
    moved(rows, answers, before);
  }
  byId("ranking-part").hidden = !answers.length;
}

/** Lets rows glide from where they were. */
function moved(rows, answers, before) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  rows.forEach((row, at) => {
    const was = before.get(answers[at].record);
    if (was === undefined || was === null) return;
    const by = was - row.getBoundingClientRect().top;
    if (Math.abs(by) > 1) row.animate([{ transform: `translateY(${by}px)` }, { transform: "none" }], { duration: 180, easing: "ease-out" });
  });
}

function rankRow(answer, top, colour, place) {
  const { record } = answer;
  let row = rankRows.get(record);
  if (!row) {
    row = el("li", { class: "rank" },
      el("button", { type: "button", class: "rank-name" }), el("div", { class: "bar", "aria-hidden": "true" },
        el("span", { class: "fill" }), el("span", { class: "kept" }), el("span", { class: "range" })),
      el("span", { class: "rank-value" }), el("span", { class: "rank-note" }));
    rankRows.set(record, row);
  }
  row.dataset.colour = colour;
  row.dataset.run = record.run;
  row.classList.toggle("unranked", !answer.rate);
  row.classList.toggle("wrong", isWrong(record));
  const [button, bar, value, note] = row.children;
  put(button, el("span", { class: "place", text: place === null ? "–" : String(place) }), el("i", { class: "chip" }), el("span", { text: nameOf(record) }));
  const shown = answer.before ?? answer.ready[0];
  button.onclick = () => shown ? change({ point: `${record.run}/${shown.point.name}` }) : change({ point: `${record.run}/` });
  value.textContent = answer.rate ? `${isOpen(answer) ? "kept at " : ""}${number(answer.rate[0])}/s` : "";
  note.textContent = noteOf(answer);
  const [fill, kept, range] = bar.children;
  const part = (rate) => `${(100 * rate) / (top || 1)}%`;
  bar.hidden = !answer.rate;
  if (answer.rate) {
    const [middle, low, high] = answer.rate;
    fill.style.width = part(answer.before.rate);
    kept.style.left = part(answer.before.rate);
    kept.style.width = part(Math.max(middle - answer.before.rate, 0));
    range.hidden = low === null && high === null; // nothing is known: no line, rather than one across all
    range.style.left = part(low ?? 0);
    range.style.width = part((high ?? top) - (low ?? 0));
    range.classList.toggle("open-left", low === null);
    range.classList.toggle("open-right", high === null);
  }
  return row;
}

/** What came of the next point, where the rate is a measured one. */
function nextText({ state: found, ready, line, capped }) {
  if (capped) return "all at once gave no more";
  const fastest = line[line.length - 1];
  if (found === "crossing" || fastest.rate < fastest.offered) return "more was not served";
  return shortAbove({ ready, line }) ? "nothing faster can be ranked" : "nothing faster was";
}

function noteOf(answer) {
  const { record } = answer;
  if (isWrong(record)) return `answers wrongly (${number(record.answers.kl)} nats from float32): not ranked`;
  if (!answer.rate) return stateText(answer);
  const [value, low, high] = answer.rate;
  const cost = costAt(priceOf(answer.record), value, answer);
  const joules = fewestJoules(record);
  return [
    low === null && high === null ? "no interval" : `${low === null ? "?" : number(low)} to ${high === null ? "?" : number(high)}`,
    answer.between ? "interpolated" : `measured, ${nextText(answer)}`,
    cost ? `${money(cost.tokens)}/M out` : null,
    record.answers ? `${number(record.answers.kl)} nats from float32` : null,
    record.machine.gpu ? (joules ? `${number(joules[0])} J/token at best` : "power not measured") : null,
    lackText(record),
    methodText(record.method),
  ].filter(Boolean).join(" · ");
}

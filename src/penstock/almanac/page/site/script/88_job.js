/* A job of many rows: hours, dollars and joules of each engine on one machine. The bulk is taken from rates with everything
   at once, the end from a small simulation of the last requests. Knows records; says where neither is known. */

const JOBS = { "1,319 problems x n = 128": { jobRows: 1319, jobInput: 512, jobOutput: 256, jobN: 128, jobEnds: true },
  "1 M rows of 500 in, 200 out": { jobRows: 1e6, jobInput: 500, jobOutput: 200, jobN: 1, jobEnds: false } };
const NEAR = 1.02; // lengths this close count as the same
const REACH = 2; // how far beyond measured lengths a rate is carried
const SHARED_FROM = 4; // samples of a prompt from which a run with shared prompts says more than one of single prompts
const LONGEST = 8; // a drawn answer's longest, over the mean

const wholeOf = (record) => record.points.find((point) => point.kind === "saturation" && !point.client.short && point.complete && point.figures.request_rate?.[0] > 0);

/** [value, low, high] seconds of one request at full load: 1 / rate. */
function secondsOf(record) {
  const point = wholeOf(record);
  const rate = told(record, point, point.figures.request_rate);
  return [1 / rate[0], rate[2] ? 1 / rate[2] : null, rate[1] ? 1 / rate[1] : null];
}

/** Seconds a token in and a token out, by a line through the runs' full loads (least squares of relative errors, neither
    below 0); null: it takes two shapes. */
function costLine(records) {
  if (new Set(records.map(({ shape }) => shape.output / shape.input)).size < 2) return null;
  const [aa, ab, bb, a, b] = [0, 0, 0, 0, 0].map((_, at) => records.reduce((sum, record) => {
    const [y] = secondsOf(record);
    const [x, z] = [record.shape.input / y, record.shape.output / y];
    return sum + [x * x, x * z, z * z, x, z][at];
  }, 0));
  const whole = aa * bb - ab * ab;
  let [input, output] = [(a * bb - b * ab) / whole, (b * aa - a * ab) / whole];
  if (input < 0) [input, output] = [0, b / bb];
  if (output < 0) [input, output] = [a / aa, 0];
  return { input, output };
}

/** Seconds of one sequence at full load for the job: {seconds: [value, low, high], how, point, record} or {why}. */
function bulkOf(records, job) {
  const measured = records.filter(wholeOf);
  const shared = measured.find(({ shape }) => shape.kind === "monkeys");
  const apart = ({ shape }) => [shape.input / job.input, shape.output / job.output].map((each) => Math.abs(Math.log(each)));
  if (job.n >= SHARED_FROM && shared && Math.max(...apart(shared)) <= Math.log(REACH)) {
    const point = wholeOf(shared);
    const rate = told(shared, point, point.figures.output_rate);
    return { seconds: [rate[0], rate[2], rate[1]].map((each) => (each ? job.output / each : null)), record: shared, point,
      how: `tokens a second of ${workName({ ...shared.shape, shapeName: shared.shape.name })}` };
  }
  const exact = measured.filter(({ shape }) => shape.kind === "exact");
  if (!exact.length) return { why: `no full load of single prompts was measured${job.n >= SHARED_FROM && shared ? ", and that of shared ones is of other lengths" : ""}` };
  const far = (record) => apart(record)[0] + apart(record)[1];
  const [nearest] = [...exact].sort((a, b) => far(a) - far(b));
  const more = job.n > 1 ? "; each sample as a request of its own" : "";
  if (Math.max(...apart(nearest)) < Math.log(NEAR)) return { seconds: secondsOf(nearest), record: nearest, point: wholeOf(nearest), how: `measured at ${workName(nearest.shape)}${more}` };
  const lengths = exact.map(({ shape }) => shape.input + shape.output);
  const length = job.input + job.output;
  if (length > REACH * Math.max(...lengths) || length < Math.min(...lengths) / REACH) return { why: `no run near ${thousands.format(length)} tokens a request` };
  const line = costLine(exact);
  if (!line) return { why: "one shape was measured, and not this one: it takes two for a line" };
  const value = line.input * job.input + line.output * job.output;
  const [middle, low, high] = secondsOf(nearest);
  const worst = Math.max(...exact.map((record) => Math.abs(Math.log((line.input * record.shape.input + line.output * record.shape.output) / secondsOf(record)[0]))));
  // a line through two shapes meets both: how far others lie from it is unknown
  const ends = unique(exact.map(({ shape }) => shape.name)).length < 3 ? [value, null, null] : over([value, low && (value * low) / middle, high && (value * high) / middle], worst);
  return { seconds: ends, record: nearest, point: wholeOf(nearest), how: `by a line through ${plural(exact.length, "shape")}${more}` };
}

/** A simulation of the last requests: sequences in flight end one after the other, and a step grows with them, on a straight
    line between one at a time and all at once. Seconds beyond what the bulk's rate says; null: a figure is missing. */
function tailOf({ record, point }, job, sequences) {
  const n = record.shape.n ?? 1; // a token's time of n samples is over the tokens of all of them
  const single = n * record.points.find((each) => each.kind === "single" && !each.client.short)?.figures.per_token?.[1]?.[0];
  const full = n * point.figures.per_token?.[1]?.[0];
  const rate = point.figures.output_rate?.[0];
  if (!single || !full || !rate) return null;
  const holds = Math.max(1, rate * full); // sequences in flight at full load
  const flying = Math.min(holds, sequences);
  const step = (count) => single + ((full - single) * Math.max(count - n, 0)) / Math.max(holds - n, 1);
  const longest = Math.ceil(job.ends ? LONGEST * job.output : job.output);
  const alive = (token) => (job.ends ? flying * Math.exp(-token / job.output) : flying * (sequences > holds ? 1 - token / longest : 1));
  let [seconds, left] = [0, 0];
  for (let token = 0; token < longest; token++) {
    const count = alive(token);
    if (count < 0.5) break;
    seconds += step(count);
    left += count;
  }
  return { seconds: Math.max(seconds - left / rate, 0), most: longest * single };
}

/** {hours: [value, low, high], tail, dollars, joules, how, record} of one engine's records, or {why}. */
function jobOf(records, job) {
  const bulk = bulkOf(records, job);
  if (bulk.why) return bulk;
  const sequences = job.rows * job.n;
  const tail = tailOf(bulk, job, sequences);
  const hours = bulk.seconds.map((each) => (each === null ? null : (each * sequences + (tail?.seconds ?? 0)) / 3600));
  const watts = bulk.point.board?.[0] ?? null;
  const price = priceOf(bulk.record);
  return { ...bulk, hours, tail, dollars: price === null ? null : hours.map((each) => (each === null ? null : each * price)), joules: watts === null ? null : hours.map((each) => (each === null ? null : each * 3600 * watts)) };
}

const jobNow = () => ({ rows: state.jobRows, input: state.jobInput, output: state.jobOutput, n: state.jobN, ends: state.jobEnds });

const duration = (hours) => (hours >= 1 ? `${number(hours)}\u00a0h` : time(hours * 3600));
const energy = (joules) => (joules >= 3.6e5 ? `${number(joules / 3.6e6)}\u00a0kWh` : `${number(joules)}\u00a0J`);

async function showJob(mine) {
  const heads = allHeads();
  choices(byId("job-model"), unique(heads.map((head) => head.model)).sort().map((each) => [each, each]), state.model, state.model ? undefined : "a model");
  const of = heads.filter((head) => head.model === state.model);
  choices(byId("job-machine"), unique(of.map((head) => head.machine)).sort().map((each) => [each, each]), state.machine, state.machine ? undefined : "a machine");
  for (const [id, name] of [["job-rows", "jobRows"], ["job-input", "jobInput"], ["job-output", "jobOutput"], ["job-n", "jobN"]]) {
    if (document.activeElement !== byId(id)) byId(id).value = String(state[name]);
  }
  if (document.activeElement !== byId("job-price")) byId("job-price").value = state.price === null ? "" : String(state.price);
  byId("job-ends").checked = state.jobEnds;
  const here = of.filter((head) => head.machine === state.machine);
  const loaded = await Promise.all(unique(here.filter((head) => !head.yours).map((head) => head.group)).map(loadGroup));
  if (mine !== turn) return;
  const records = [...here.filter((head) => head.yours).map((head) => head.record), ...loaded.flat()];
  const engines = new Map();
  for (const record of records) {
    const key = JSON.stringify([record.engine.name, record.engine.version, record.engine.configuration.name, record.yours]);
    engines.set(key, [...(engines.get(key) ?? []), record]);
  }
  const found = [...engines.values()].map((each) => ({ first: each[0], wrong: each.some(isWrong), ...jobOf(each, jobNow()) }));
  found.sort((a, b) => a.wrong - b.wrong || (a.hours?.[0] ?? Infinity) - (b.hours?.[0] ?? Infinity));
  put(byId("job-answer"), jobWords(found));
  put(byId("job-table"), found.length ? table("The job on each engine", ["Engine", "Time", "Of it the last requests", "Dollars", "Energy", "How known"],
    found.map(jobRow), { file: "job.csv", numeric: [1, 2, 3, 4] }) : null);
}

function jobRow({ first, wrong, why, hours, tail, dollars, joules, how, record }) {
  const name = `${nameOf(first)}${wrong ? ": answers wrongly" : ""}`;
  if (why) return [name, "unknown", "–", "–", "–", why];
  return [name, stacked(hours, duration), tail ? duration(tail.seconds / 3600) : "unknown", dollars ? stacked(dollars, money) : "no price",
    joules ? stacked(joules, energy) : record.machine.gpu ? "power not measured" : "no GPU's power", `${how}${methodText(record.method) ? `, ${methodText(record.method)}` : ""}`];
}

/** How the next engine stands to the fastest, with what either lacks. */
function followerText(best, next) {
  const ratio = ratioOf(next.hours, best.hours);
  const name = nameOf(next.first);
  const lacks = lacksOf(best.record, next.record);
  const words = { more: `${name} follows with ${duration(next.hours[0])}, ${interval(ratio)} times as long${lacks}.`, same: `No significant difference from ${name}, the next: ratio ${interval(ratio)}${lacks}.` };
  return words[verdict(ratio)] ?? `${name} follows with ${duration(next.hours[0])}; no interval can be given for the ratio${lacks}.`;
}

function jobWords(found) {
  const [best, next] = found.filter(({ hours, wrong }) => hours && !wrong);
  if (!best) return [el("p", { class: "told" }, el("strong", { text: "Not known." }), ` ${found.length ? "No engine here has runs that carry this job; the table says what each lacks." : "Nothing was measured of this model on this machine."}`)];
  const job = jobNow();
  const tokens = job.rows * job.n * job.output;
  const [middle, ends] = interval(best.hours, duration).split(/ (?=\()/);
  const cost = best.dollars ? [", for ", el("strong", { text: money(best.dollars[0]) }), ` at ${priceText(best.record)}`] : "; give a price an hour for its cost";
  const power = best.joules ? ` and ${energy(best.joules[0])} (${number(best.joules[0] / tokens)} J a token out, of the boards alone)` : "";
  return [
    el("p", { class: "told" }, `${nameOf(best.first)} takes `, el("strong", { text: middle }), ` ${ends}`, cost, power, "."),
    el("p", { class: "aside", text: next ? followerText(best, next) : "No other engine has runs that carry this job." }),
    el("p", { class: "aside", text: job.ends
      ? `The last requests are simulated with lengths drawn as if each token were as likely to be the last (mean ${thousands.format(job.output)}). Your model's longest answers may be longer: one of ${thousands.format(LONGEST * job.output)} tokens alone takes ${best.tail ? time(best.tail.most) : "an unknown time"}.`
      : "Each answer is taken to have all its tokens. A prompt's cache, other lengths among the rows, and the reading and writing of files are left out." }),
  ];
}

function listenToJob() {
  const listen = (id, name, kind) => byId(id).addEventListener("change", (event) => {
    const { value: text, validity } = event.target; // of what is no number the text is empty
    const value = kind === "price" && text.trim() === "" && !validity.badInput ? null : readValue(kind, text);
    event.target.setAttribute("aria-invalid", String(value === undefined));
    byId("job-fault").hidden = value !== undefined;
    byId("job-fault").textContent = value === undefined ? `${text || "That"} is not taken: give a number from ${LIMITS[kind][0]} to ${thousands.format(LIMITS[kind][1])}.` : "";
    if (value !== undefined) change({ [name]: kind === "price" ? value : Math.round(value) });
  });
  listen("job-rows", "jobRows", "count");
  listen("job-input", "jobInput", "length");
  listen("job-output", "jobOutput", "length");
  listen("job-n", "jobN", "length");
  listen("job-price", "price", "price");
  byId("job-ends").addEventListener("change", (event) => change({ jobEnds: event.target.checked }));
  byId("job-machine").addEventListener("change", ({ target }) => change({ machine: target.value, ...nearestSubject({ machine: target.value }) }));
  byId("job-model").addEventListener("change", ({ target: { value: model } }) => {
    const [largest, ...others] = allHeads().filter((head) => head.model === model).sort((a, b) => b.gpus - a.gpus);
    const measured = [largest, ...others].find((head) => head.machine === state.machine) ?? largest;
    change({ model, machine: measured.machine, ...nearestSubject({ model, machine: measured.machine }) });
  });
  put(byId("job-examples"), Object.entries(JOBS).map(([text, job]) => el("button", { type: "button", class: "small", text, onclick: () => change(job) })));
}

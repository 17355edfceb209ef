/* What the builder wrote: the index, and groups that are loaded when they are asked for. Records of the reader's own
   join in here. Hands out records as they are on paper, with samples as Float32Arrays. Knows no question. */

const data = {
  index: null,
  heads: [], // a line a record: the index by rows, with texts for numbers
  groups: new Map(), // group's number -> its records, once loaded
  waiting: new Map(), // group's number -> the promise of it
  yours: [], // records that were dropped here
  times: null, // 16-bit number -> seconds
};

window.ALMANAC = Object.freeze({
  index(found) { data.index = found; },
  group(number, records) { data.groups.set(number, records.map(unpacked)); },
});

/** Turns the index's columns into rows. Called once, when the index is here. */
function readIndex() {
  const { records, tables, groups } = data.index;
  const names = Object.keys(records);
  const count = names.length ? records[names[0]].length : 0;
  for (let at = 0; at < count; at++) {
    const head = {};
    for (const name of names) head[name] = records[name][at];
    for (const name of ["engine", "version", "configuration"]) head[name] = tables[name][head[name]];
    const [model, machine, shape, [kind, input, output, n, shapeName]] = groups[head.group];
    Object.assign(head, {
      model: tables.model[model], machine: tables.machine[machine], shape: tables.shape[shape],
      kind, input, output, n, shapeName, yours: false,
    });
    data.heads.push(head);
  }
}

/** Loads the records of a group. A script, for a page from the file system cannot fetch. */
function loadGroup(number) {
  if (data.groups.has(number)) return Promise.resolve(data.groups.get(number));
  if (!data.waiting.has(number)) {
    data.waiting.set(number, new Promise((resolve, reject) => {
      const tag = el("script", { src: `data/g${number}.js` });
      tag.addEventListener("load", () => resolve(data.groups.get(number)));
      tag.addEventListener("error", () => {
        data.waiting.delete(number);
        reject(new Error(`data/g${number}.js, which lies beside the page, cannot be read`));
      });
      document.head.append(tag);
    }));
  }
  return data.waiting.get(number);
}

/* --- unpacking */

/** A record as on paper, from the builder's compact form. */
function unpacked(small) {
  const columns = small.points;
  const points = columns.name.map((_, at) => {
    const point = { client: {}, figures: {} };
    for (const [name, column] of Object.entries(columns)) if (Array.isArray(column)) point[name] = column[at];
    for (const [name, column] of Object.entries(columns.client)) point.client[name] = column[at];
    for (const [name, column] of Object.entries(columns.figures)) point.figures[name] = column[at];
    point.sample = unpackedSample(columns.sample[at]);
    return point;
  });
  return { ...small, points, yours: false };
}

/** Three columns of 16-bit logarithms in base64, as compact.py packs them. */
function unpackedSample(text) {
  const bytes = atob(text);
  const rows = bytes.length / 6;
  const [first, perToken, endToEnd] = [0, 1, 2].map((column) => {
    const out = new Float32Array(rows);
    for (let row = 0, at = column * rows * 2; row < rows; row++, at += 2) {
      out[row] = data.times[bytes.charCodeAt(at) | (bytes.charCodeAt(at + 1) << 8)];
    }
    return out;
  });
  return { first, perToken, endToEnd };
}

/** The seconds that each 16-bit number stands for: compact.py's scale. */
function readScale() {
  const [smallest, largest, steps] = data.index.scale;
  data.times = new Float32Array(65536);
  for (let at = 1; at < 65535; at++) data.times[at] = smallest * Math.exp(((at - 1) * Math.log(largest / smallest)) / steps);
  data.times[65535] = -1;
}

/** A record from a reader's own file, in the form that the page works with. It has been checked before. */
function ownRecord(paper, file) {
  const three = (value) => (value === null || value === undefined ? null : [value.value, value.low, value.high]);
  const spread = (value) => (value ? ["mean", "p50", "p90", "p95", "p99"].map((name) => three(value[name])) : null);
  const rates = ["request_rate", "output_rate", "total_rate"];
  const points = paper.points.map((point) => ({
    ...point,
    rate: point.rate ?? null,
    board: point.board ? [point.board.watts, point.board.busy, three(point.board.joules_per_token)] : null,
    figures: Object.fromEntries(Object.entries(point.figures).map(([name, value]) =>
      [name, rates.includes(name) ? three(value) : spread(value)])),
    goals: point.goals.map((goal) => [goal.seconds, goal.share, goal.low, goal.high, goal.goodput]),
    sample: {
      first: Float32Array.from(point.sample.first),
      perToken: Float32Array.from(point.sample.per_token),
      endToEnd: Float32Array.from(point.sample.end_to_end),
    },
  }));
  return { ...paper, points, file, yours: true };
}

/* --- what a record is about; the same words as compact.py's */

function modelLabel({ model }) {
  return `${model.name} (${model.dtype}${model.weights === "random" ? ", random weights" : ""})`;
}

function machineLabel({ machine }) {
  const { gpu } = machine;
  return gpu ? `${gpu.count} x ${gpu.name}` : `${machine.cpu || "CPU"}, ${coresTold(machine)}`;
}

function coresTold(machine) {
  return `${machine.server_cores ? `${machine.server_cores} of ` : ""}${machine.cores} cores`;
}

/** The line of the index that a reader's own record would have, as compact.py's headlines are. */
function ownHead(record) {
  const { shape, engine } = record;
  const single = record.points.find((point) => point.kind === "single" && !point.client.short);
  return {
    group: -1, yours: true, record, engine: engine.name, version: engine.version, configuration: engine.configuration.name,
    run: record.run, when: record.when, brief: record.method.edition ? 2 : record.method.short ? 1 : 0, lacks: (engine.lacks ?? []).join(", "), wrong: isWrong(record) ? 1 : 0, gpus: record.machine.gpu?.count ?? 0, parameters: record.model.parameters ?? null, points: record.points.length,
    short: record.points.filter((point) => point.client.short).length, failures: record.failures.length,
    price: record.method.price_per_hour ?? null, quantile: record.method.quantile,
    model: modelLabel(record), machine: machineLabel(record), kind: shape.kind, input: shape.input, output: shape.output,
    n: shape.n ?? 1, shapeName: shape.name, peak: highest(record, "request_rate"), tokens: highest(record, "output_rate"),
    joules: fewestJoules(record),
    first: single ? told(record, single, single.figures.first_token?.[1] ?? null) : null, token: single ? told(record, single, single.figures.per_token?.[1] ?? null) : null, kept: keptHeads(record),
  };
}

/** The higher one of two rates [value, low, high] comes first: by the low end, for the highest value of many windows is
    the luckiest one's. */
const surest = (a, b) => (b[1] ?? 0) - (a[1] ?? 0) || b[0] - a[0];

/** The highest one of a record's rates of this name, client's short points left out. Where everything at once was cut off
    before its end, or not measured, nobody knows how high the highest is: its high end is null. As compact.py's. */
function highest(record, name) {
  const points = record.points.filter((point) => !point.client.short);
  const [top = null] = points.map((point) => told(record, point, point.figures[name])).filter(Boolean).sort(surest);
  const ended = points.some((point) => point.kind === "saturation" && point.complete && !point.outcomes.unfinished);
  return top && !ended ? [top[0], top[1], null] : top;
}

/** Joules of an output token where they are fewest, which is at a high load; null: power was not measured. */
function fewestJoules(record) {
  const found = record.points.filter((point) => !point.client.short && point.board?.[2]);
  const [best] = found.map((point) => told(record, point, point.board[2])).sort((a, b) => a[0] - b[0]);
  return best ?? null;
}

const allHeads = () => (data.yours.length ? [...data.heads, ...data.yours.map(ownHead)] : data.heads);

/** The records of a question's subject, loaded. Newest first, the reader's own before them. */
async function recordsAbout({ model, machine, kind, input, output, n, shapeName }) {
  const about = (head) => head.model === model && head.machine === machine && head.kind === kind && head.input === input &&
    head.output === output && (kind === "exact" || (head.n === n && head.shapeName === shapeName));
  const heads = allHeads().filter(about);
  const numbers = [...new Set(heads.filter((head) => !head.yours).map((head) => head.group))];
  const loaded = await Promise.all(numbers.map(loadGroup));
  return [...heads.filter((head) => head.yours).map((head) => head.record), ...loaded.flat()];
}

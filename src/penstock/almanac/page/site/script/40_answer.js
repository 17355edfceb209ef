/* From records and a question to rates: which share of requests met the goal at each point, where that share falls
   through the quantile, and the order of the engines. The same rule draws the chart. Knows nothing of the document.

   A question: {quantile, first, perToken (or null), endToEnd (or null)}: `quantile` of the requests have their first
   token within `first` and, where asked, a token every `perToken` and all of them within `endToEnd` seconds. */

/** What of a record's point matters, whatever the first-token limit: kept while only that limit moves. */
function prepared(record, question) {
  const joint = question.perToken !== null || question.endToEnd !== null;
  return record.points.map((point, at) => {
    const { first, perToken, endToEnd } = point.sample;
    const passing = [];
    for (let row = 0; row < first.length; row++) {
      if (endToEnd[row] < 0 || first[row] < 0) continue; // failed: counts against any goal
      if (question.perToken !== null && !(perToken[row] <= question.perToken)) continue;
      if (question.endToEnd !== null && !(endToEnd[row] <= question.endToEnd)) continue;
      passing.push(first[row]);
    }
    return {
      at, point, rows: first.length, worth: worth(point, first.length), sorted: Float32Array.from(passing).sort(),
      goals: joint ? [] : point.goals, rate: sustained(point), short: point.client.short,
      usable: point.kind === "open" && !point.client.short && first.length > 0,
    };
  });
}

/** How many independent requests a sample is worth: those of the point, and what drawing a part of them adds. */
function worth(point, rows) {
  const all = Math.max(point.requests, rows);
  const effective = Math.min(point.effective ?? all, all);
  if (!(effective > 0) || !rows) return 0;
  return Math.min(1 / (1 / effective + 1 / rows - 1 / all), rows);
}

/** The rate that a point stands for: what was offered, unless significantly less was completed. Where nobody can say
    what is significant, the smaller of both; where nothing came back, it is a miss at what was offered. */
function sustained(point) {
  const rate = point.figures.request_rate;
  if (point.rate === null) return rate ? rate[0] : null;
  if (!rate) return point.rate;
  if (rate[2] === null) return Math.min(point.rate, rate[0]) || (point.complete ? null : point.rate); // 0: it shows none
  return rate[2] < point.rate ? rate[0] : point.rate;
}

/** [share, low, high, of all] of the requests of a prepared point that met the goal. A recorded goal is exact: it
    comes from all requests; any other from the sample. */
function shareAt(ready, first) {
  const goal = ready.goals.find((each) => each[0] === first);
  if (goal) return [goal[1], goal[2], goal[3], true];
  if (!ready.rows) return [0, 0, 1, false];
  const value = above(ready.sorted, first * (1 + 1e-6)) / ready.rows;
  const [low, high] = shareInterval(value * ready.worth, ready.worth);
  return [value, low, high, false];
}

/** Where shares along rising rates fall through the quantile: {rate, before, after}, or null where none reaches it. From
    the slowest rate that keeps it on the first that misses it holds, whatever chance lets a faster one do. Between two
    measured points the share is taken to be a straight line. after null: nothing faster was measured. */
function crossing(line, quantile) {
  const keeps = (each) => each.shares[0] >= quantile;
  const slowest = line.findIndex(keeps);
  if (slowest < 0) return null;
  const fails = line.findIndex((each, at) => at > slowest && !keeps(each));
  const before = fails < 0 ? line.length - 1 : fails - 1;
  const [here, next] = [line[before], line[before + 1]];
  if (!next) return { rate: here.rate, before, after: null };
  const part = (here.shares[0] - quantile) / (here.shares[0] - next.shares[0]);
  return { rate: Math.max(here.rate + part * (next.rate - here.rate), here.rate), before, after: before + 1 };
}

/** The interval of a crossing, which leans on no straight line, only on shares that fall as rates rise: from the fastest
    measured rate that surely keeps the quantile to the slowest above it that surely doesn't. null: there is none. */
function surely(line, value, quantile) {
  const keeps = line.filter((each, at) => at <= value.before && each.shares[1] >= quantile).map((each) => each.rate);
  const misses = line.filter((each, at) => at > value.before && each.shares[2] < quantile).map((each) => each.rate);
  return [keeps.length ? Math.min(Math.max(...keeps), value.rate) : null, misses.length ? Math.max(Math.min(...misses), value.rate) : null];
}

/** The answer of one record: {state, rate: [value, low, high], ...}. Open loops alone carry it: a closed one, that of one
    user too, waits for the server, so the rate that it reached says not that visitors at that rate would be served in
    time. What one user alone does not get in time nobody does.
    state: "crossing" (interpolated between two measured points), "beyond" (kept at the fastest measured one: at least),
    "never" (missed at the slowest, or by one at a time), "short" (the client may have been the limit), "unmeasured", "failed". */
function answerOf(record, question, ready = prepared(record, question)) {
  const line = ready.filter((each) => each.usable && each.rate !== null)
    .map((each) => ({ ...each, shares: shareAt(each, question.first) }))
    .sort((a, b) => offered(a.point) - offered(b.point));
  const answer = { record, ready, line, rate: null, state: "unmeasured", before: null, after: null };
  if (!line.length) {
    const alone = ready.find((each) => each.point.kind === "single" && !each.short && each.rows);
    const shares = alone && shareAt(alone, question.first);
    if (alone && shares[0] < question.quantile) return { ...answer, state: "never", before: { ...alone, shares } };
    const barred = ready.some((each) => each.short && each.point.kind === "open");
    answer.state = barred ? "short" : !record.points.length && record.failures.length ? "failed" : "unmeasured";
    return answer;
  }
  const value = crossing(line, question.quantile);
  if (!value) return { ...answer, state: "never", before: line[0] };
  answer.state = value.after === null ? "beyond" : "crossing";
  answer.rate = [value.rate, ...surely(line, value, question.quantile)];
  answer.before = line[value.before];
  answer.after = value.after === null ? null : line[value.after];
  answer.exact = answer.before.shares[3];
  return answer;
}

const offered = (point) => point.rate ?? (point.figures.request_rate ? point.figures.request_rate[0] : 0);

/** Answers in order: those with a rate by it, then those that missed, then those that cannot be ranked. */
function ranked(answers) {
  const order = { crossing: 0, beyond: 0, never: 1, unmeasured: 2, short: 2, failed: 3 };
  return [...answers].sort((a, b) => order[a.state] - order[b.state] || (b.rate ? b.rate[0] : 0) - (a.rate ? a.rate[0] : 0));
}

/** The newest record of each engine and configuration; the reader's own all stay. Records come newest first. */
function newest(records) {
  const seen = new Set();
  return records.filter((record) => {
    if (record.yours) return true;
    const key = JSON.stringify([record.engine.name, record.engine.configuration.name]);
    return !seen.has(key) && seen.add(key);
  });
}

/** Dollars for a thousand requests and a million output tokens at `rate`, or null without a price. */
function costAt(price, rate, answer) {
  if (price === null || !(rate > 0)) return null;
  const { point } = answer.before ?? {};
  const { output, n = 1 } = answer.record.shape;
  const tokens = point && point.complete ? point.output_tokens / point.complete : output * n;
  const request = price / 3600 / rate;
  return { requests: request * 1000, tokens: (request / tokens) * 1e6, perRequest: tokens };
}

/* --- the curve: the latency that `quantile` of the requests keep, along the rates */

/** Points and the line between them: {measured: [{rate, low, value, high, ready}], line: [{rate, low, value, high}]}.
    Between two measured points shares are a straight line at every latency, as in `crossing`: where this line passes
    the goal is the answer. Latencies that are never kept are Infinity. */
function curveOf(answer, question, grid) {
  const goals = answer.line.flatMap((each) => each.goals.map((goal) => goal[0])).filter((goal) => goal > grid[0]);
  const times = [...new Set([...grid, ...goals])].sort((a, b) => a - b);
  const kept = answer.line.map((each) => ({ ...each, grid: times, shares: times.map((time) => shareAt(each, time)) }));
  const line = [];
  kept.forEach((here, at) => {
    const next = kept[at + 1];
    for (let step = 0; step < (next ? 8 : 1); step++) {
      const part = step / 8;
      const rate = next ? here.rate + part * (next.rate - here.rate) : here.rate;
      line.push({ rate, ...contour(here, next ?? here, part, question.quantile) });
    }
  });
  const measured = kept.map((each) => ({ rate: each.rate, ready: each, ...contour(each, each, 0, question.quantile) }));
  return { measured, line };
}

/** Where the mixed shares of two points reach the quantile: value by the share, high by its low end, low by its high. */
function contour(here, next, part, quantile) {
  const found = [0, 1, 2].map((column) => {
    let before = 0;
    for (let at = 0; at < here.grid.length; at++) {
      const mixed = here.shares[at][column] * (1 - part) + next.shares[at][column] * part;
      if (mixed >= quantile) {
        if (!at || mixed === before) return here.grid[at];
        const [low, high] = [here.grid[at - 1], here.grid[at]];
        return low * (high / low) ** ((quantile - before) / (mixed - before));
      }
      before = mixed;
    }
    return Infinity;
  });
  return { value: found[0], high: found[1], low: found[2] };
}

/** Latencies that a set of answers spans, evenly in logarithms. */
function gridFor(answers, goal) {
  let [low, high] = [goal, goal];
  for (const answer of answers) {
    for (const { sorted } of answer.line) {
      if (!sorted.length) continue;
      low = Math.min(low, Math.max(sorted[0], 1e-5));
      high = Math.max(high, sorted[sorted.length - 1]);
    }
  }
  [low, high] = [low / 1.2, high * 1.2];
  return Array.from({ length: 120 }, (_, at) => low * (high / low) ** (at / 119));
}

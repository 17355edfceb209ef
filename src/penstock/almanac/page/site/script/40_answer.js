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
      goals: joint ? [] : point.goals, ...sustained(point), short: point.client.short,
      usable: point.kind === "open" && point.rate > 0 && !point.client.short && first.length > 0,
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

/** The upper end of Poisson's 95 % interval of a count of 0, 1, ... 9, as figures.py has it. */
const POISSON_HIGH = [3.689, 5.572, 7.225, 8.767, 10.242, 11.668, 13.059, 14.423, 15.763, 17.085];

/** What a point says of rates, as figures.py's `sustained`, whose words these are. offered: what its window issued; rate:
    what it stands for where it keeps a goal, 0: nothing was served; low: what it surely stands for, null: nobody knows.
    Of a point that offers no rate: what it completed. */
function sustained(point) {
  const done = point.figures.request_rate;
  if (point.kind !== "open") return { offered: done ? done[0] : 0, rate: done ? done[0] : 0, low: done ? done[1] : null };
  const steady = (point.opens ?? null) !== null && point.seconds > 0;
  const offered = steady ? point.requests / point.seconds : point.rate ?? 0;
  if (!done) return { offered, rate: 0, low: null };
  const [value, low, high] = done;
  const ended = Math.round(value * point.seconds);
  const less = high !== null ? high < offered
    : point.outcomes.unfinished > 0 || (ended < POISSON_HIGH.length && POISSON_HIGH[ended] < offered * point.seconds);
  return { offered, rate: less ? Math.min(offered, value) : offered, low: low === null ? null : Math.min(offered, low) };
}

/** What a point completed a second, [value, low, high]; null: nothing is known. */
const completed = (point) => point.figures.request_rate ?? null;

/** What no rate of a record is told above, as figures.py's `most_of`: the high end of everything at once. null: nobody
    knows, or another point surely completed more. */
function mostOf(points) {
  const rated = points.filter((point) => !point.client.short && completed(point));
  const ends = rated.filter((point) => point.kind === "saturation" && point.complete && !point.outcomes.unfinished)
    .map((point) => completed(point)[2]).filter((high) => high !== null);
  const most = ends.length ? Math.max(...ends) : null;
  return most === null || rated.some((point) => (completed(point)[1] ?? 0) > most) ? null : most;
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

/** Open points in the order of what they offered, each with its `shares`, none standing for more than `most` (mostOf);
    without those that keep the quantile though nothing was served in their window: they show neither a rate nor a
    miss. */
function lineOf(points, sharesOf, quantile, most) {
  return points.map((each) => ({
    ...each, shares: sharesOf(each), served: each.rate > 0, rate: Math.min(each.rate || each.offered, most ?? Infinity),
  }))
    .filter((each) => each.served || each.shares[0] < quantile)
    .sort((a, b) => a.offered - b.offered);
}

/** The part of a line that keeps the quantile, as figures.py's `kept_of`: {top, last, fails}, places in it; null where no
    point does. From the slowest that keeps it on the first that misses it holds (`fails`, -1: none does), whatever chance
    lets a faster one do; `last` is the fastest before it. Past its highest rate an engine completes less of what it is
    offered, so the highest rate kept is that of `top`. */
function keptOf(line, quantile) {
  const slowest = line.findIndex((each) => each.shares[0] >= quantile);
  if (slowest < 0) return null;
  const fails = line.findIndex((each, at) => at > slowest && each.shares[0] < quantile);
  const last = (fails < 0 ? line.length : fails) - 1;
  let top = slowest;
  for (let at = slowest; at <= last; at++) if (line[at].rate > line[top].rate) top = at;
  return { top, last, fails };
}

/** Where shares along rising rates fall through the quantile: {rate, before, after, between}, or null where none reaches
    it. Between two measured points the share is taken to be a straight line (`between`: the rate lies on it), but no
    rate is below one that was measured and kept. after null: nothing faster was measured. */
function crossing(line, quantile) {
  const kept = keptOf(line, quantile);
  if (!kept) return null;
  const [top, here, next] = [line[kept.top], line[kept.last], line[kept.fails]];
  if (!next) return { rate: top.rate, before: kept.top, after: null, between: false };
  const part = (here.shares[0] - quantile) / (here.shares[0] - next.shares[0]);
  const rate = here.rate + part * (next.rate - here.rate);
  const between = rate > top.rate || (here === top && next.rate > top.rate);
  return { rate: Math.max(rate, top.rate), before: between ? kept.last : kept.top, after: kept.fails, between };
}

/** The interval of a crossing, which leans on no straight line and on no completed rate's value, only on shares that fall
    as rates rise: from the highest rate that was surely served (the low end of what was completed) and surely kept the
    quantile, to the slowest offered above it that surely missed it. null: there is none. */
function surely(line, value, quantile, most) {
  const fails = value.after ?? line.length;
  const keeps = line.filter((each, at) => at < fails && each.shares[1] >= quantile && each.low !== null).map((each) => each.low);
  const misses = line.filter((each, at) => at >= fails && each.shares[2] < quantile).map((each) => each.offered);
  return [keeps.length ? Math.min(Math.max(...keeps), value.rate) : null, misses.length ? Math.min(...misses) : null];
}

/** The headlines of a record's goals, as compact.py's `_kept`: [seconds, highest measured rate that keeps it, what was
    offered where it is missed first]. Kept 0: none does; -1: not measured. Missed 0: measured at no higher rate. */
function keptHeads(record) {
  const { quantile, goals } = record.method;
  const opened = record.points.filter((point) => point.kind === "open" && point.rate > 0 && !point.client.short);
  const most = mostOf(record.points);
  return goals.map((seconds) => {
    const shares = new Map(opened.map((point) => [point, point.goals.find((each) => each[0] === seconds)?.slice(1, 4)]));
    const asked = opened.filter((point) => shares.get(point)).map((point) => ({ point, ...sustained(point) }));
    if (!asked.length) return [seconds, -1, 0];
    const line = lineOf(asked, (each) => shares.get(each.point), quantile, most);
    const kept = keptOf(line, quantile);
    if (!kept) return [seconds, 0, line[0]?.offered ?? 0];
    return [seconds, line[kept.top].rate, line[kept.fails]?.offered ?? 0];
  });
}

/** The answer of one record: {state, rate: [value, low, high], ...}. Open loops alone carry it: a closed one, that of one
    user too, waits for the server, so the rate that it reached says not that visitors at that rate would be served in
    time. What one user alone surely does not get in time nobody does; of few requests that miss it nothing is sure.
    state: "crossing" (missed at a faster point), "beyond" (kept at the fastest measured one: at least), "never" (surely
    missed at the slowest, or by one at a time), "unsure" (missed at the slowest, but its interval holds the share asked
    for), "unserved" (tried, and nothing was served in its window), "short" (the client may have been the limit),
    "unmeasured", "failed". capped: the rate is the most that all at once gave (mostOf), above which none is told. */
function answerOf(record, question, ready = prepared(record, question)) {
  const most = mostOf(record.points);
  const line = lineOf(ready.filter((each) => each.usable), (each) => shareAt(each, question.first), question.quantile, most);
  const answer = { record, ready, line, rate: null, state: "unmeasured", before: null, after: null, between: false, capped: false };
  const missed = (shares) => shares[2] < question.quantile; // surely
  if (!line.length) {
    const alone = ready.find((each) => each.point.kind === "single" && !each.short && each.rows);
    const shares = alone && shareAt(alone, question.first);
    if (alone && missed(shares)) return { ...answer, state: "never", before: { ...alone, shares } };
    const barred = ready.some((each) => each.short && each.point.kind === "open");
    answer.state = ready.some((each) => each.usable) ? "unserved" : barred ? "short" : !record.points.length && record.failures.length ? "failed" : "unmeasured";
    return answer;
  }
  const value = crossing(line, question.quantile);
  if (!value) return { ...answer, state: missed(line[0].shares) ? "never" : "unsure", before: line[0] };
  answer.between = value.between;
  answer.capped = most !== null && value.rate >= most;
  answer.state = value.after === null ? "beyond" : "crossing";
  answer.rate = toldRate(record, [value.rate, ...surely(line, value, question.quantile)]);
  answer.before = line[value.before];
  answer.after = value.after === null ? null : line[value.after];
  answer.exact = answer.before.shares[3];
  return answer;
}

/** Answers in order: those with a rate by it, then those that missed, then those that cannot be ranked; engines that
    answer wrongly last. */
function ranked(answers) {
  const order = { crossing: 0, beyond: 0, unsure: 1, never: 1, unserved: 2, unmeasured: 2, short: 2, failed: 3 };
  return [...answers].sort((a, b) => isWrong(a.record) - isWrong(b.record) || order[a.state] - order[b.state] || (b.rate ? b.rate[0] : 0) - (a.rate ? a.rate[0] : 0));
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

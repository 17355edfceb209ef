/* The statistics of the page: a share's interval, a ratio's interval. Nothing of records or of the document. */

const LEVEL = 0.95;
const TAIL = (1 - LEVEL) / 2;

function logGamma(x) {
  if (x < 0.5) return Math.log(Math.PI / Math.abs(Math.sin(Math.PI * x))) - logGamma(1 - x);
  let shift = 0;
  while (x < 10) { shift += Math.log(x); x += 1; }
  const square = x * x;
  const series = 1 / (12 * x) - 1 / (360 * x * square) + 1 / (1260 * x * square * square);
  return (x - 0.5) * Math.log(x) - x + 0.5 * Math.log(2 * Math.PI) + series - shift; // Stirling
}

/** The regularised incomplete beta function, by its continued fraction (DLMF 8.17.22, Lentz's method). */
function betaCdf(x, a, b) {
  if (x <= 0) return 0;
  if (x >= 1) return 1;
  if (x > (a + 1) / (a + b + 2)) return 1 - betaCdf(1 - x, b, a);
  const front = Math.exp(a * Math.log(x) + b * Math.log1p(-x) - (logGamma(a) + logGamma(b) - logGamma(a + b))) / a;
  const away = (value) => (Math.abs(value) < 1e-300 ? 1e-300 : value);
  let c = 1;
  let d = 1 / away(1 - ((a + b) * x) / (a + 1));
  let value = d;
  for (let m = 1; m < 500; m++) {
    let step = 1;
    for (const term of [
      (m * (b - m) * x) / ((a + 2 * m - 1) * (a + 2 * m)),
      (-(a + m) * (a + b + m) * x) / ((a + 2 * m) * (a + 2 * m + 1)),
    ]) {
      d = 1 / away(1 + term * d);
      c = away(1 + term / c);
      step *= c * d;
      value *= c * d;
    }
    if (Math.abs(step - 1) < 1e-12) break;
  }
  return front * value;
}

/** x with betaCdf(x, a, b) = level, by the secant inside a bracket (Illinois), from the normal's guess. */
function betaQuantile(level, a, b) {
  let [low, high, atLow, atHigh] = [0, 1, -level, 1 - level];
  const mean = a / (a + b);
  const spread = Math.sqrt((mean * (1 - mean)) / (a + b + 1));
  for (const guess of [mean - 5 * spread, mean + 5 * spread]) {
    if (guess <= low || guess >= high) continue;
    const at = betaCdf(guess, a, b) - level;
    if (at < 0) [low, atLow] = [guess, at];
    else [high, atHigh] = [guess, at];
  }
  let side = 0;
  for (let turn = 0; turn < 60 && high - low > 1e-7; turn++) {
    const middle = turn % 4 === 3 ? (low + high) / 2 : (low * atHigh - high * atLow) / (atHigh - atLow);
    const at = betaCdf(middle, a, b) - level;
    if (at < 0) {
      [low, atLow] = [middle, at];
      if (side === -1) atHigh /= 2;
      side = -1;
    } else {
      [high, atHigh] = [middle, at];
      if (side === 1) atLow /= 2;
      side = 1;
    }
  }
  return (low + high) / 2;
}

const known = new Map(); // "hits of" -> [low, high]: a slider asks for the same ones again

/** Clopper-Pearson's 95 % interval of a share. Neither number has to be whole. */
function shareInterval(hits, of) {
  if (!(of > 0)) return [0, 1];
  const key = hits * 1e7 + of;
  let found = known.get(key);
  if (!found) {
    if (known.size > 200000) known.clear();
    const low = hits <= 0 ? 0 : betaQuantile(TAIL, hits, of - hits + 1);
    const high = hits >= of ? 1 : betaQuantile(1 - TAIL, hits + 1, of - hits);
    known.set(key, (found = [low, high]));
  }
  return found;
}

/** a / b with an interval from theirs: the distances to their ends, in logarithms, added as squares (Donner and Zou's
    MOVER), as compare.py's `ratio_ends`. Each is [value, low, high]; null ends give null: nothing can be said on that
    side. A low end of 0 is known, and lies without end below. */
function ratioOf(a, b) {
  if (!a || !b || !(a[0] > 0) || !(b[0] > 0)) return null;
  const distance = (from, to) => (from === null || to === null ? null : from > 0 ? Math.log(to / from) : Infinity);
  const far = (one, other) => (one === null || other === null ? null : Math.hypot(one, other));
  const down = far(distance(a[1], a[0]), distance(b[0], b[2]));
  const up = far(distance(a[0], a[2]), distance(b[1], b[0]));
  const value = a[0] / b[0];
  return [value, down === null ? null : value * Math.exp(-down), up === null ? null : value * Math.exp(up)];
}

/** What a ratio with its interval says: "more", "less", "same" (1 lies in it) or "unknown". */
function verdict(ratio) {
  if (!ratio) return "unknown";
  const [, low, high] = ratio;
  if (low !== null && low > 1) return "more";
  if (high !== null && high < 1) return "less";
  return low === null || high === null ? "unknown" : "same";
}

/** The place of the first element of a sorted array that is greater than `value`. */
function above(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

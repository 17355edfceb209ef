/* What an edition's intervals hold of another machine, as machine_spread.py has it; the method's, the power's and the
   answers' words. Knows records; nothing of the document. */

const BUSY_GPU = 0.9; // least busy share at which the GPU is said to decide

/** The half-width in logarithms by which machines differ; 0 for a record that is no edition. busy null: unknown. */
function apartOf({ method }, busy) {
  const edition = method.edition ?? null;
  return edition === null ? 0 : busy !== null && busy >= BUSY_GPU ? edition.gpu : edition.host;
}

const busyOf = (point) => point?.board?.[1] ?? null;

/** [value, low, high] wider by `away`; an unknown end stays unknown. */
function over(three, away) {
  if (!three || !away || !(three[0] > 0)) return three;
  const end = (known, sign) => (!known ? known : three[0] * Math.exp(sign * Math.hypot(Math.log(known / three[0]), away)));
  return [three[0], end(three[1], -1), end(three[2], 1)];
}

/** Figures that wait in queues: a rate that another machine serves a little slower may lengthen them by much. */
const QUEUED = ["first_token", "first_token_actual", "end_to_end", "end_to_end_actual"];

/** A point's figure of three as it is shown: over machines. Within a run figures stay as they are. */
const told = (record, point, three, name = "") => over(three, apartOf(record, point.kind === "open" && QUEUED.includes(name) ? null : busyOf(point)));

/** The same for a rate that keeps a goal: by the point where the engine is at its limit. */
const toldRate = (record, three) => over(three, apartOf(record, busyOf(record.points.find((each) => each.kind === "saturation" && each.board))));

/** Short words for a method: null for the whole one. */
const methodText = ({ edition, short }) => (edition ? "edition" : short ? "short windows" : null);
const briefText = (brief) => [null, "short windows", "edition"][brief];

const EDITION_TEXT = "By the edition's method: two starts of the engine, windows of 20 s; intervals hold another machine of this kind.";
const SHORT_TEXT = "Measured with short windows: read it as a hint.";

const isWrong = (record) => Boolean(record.answers?.wrong);

function answersText({ answers }) {
  if (!answers) return "not compared with a reference";
  return `${answers.wrong ? "wrong: " : ""}${number(answers.kl)} nats from transformers in float32 (at most ${number(answers.kl_most)}), ${share(answers.agree)} of tokens alike, over ${thousands.format(answers.positions)} positions of ${answers.model} with ${answers.flags.join(" ") || "no flags"}`;
}

/** Watts, joules a token and how busy the GPUs were, of a point; in words where nobody measured it. */
function powerText(record, point) {
  if (!point.board) return "not measured";
  const [watts, busy, joules] = point.board;
  return `${number(watts)} W, ${joules ? `${interval(told(record, point, joules))} joules an output token, ` : ""}GPUs busy ${share(busy)}`;
}

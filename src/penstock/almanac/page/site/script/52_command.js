/* The command that would measure what is asked: as a record of the same model was measured, with the question's shape and
   goal. Knows the state and `penstock bench run`; shows nothing. */

const MONKEYS = { n: 64, input: 512, output: 256 }; // what `--shape monkeys` is
const REPLACED = ["--shape", "--suite", "--goal", "--quantile", "--out"]; // options with a word that the question has its own of
const OF_FILES = "Its lengths are those of the file.";

/** The shape as `penstock bench run --shape` takes it; null: no word of it is of these lengths. */
function shapeWord({ kind, input, output, n, shapeName }) {
  if (kind === "exact") return `${input}x${output}`;
  if (kind === "dataset") return `${shapeName}.json`; // a record knows its file by name alone
  if (shapeName.includes("@")) return `${shapeName}.jsonl`;
  if (input !== MONKEYS.input || output !== MONKEYS.output) return null;
  return n === MONKEYS.n ? "monkeys" : `monkeys:${n}`;
}

const ofFile = ({ kind, shapeName }) => kind === "dataset" || (kind === "monkeys" && shapeName.includes("@"));

/** {text, notes}: the command, with what has to be put into it by hand; text null where there is none. `like`: the record
    whose command is taken, null: none. */
function runCommand(like) {
  const shape = shapeWord(state);
  if (shape === null) return { text: null, notes: [`Samples of a shared prompt are measured with ${MONKEYS.input} tokens in and ${MONKEYS.output} out: no command measures other lengths.`] };
  const asked = ["--shape", shape, "--goal", String(state.first), ...(state.quantile === 0.95 ? [] : ["--quantile", String(state.quantile)])];
  const notes = ofFile(state) ? [OF_FILES] : [];
  const kept = like && keptWords(like.client.command);
  if (kept) {
    const whose = `${nameOf(like)} was measured so on ${machineLabel(like)}`;
    return { text: [...kept, ...asked].map(shellWord).join(" "), notes: [...notes, `${whose}: put your own in the place of its files and folders.`] };
  }
  const model = state.model.replace(/ \([^()]*\)$/, "");
  const random = state.model.endsWith("random weights)") ? ["--random-weights"] : [];
  return {
    text: ["penstock", "bench", "run", "--engine", state.engine || "ENGINE", "--model", "MODEL", ...asked, ...random].map(shellWord).join(" "),
    notes: [...notes, state.engine ? `If it cannot start ${state.engine}: a server's URL in the place of --engine, and --engine-name ${shellWord(state.engine)}.`
      : "ENGINE: the name of an engine that it can start; for a server that is there, its URL in the place of --engine ENGINE.",
      `MODEL: ${model ? `of ${model}, ` : ""}its folder, file or id.`],
  };
}

/** The words of a record's command but for those that the question replaces; null: it is no `penstock bench run`. */
function keptWords(command) {
  const words = shellWords(command);
  if (!words || words.slice(0, 3).join(" ") !== "penstock bench run") return null;
  const kept = words.slice(0, 3);
  for (let at = 3; at < words.length; at++) {
    if (REPLACED.includes(words[at])) at += 1; // its value is the next word
    else if (!REPLACED.some((name) => words[at].startsWith(`${name}=`))) kept.push(words[at]);
  }
  return kept;
}

/** A line as a POSIX shell splits it, nothing expanded; null: a quote is left open. */
function shellWords(line) {
  const words = [];
  let [word, quote] = [null, ""];
  for (let at = 0; at < line.length; at++) {
    const letter = line[at];
    if (letter === quote) quote = "";
    else if (quote === "'") word += letter;
    else if (letter === "\\" && (!quote || '"\\$`'.includes(line[at + 1]))) { at += 1; word = (word ?? "") + (line[at] ?? ""); }
    else if (quote) word += letter;
    else if (letter === "'" || letter === '"') { quote = letter; word ??= ""; }
    else if (letter !== " " && letter !== "\t") word = (word ?? "") + letter;
    else if (word !== null) { words.push(word); word = null; }
  }
  if (quote) return null;
  return word === null ? words : [...words, word];
}

/** The record whose command serves best for what is asked, loaded: of the model and, if one is chosen, the engine; on the
    same machine rather than on another, then by its lengths. null: none. */
async function recordLike() {
  const [head] = nearestHeads((each) => each.points && (!state.engine || each.engine === state.engine));
  if (!head) return null;
  const records = head.yours ? [head.record] : await loadGroup(head.group);
  return records.find((record) => record.run === head.run) ?? null;
}

/** Heads of the model that was asked about, the nearest in machine, kind of work and lengths first; one a subject. */
function nearestHeads(keep) {
  const near = allHeads().filter((head) => head.model === state.model && keep(head));
  const distance = (head) => (head.machine === state.machine ? 0 : 10) + (head.kind === state.kind ? 0 : 5) +
    Math.abs(Math.log(head.input / state.input)) + Math.abs(Math.log(head.output / state.output));
  const subjects = new Map([...near].reverse().map((head) => [JSON.stringify(subjectOf(head)), head]));
  return [...subjects.values()].sort((a, b) => distance(a) - distance(b));
}

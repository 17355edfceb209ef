/* What is being asked, and its place in the address: everything that can be chosen is after the #, so a link, a reload
   and the back button restore it. Knows what may be chosen, not how it looks. */

const VIEWS = ["question", "job", "summary", "findings", "method", "data"];
const LIMITS = { first: [0.001, 1000], quantile: [0.01, 0.999], pace: [0.0001, 1000], price: [0, 1e6], length: [1, 1e7], count: [1, 1e10] };

const fresh = () => ({
  view: "question", model: "", machine: "", kind: "exact", input: 1024, output: 128, n: 1, shapeName: "", engine: "",
  quantile: 0.95, first: 1, perToken: null, endToEnd: null, price: null, older: false, left: "", right: "",
  point: "", engineFilter: "", modelFilter: "", machineFilter: "", text: "",
  jobRows: 1e6, jobInput: 500, jobOutput: 200, jobN: 1, jobEnds: false,
});

const state = fresh();
const notes = []; // what an address asked for and could not have, in words

/* Short names in the address, and how each is read. */
const KEYS = {
  m: ["model", "text"], g: ["machine", "text"], k: ["kind", "text"], i: ["input", "length"], o: ["output", "length"],
  n: ["n", "length"], s: ["shapeName", "text"], e: ["engine", "text"], q: ["quantile", "quantile"], z: ["first", "first"],
  t: ["perToken", "pace"], f: ["endToEnd", "pace"], p: ["price", "price"], old: ["older", "switch"], a: ["left", "text"],
  b: ["right", "text"], at: ["point", "text"], fe: ["engineFilter", "text"], fm: ["modelFilter", "text"],
  fg: ["machineFilter", "text"], x: ["text", "text"], jr: ["jobRows", "count"], ji: ["jobInput", "length"],
  jo: ["jobOutput", "length"], jn: ["jobN", "length"], je: ["jobEnds", "switch"],
};

/** The address of a state. What is as usual is left out. */
function addressOf(wanted) {
  const usual = fresh();
  const words = new URLSearchParams();
  for (const [key, [name, kind]] of Object.entries(KEYS)) {
    const value = wanted[name];
    if (value === usual[name] || value === null) continue;
    words.set(key, kind === "switch" ? "1" : String(value));
  }
  const query = words.toString();
  return `#${wanted.view}${query ? `?${query}` : ""}`;
}

/** Reads the address into the state; what it cannot mean goes into `notes`. One that names a model names all of its
    subject that is not as in `fresh`, so the usual subject fills in only where none is named. */
function readAddress() {
  clearTimeout(pendingAddress);
  const [view, query = ""] = location.hash.slice(1).split("?");
  const words = new URLSearchParams(query);
  Object.assign(state, fresh(), words.has("m") ? {} : usualSubject());
  notes.length = 0;
  if (VIEWS.includes(view)) state.view = view;
  else if (view) notes.push(`The address names a page "${view.slice(0, 60)}", which is none.`);
  for (const [key, value] of words) {
    const known = KEYS[key];
    if (!known) { notes.push(`The address has a word "${key.slice(0, 60)}", which means nothing here.`); continue; }
    const read = readValue(known[1], value);
    if (read === undefined) notes.push(`The address asks for ${known[0]} = ${value.slice(0, 60)}, which cannot be.`);
    else state[known[0]] = read;
  }
}

function readValue(kind, text) {
  if (kind === "text") return text.slice(0, 400);
  if (kind === "switch") return text === "1";
  const value = Number(text);
  const [low, high] = LIMITS[kind];
  return text.trim() !== "" && Number.isFinite(value) && value >= low && value <= high ? value : undefined;
}

const USUAL_SIZE = 8e9; // parameters of the model that most would ask about
const USUAL_LENGTHS = [1000, 1000]; // and tokens in and out

/** What an untouched page asks about, for it is what most would: a GPU, exact lengths, two engines or more, a model near 8 B
    and lengths near 1,000 in and out, as far as measured; then the newest. */
function usualSubject() {
  const about = new Map();
  for (const head of data.heads) {
    const key = `${head.group}`;
    if (!about.has(key)) about.set(key, { engines: new Set(), when: "", head });
    const found = about.get(key);
    if (head.points) found.engines.add(head.engine);
    if (head.when > found.when) found.when = head.when;
  }
  const size = ({ head }) => (head.parameters ? Math.abs(Math.log(head.parameters / USUAL_SIZE)) : 99);
  const lengths = ({ head }) => Math.abs(Math.log(head.input / USUAL_LENGTHS[0])) + Math.abs(Math.log(head.output / USUAL_LENGTHS[1]));
  const better = (a, b) => (b.engines.size > 1) - (a.engines.size > 1) || (b.head.gpus > 0) - (a.head.gpus > 0) ||
    (b.head.kind === "exact") - (a.head.kind === "exact") || size(a) - size(b) || lengths(a) - lengths(b) || (a.when < b.when ? 1 : a.when > b.when ? -1 : 0);
  const [best] = [...about.values()].sort(better);
  return best ? subjectOf(best.head) : {};
}

const subjectOf = ({ model, machine, kind, input, output, n, shapeName }) =>
  ({ model, machine, kind, input, output, n: kind === "exact" ? 1 : n, shapeName: kind === "exact" ? "" : shapeName });

/** Changes the state and shows it. `step`: a new entry for the back button; else the present one is rewritten. */
function change(changes, { step = true } = {}) {
  Object.assign(state, changes);
  clearTimeout(pendingAddress); // an address that waits to be written is older than this one
  const address = addressOf(state);
  if (address !== location.hash) {
    if (step) history.pushState(null, "", address);
    else replaceAddress(address);
  }
  show();
}

let pendingAddress = 0; // browsers allow few rewrites a second: a slider's last one counts

function replaceAddress(address) {
  pendingAddress = setTimeout(() => history.replaceState(null, "", address), 150);
}

const questionNow = () => ({ quantile: state.quantile, first: state.first, perToken: state.perToken, endToEnd: state.endToEnd });

/* The question as a sentence with choices in it, the slider of its limit, and the further conditions. Changes the state
   and shows it; knows no answer. */

const QUANTILES = [0.5, 0.8, 0.9, 0.95, 0.99];
const FIRSTS = [0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10, 30];
const PACES = [0.01, 0.02, 0.05, 0.1, 0.2];
const ENDS = [5, 10, 30, 60, 300];
const SLIDER_STEPS = 600;
const SLIDER = [0.01, 100]; // seconds at its ends

/** Fills a <select>: `options` of [value, text, unmeasured]; a chosen value that is not among them is added, marked. */
function choices(select, options, chosen, missing = `${chosen} (not in this almanac)`) {
  const all = options.some(([value]) => value === chosen) ? options : [...options, [chosen, missing, true]];
  const key = JSON.stringify([all, chosen]);
  if (select.dataset.key === key) return; // leave an open list alone
  select.dataset.key = key;
  put(select, all.map(([value, text, unmeasured]) =>
    el("option", { value, class: unmeasured ? "unmeasured" : null, text: unmeasured && options.length > 1 && value !== chosen ? `${text} · not measured` : text })));
  select.value = String(chosen);
  fitted(select);
}

/** A <select> as wide as what it shows, in browsers that don't do it by themselves. */
function fitted(select) {
  if (CSS.supports("field-sizing", "content")) return;
  const text = select.selectedOptions[0]?.textContent ?? "";
  select.style.width = `calc(${Math.max(text.length, 2)}ch * 0.94 + 1.6em)`;
}

const unique = (values) => [...new Set(values)];

function showSentence() {
  const heads = allHeads();
  const here = heads.filter((head) => head.model === state.model && head.machine === state.machine);
  const ofModel = heads.filter((head) => head.model === state.model);
  const machines = unique(ofModel.map((head) => head.machine));
  choices(byId("ask-model"), unique(heads.map((head) => head.model)).sort().map((model) => [model, model]), state.model, state.model ? undefined : "a model");
  choices(byId("ask-machine"), unique(heads.map((head) => head.machine)).sort().map((machine) => [machine, machine, !machines.includes(machine)]), state.machine, state.machine ? undefined : "a machine");
  choices(byId("ask-engine"), [["", "any engine"], ...unique(heads.map((head) => head.engine)).sort().map((engine) => [engine, engine])], state.engine);
  showLengths(heads, here);
  choices(byId("ask-quantile"), QUANTILES.map((value) => [String(value), share(value)]), String(state.quantile));
  const first = String(state.first);
  choices(byId("ask-first"), withOwn(FIRSTS, state.first).map((value) => [String(value), time(value)]), first);
  choices(byId("ask-pace"), [["", "any pace"], ...withOwn(PACES, state.perToken).map((value) => [String(value), `at most ${time(value)} each`])], state.perToken === null ? "" : String(state.perToken));
  choices(byId("ask-end"), [["", "any time"], ...withOwn(ENDS, state.endToEnd).map((value) => [String(value), `at most ${time(value)}`])], state.endToEnd === null ? "" : String(state.endToEnd));
  const slider = byId("first-slider");
  slider.value = String(Math.round((Math.log(state.first / SLIDER[0]) / Math.log(SLIDER[1] / SLIDER[0])) * SLIDER_STEPS));
  slider.setAttribute("aria-valuetext", time(state.first));
  byId("first-value").textContent = time(state.first);
  const price = byId("price");
  if (document.activeElement !== price) {
    price.value = state.price === null ? "" : String(state.price);
    showPriceFault(false);
  }
}

const withOwn = (values, own) => (own === null || values.includes(own) ? values : [...values, own].sort((a, b) => a - b));

/** Lengths in and out, and the kind of work where there is more than one. */
function showLengths(heads, here) {
  const works = unique(here.map(workOf));
  const work = workOf(state);
  const workChoice = byId("ask-work");
  byId("ask-work-part").hidden = works.length < 2 && work === workOf({ kind: "exact" }) ;
  choices(workChoice, unique([workOf({ kind: "exact" }), ...works]).map((value) => [value, workText(value)]), work);
  const sameWork = (head) => workOf(head) === work;
  const lengths = (name, among) => unique(among.filter(sameWork).map((head) => head[name])).sort((a, b) => a - b);
  const inputs = lengths("input", here);
  const outputs = lengths("output", here);
  const paired = new Set(here.filter((head) => sameWork(head) && head.input === state.input).map((head) => head.output));
  const option = (value, unmeasured) => [String(value), thousands.format(value), unmeasured];
  choices(byId("ask-input"), [...inputs.map((value) => option(value, false)), ["other", "another length…"]], String(state.input), thousands.format(state.input));
  choices(byId("ask-output"), [...outputs.map((value) => option(value, !paired.has(value))), ["other", "another length…"]], String(state.output), thousands.format(state.output));
}

const workOf = ({ kind, n, shapeName }) => (kind === "exact" ? "exact" : JSON.stringify([kind, n, shapeName]));

function workText(work) {
  if (work === "exact") return "one answer each";
  const [kind, n, name] = JSON.parse(work);
  return kind === "monkeys" ? `${plural(n, "sample")} of each prompt` : `prompts of ${name}`;
}

/** Asks for a length that is not in the list. */
function otherLength(select, name) {
  const box = el("input", { type: "number", min: 1, max: 1e7, step: 1, class: "choice length", "aria-label": `Tokens ${name === "input" ? "in" : "out"}` });
  box.value = String(state[name]);
  let over = false; // taking the box away blurs it
  const done = (take) => {
    if (over) return;
    over = true;
    const value = readValue("length", box.value);
    box.replaceWith(select);
    delete select.dataset.key;
    change(take && value !== undefined ? { [name]: Math.round(value), point: "" } : {});
    select.focus();
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter") done(true);
    if (event.key === "Escape") done(false);
  });
  box.addEventListener("blur", () => done(true));
  select.replaceWith(box);
  box.focus();
  box.select();
}

function listenToSentence() {
  const listen = (id, take) => byId(id).addEventListener("change", (event) => {
    fitted(event.target);
    const changes = take(event.target.value, event.target);
    if (changes) change({ point: "", ...changes });
  });
  listen("ask-model", (model) => ({ model, ...nearestSubject({ model }) }));
  listen("ask-machine", (machine) => ({ machine, ...nearestSubject({ machine }) }));
  listen("ask-engine", (engine) => ({ engine }));
  listen("ask-work", (work) => {
    if (work === "exact") return { kind: "exact", n: 1, shapeName: "", ...firstLengths((head) => head.kind === "exact") };
    const [kind, n, shapeName] = JSON.parse(work);
    return { kind, n, shapeName, ...firstLengths((head) => workOf(head) === work) };
  });
  listen("ask-input", (value, select) => (value === "other" ? otherLength(select, "input") : { input: Number(value), ...pairedOutput(Number(value)) }));
  listen("ask-output", (value, select) => (value === "other" ? otherLength(select, "output") : { output: Number(value) }));
  listen("ask-quantile", (value) => ({ quantile: Number(value) }));
  listen("ask-first", (value) => ({ first: Number(value) }));
  listen("ask-pace", (value) => ({ perToken: value === "" ? null : Number(value) }));
  listen("ask-end", (value) => ({ endToEnd: value === "" ? null : Number(value) }));
  byId("first-slider").addEventListener("input", (event) => {
    const exact = SLIDER[0] * (SLIDER[1] / SLIDER[0]) ** (Number(event.target.value) / SLIDER_STEPS);
    change({ first: Number(exact.toPrecision(2)), point: "" }, { step: false });
  });
  byId("price").addEventListener("input", (event) => {
    const { value: text, validity } = event.target; // of what is no number the text is empty
    const value = text.trim() === "" && !validity.badInput ? null : readValue("price", text);
    showPriceFault(value === undefined);
    if (value !== undefined) change({ price: value }, { step: false });
  });
  byId("older").addEventListener("change", (event) => change({ older: event.target.checked }));
}

/** Says of a price that cannot be that it is not taken, and which is. */
function showPriceFault(is) {
  const [low, high] = LIMITS.price;
  const used = state.price === null ? "what the runs state, if anything" : `${money(state.price)} an hour`;
  byId("price").setAttribute("aria-invalid", String(is));
  byId("price-fault").hidden = !is;
  byId("price-fault").textContent = is ? `A price an hour is from ${low} to ${thousands.format(high)} dollars. What was typed is not taken; costs are still at ${used}.` : "";
}

/** Where the lengths asked about are not measured for a new model or machine: those that are. */
function nearestSubject(changes) {
  const wanted = { ...state, ...changes };
  const of = allHeads().filter((head) => head.model === wanted.model && head.machine === wanted.machine);
  const same = of.some((head) => workOf(head) === workOf(wanted) && head.input === wanted.input && head.output === wanted.output);
  return same || !of.length ? {} : subjectOf(of.find((head) => head.kind === "exact") ?? of[0]);
}

function firstLengths(keep) {
  const head = allHeads().find((each) => each.model === state.model && each.machine === state.machine && keep(each));
  return head ? { input: head.input, output: head.output } : {};
}

/** Keeps the output where it was measured with this input, else takes one that was. */
function pairedOutput(input) {
  const of = allHeads().filter((head) => head.model === state.model && head.machine === state.machine && workOf(head) === workOf(state) && head.input === input);
  return !of.length || of.some((head) => head.output === state.output) ? {} : { output: of[0].output };
}

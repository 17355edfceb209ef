/* The drawer: all that is known of one point, and all that is needed to measure it again. Knows records. */

const SPREAD_NAMES = {
  first_token: "First token", first_token_actual: "First token, from the actual start", inter_token: "Between tokens",
  per_token: "A token", end_to_end: "Whole answer", end_to_end_actual: "Whole answer, from the actual start",
};
const RATE_NAMES = { request_rate: "Requests a second", output_rate: "Output tokens a second", total_rate: "Tokens a second, in and out" };

/** Shows the point that the state names, or closes the drawer. */
function showDrawer(records) {
  const drawer = byId("drawer");
  if (!state.point) {
    if (drawer.open) drawer.close();
    return;
  }
  const [run] = state.point.split("/", 1);
  const record = records.find((each) => each.run === run);
  const point = record?.points.find((each) => each.name === state.point.slice(run.length + 1)) ?? null;
  put(byId("drawer-body"), record ? drawerOf(record, point) : [el("h2", { text: "Not here" }), el("p", { text: `The address names a point ${state.point.slice(0, 80)}, which is not among the records of this question.` })]);
  if (!drawer.open) drawer.showModal();
  drawer.scrollTop = 0;
}

function listenToDrawer() {
  const drawer = byId("drawer");
  drawer.addEventListener("close", () => { if (state.point) change({ point: "" }); });
  drawer.addEventListener("click", (event) => { if (event.target === drawer) drawer.close(); });
  byId("drawer-close").addEventListener("click", () => drawer.close());
}

function drawerOf(record, point) {
  return [
    el("h2", { id: "drawer-title", text: nameOf(record) }),
    el("p", { class: "aside", text: point ? `${pointText(point)} · point “${point.name}” · measured` : "the whole run" }),
    record.yours ? el("p", { class: "warn", text: `Yours: from a file that was dropped here. ${OWN_CHECKED}` }) : null,
    point ? careOf(record, point) : null,
    point ? figuresOf(record, point, record.machine.gpu?.count ?? 0) : null,
    againOf(record),
    el("h3", { text: "What ran" }), facts(whatRan(record)),
    filesOf(record),
    el("h3", { text: "How it was measured" }), facts(howMeasured(record, point)),
  ];
}

const facts = (rows) => el("dl", {}, rows.filter(([, value]) => value !== null && value !== undefined && value !== "")
  .map(([name, value]) => [el("dt", { text: name }), el("dd", {}, value instanceof Node ? value : String(value))]));

/** Why to read it with care. */
function careOf(record, point) {
  const reasons = [
    ...(point.client.short ? ["The client may have been the limit: this point is never ranked."] : []),
    ...(isWrong(record) ? [`The engine answers wrongly: ${answersText(record)}. Ranked last.`] : []),
    ...(record.method.edition ? [EDITION_TEXT] : record.method.short ? ["Measured with shorter windows or fewer requests than the method asks: a hint."] : []),
    ...point.marks,
  ];
  return reasons.length ? [el("h3", { text: "Read it with care" }), el("ul", { class: "marks" }, reasons.map((text) => el("li", { text })))] : null;
}

function figuresOf(record, point, gpus) {
  const wide = (name) => (three) => told(record, point, three, name);
  const figures = Object.fromEntries(Object.entries(point.figures).map(([name, value]) =>
    [name, !value ? value : Array.isArray(value[0]) ? value.map(wide(name)) : wide(name)(value)]));
  const met = shareOfPoint(point);
  const rows = Object.entries(SPREAD_NAMES).filter(([name]) => figures[name]).map(([name, title]) => [title, ...figures[name].map((three) => stacked(three, time))]);
  return [
    el("h3", { text: "Figures" }),
    facts([
      [`Met the question's goal`, met ? `${share(met[0])} (${share(met[1])} to ${share(met[2])}), ${met[3] ? "of all its requests" : `from a sample of ${point.sample.first.length}`}` : null],
      ...Object.entries(RATE_NAMES).map(([name, title]) => [title, figures[name] ? peakText(figures[name]) : null]),
      ["Output tokens a second, a GPU", gpus > 1 && figures.output_rate ? interval(figures.output_rate.map((each) => (each === null ? null : each / gpus))) : null],
      ["For one user", figures.per_token ? `${number(1 / figures.per_token[1][0])} tokens a second (median)` : null],
      ["Power of the boards", powerText(record, point)],
      ["Accepted draft tokens a step", point.accepted_drafts === undefined || point.accepted_drafts === null ? null : number(point.accepted_drafts)],
      ["Requests", `${thousands.format(point.requests)} issued, ${thousands.format(point.complete)} complete${Object.entries(point.outcomes).map(([name, count]) => `, ${thousands.format(count)} ${name}`).join("")}, in ${time(point.seconds)}`],
      ["Tokens", `${thousands.format(point.prompt_tokens)} in (${thousands.format(point.cached_tokens)} cached), ${thousands.format(point.output_tokens)} out`],
    ]),
    rows.length ? table("Times over the complete requests", ["", "Mean", "Median", "p90", "p95", "p99"], rows, { file: "times.csv", numeric: [1, 2, 3, 4, 5] }) : null,
    point.goals.length ? table("First token within", ["Goal", "Share of all", "95 % interval", "Goodput /s"], point.goals.map(([seconds, value, low, high, good]) => [time(seconds), share(value), `${share(low)} to ${share(high)}`, number(good)]), { file: "goals.csv", numeric: [1, 2, 3] }) : null,
  ];
}

function shareOfPoint(point) {
  const [ready] = prepared({ points: [point] }, questionNow());
  return ready.rows || ready.goals.length ? shareAt(ready, state.first) : null;
}

function againOf(record) {
  return [
    el("h3", { text: "Run it again" }),
    el("p", { class: "label", text: "The engine, as one command" }), commandBox(engineCommand(record)),
    record.model.weights === "random" ? el("p", { class: "aside", text: `Its weights are random. In a checkout of Penstock, python benchmarks/random_model.py makes such a folder of ${record.model.name}, with config and tokenizer.` }) : null,
    modalApp(record) ? el("details", {}, el("summary", { text: "The engine as a Modal app" }),
      el("p", { class: "aside", text: "To be saved as app.py; then: modal serve app.py. The almanac did not run it there." }), el("pre", { tabindex: "0", text: modalApp(record) }), copyButton(modalApp(record))) : null,
    el("p", { class: "label", text: "The measurement" }), commandBox(record.client.command || "(not recorded)"),
  ];
}

const ON_PYPI = ["vllm", "sglang", "transformers"]; // engines that a package of this name and version brings
const OF_THE_MACHINE = ["CUDA_HOME", "CUDA_PATH"]; // variables that name folders of the machine that was measured

/** Packages that bring the engine. A version's part after + names a build that PyPI has not. */
const packagesOf = ({ name, version }) => (name === "transformers" ? [`transformers[serving]==${version.split("+")[0]}`, "torch"] : [`${name}==${version.split("+")[0]}`]);

const variablesOf = ({ configuration }) => Object.entries(configuration.environment ?? {}).filter(([name]) => !OF_THE_MACHINE.includes(name));

/** What installs the engine, where a package does, sets its variables and starts it, in one line for a shell. */
function engineCommand({ engine }) {
  if (!engine.command) return "(not recorded)";
  const variables = variablesOf(engine).map(([name, value]) => `${name}=${shellWord(value)}`);
  const install = ON_PYPI.includes(engine.name) ? `pip install ${packagesOf(engine).map(shellWord).join(" ")} && ` : "";
  return `${install}${[...variables, engine.command].join(" ")}`;
}

/** A Modal app that serves the engine as the record's command did; null: no package of its version, no GPU, or
    random weights, whose folder is nowhere to be had. */
function modalApp({ engine, machine, model }) {
  const gpu = machine.gpu?.name.match(/\b(B200|H200|H100|A100|L40S|L4|T4)\b/)?.[1];
  if (!gpu || model.weights === "random" || !ON_PYPI.includes(engine.name)) return null;
  const text = JSON.stringify; // a JSON string of ASCII is a Python string too
  const variables = variablesOf(engine);
  return `import subprocess

import modal

image = modal.Image.debian_slim(python_version="3.12").pip_install(${packagesOf(engine).map(text).join(", ")})
${variables.length ? `image = image.env({${variables.map(([name, value]) => `${text(name)}: ${text(value)}`).join(", ")}})\n` : ""}app = modal.App(${text(`almanac-${engine.name}`)})


@app.function(image=image, gpu="${gpu}${machine.gpu.count > 1 ? `:${machine.gpu.count}` : ""}", timeout=3600)
@modal.concurrent(max_inputs=1000)
@modal.web_server(port=8000, startup_timeout=900)
def serve():
    subprocess.Popen(${text(engine.command.replaceAll("127.0.0.1", "0.0.0.0"))}, shell=True)
`;
}

function whatRan(record) {
  const { engine, model, machine, shape } = record;
  const { gpu } = machine;
  return [
    ["Engine", `${engine.name} ${engine.version}`], ["Commit", engine.commit],
    ["Its installation lacks", engine.lacks?.length ? listed(engine.lacks) : null],
    ["Configuration", engine.configuration.name],
    ["Flags", engine.configuration.flags.length ? el("ul", { class: "plain" }, engine.configuration.flags.map((flag) => el("li", {}, el("code", { text: flag })))) : "none"],
    ["Environment", Object.entries(engine.configuration.environment ?? {}).map(([name, value]) => `${name}=${value}`).join("  ")],
    ["Model", `${model.name}, ${model.dtype}, ${model.weights} weights${model.parameters ? `, ${number(model.parameters / 1e9)} billion parameters` : ""}`], ["From", model.source],
    ["Shape", `${shape.name}: ${shape.kind}, ${number(shape.input)} in, ${number(shape.output)} out${(shape.n ?? 1) > 1 ? `, ${shape.n} samples` : ""}, temperature ${shape.temperature ?? 0}, prompts as ${shape.prompts}`], ["Data", shape.source],
    ["GPU", gpu ? `${gpu.count} x ${gpu.name}, ${thousands.format(gpu.memory_mib)} MiB` : "none"], ["Driver", gpu?.driver], ["Clocks", gpu?.clocks],
    ["CPU", `${machine.cpu}, ${coresTold(machine)}, ${thousands.format(machine.memory_mib)} MiB`], ["Machine", machine.identity], ["System", `${machine.system}, Python ${machine.python}`],
  ];
}

function filesOf(record) {
  return Object.entries(record.engine.configuration.files ?? {}).map(([name, text]) =>
    el("details", {}, el("summary", { text: `File ${name}` }), el("pre", { tabindex: "0", text })));
}

function howMeasured(record, point) {
  const { client, method } = record;
  return [
    ["When", record.when.replace("T", " ").replace("Z", " UTC")],
    ["Client", `Penstock ${client.penstock}${client.commit ? ` at ${client.commit}` : ""}, ${client.processes === 1 ? "1 process" : `${client.processes} processes`}, seed ${client.seed}`],
    ["Its ceiling", client.ceiling_events ? `${number(client.ceiling_events)} events a second` : "not calibrated"],
    ["At this point", point ? `loop lag p99 ${time(point.client.lag_p99)}, busiest process ${share(point.client.busy)}, ${(point.client.headroom ?? null) === null ? "headroom unknown" : `${number(point.client.headroom)} times what was asked`}, sent late p99 ${time(point.client.late_p99)}` : null],
    ["Method", `warm-up ${time(method.warm_up)}, windows up to ${time(method.window)}, ${plural(method.starts, "start")} of the server, ${thousands.format(method.enough)} requests aimed at near a crossing`],
    ["Its term for another machine", method.edition ? `${share(Math.expm1(method.edition.gpu))} where the GPU was busy, ${share(Math.expm1(method.edition.host))} where not or unknown: ${method.edition.measured}` : null],
    ["Right answers", answersText(record)],
    ["Starts on machines", method.machines?.length ? method.machines.join(", ") : null],
    ["Price stated", (method.price_per_hour ?? null) === null ? null : `${money(method.price_per_hour)} an hour, on ${record.when.slice(0, 10)}`],
    ["Record", el("code", { text: record.file })], ["Run", record.run],
    ["Raw data", record.raw ? el("code", { class: "hash", text: `sha256 ${record.raw.sha256}, ${thousands.format(record.raw.rows)} rows` }) : "none"],
  ];
}

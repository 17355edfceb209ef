/* All records as a list with filters, the files to take away, and the reader's own file. Knows heads and the checker. */

const LIST_ROWS = 100;
let listed_rows = LIST_ROWS; // how many rows the list shows; more when asked

function showData() {
  const heads = allHeads();
  for (const [id, name, field, any] of [["filter-engine", "engine", "engineFilter", "any engine"], ["filter-model", "model", "modelFilter", "any model"], ["filter-machine", "machine", "machineFilter", "any machine"]]) {
    choices(byId(id), [["", any], ...unique(heads.map((head) => head[name])).sort().map((value) => [value, value])], state[field]);
  }
  const text = byId("filter-text");
  if (document.activeElement !== text) text.value = state.text;
  const wanted = state.text.toLowerCase();
  const found = heads.filter((head) =>
    (!state.engineFilter || head.engine === state.engineFilter) && (!state.modelFilter || head.model === state.modelFilter) &&
    (!state.machineFilter || head.machine === state.machineFilter) &&
    (!wanted || [head.engine, head.version, head.configuration, head.model, head.machine, head.shapeName, head.run, head.when].join(" ").toLowerCase().includes(wanted)))
    .sort((a, b) => (a.when < b.when ? 1 : a.when > b.when ? -1 : 0));
  byId("filter-count").textContent = `${plural(found.length, "run")} of ${thousands.format(heads.length)}`;
  const rows = found.slice(0, listed_rows).map((head) => [
    head.when.slice(0, 10), el("a", { href: addressOf({ ...fresh(), ...subjectOf(head), older: true, point: `${head.run}/` }), text: headName(head) }),
    head.model, head.machine, workName(head), head.points, peakText(head.peak), head.first ? time(head.first[0]) : "–", head.joules ? number(head.joules[0]) : "–",
    [head.yours ? "yours" : null, briefText(head.brief), head.wrong ? "answers wrongly" : null, head.failures ? plural(head.failures, "failure") : null, head.short ? `client short at ${head.short}` : null].filter(Boolean).join(", ") || "–",
  ]);
  put(byId("record-list"), table("Runs, newest first", ["Date", "Engine", "Model", "Machine", "Shape", "Points", "Highest requests/s", "First token alone", "J/token", "Marks"], rows, { file: "runs.csv", numeric: [5, 6, 7, 8] }),
    found.length > listed_rows ? el("button", { type: "button", text: `Show ${Math.min(LIST_ROWS, found.length - listed_rows)} more`, onclick: () => { listed_rows += LIST_ROWS; showData(); } }) : null);
  showDownloads();
}

function showDownloads() {
  const about = { "records.json": "every record as it was handed in, with its samples", "points.csv": "a line a point with its figures, goals and outcomes; a line a failure", "points.parquet": "the same, with the samples" };
  put(byId("downloads"), data.index.downloads.map(([name, bytes]) => el("li", {}, el("a", { href: `data/${name}`, download: name, text: name }), ` ${bytes < 1e6 ? `${number(bytes / 1e3)} kB` : `${number(bytes / 1e6)} MB`}: ${about[name]}`)));
  const { refused } = data.index;
  byId("refused-part").hidden = !refused.length;
  put(byId("refused"), refused.map(([name, why]) => el("li", {}, el("code", { text: name }), `: ${why}`)));
}

function listenToData() {
  for (const [id, field] of [["filter-engine", "engineFilter"], ["filter-model", "modelFilter"], ["filter-machine", "machineFilter"]]) {
    byId(id).addEventListener("change", (event) => { listed_rows = LIST_ROWS; change({ [field]: event.target.value }); });
  }
  byId("filter-text").addEventListener("input", (event) => { listed_rows = LIST_ROWS; change({ text: event.target.value.slice(0, 200) }, { step: false }); });
}

/* --- the reader's own file */

function listenToDrops() {
  const files = (list) => { for (const file of list) takeOwn(file); };
  for (const box of document.querySelectorAll("input[type=file]")) {
    box.addEventListener("change", () => { files([...box.files]); box.value = ""; });
  }
  let depth = 0; // of entered elements: leaving a child is not leaving the page
  const over = (by) => { depth = Math.max(depth + by, 0); document.body.classList.toggle("dropping", depth > 0); };
  addEventListener("dragenter", (event) => { event.preventDefault(); over(1); });
  addEventListener("dragleave", () => over(-1));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    over(0);
    files([...event.dataTransfer.files]);
  });
}

/** Checks a file; a good one joins the records, and the question goes to what it is about. */
async function takeOwn(file) {
  const found = await readOwn(file);
  const name = file.name.slice(0, 120);
  if (found.faults) {
    say(`${name} was not taken: ${found.faults.slice(0, 3).join("; ")}${found.faults.length > 3 ? `; and ${found.faults.length - 3} more` : ""}.`, "warn");
    return;
  }
  const known = allHeads().some((head) => head.run === found.record.run);
  if (known) {
    say(`${name} was not taken: a run ${found.record.run} is here already.`, "warn");
    return;
  }
  data.yours.push(found.record);
  const head = ownHead(found.record);
  say(`${name} is shown, marked as yours. It stays in this page alone, until you close it. ${OWN_CHECKED}`, "good");
  change({ view: "question", ...subjectOf(head), engine: "", point: "" });
}

/** A line that is read aloud too. */
function say(text, kind) {
  const line = el("p", { class: kind }, text, " ", el("button", { type: "button", class: "small", text: "Close", onclick: () => line.remove() }));
  byId("said").append(line);
}

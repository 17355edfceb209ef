/* Joins the parts: reads the address, loads what the question is about, shows it. One way: choice -> state -> address -> show. */

const shown = { view: "", about: "", records: [], like: null, ready: new Map(), question: "" };

/** The answers of the loaded records, in order. What does not hang on the first-token limit is kept between calls. */
function answersNow() {
  const question = questionNow();
  const key = JSON.stringify([question.perToken, question.endToEnd]);
  if (shown.question !== key) { shown.ready.clear(); shown.question = key; }
  const records = (state.older ? shown.records : newest(shown.records)).filter((record) => !state.engine || record.engine.name === state.engine);
  return ranked(records.map((record) => {
    if (!shown.ready.has(record)) shown.ready.set(record, prepared(record, question));
    return answerOf(record, question, shown.ready.get(record));
  }));
}

let turn = 0; // the newest call of `show`: an older one that was still loading gives way

async function show() {
  const mine = ++turn;
  for (const view of VIEWS) byId(`view-${view}`).hidden = view !== state.view;
  for (const link of document.querySelectorAll("nav a")) {
    const view = link.dataset.view;
    link.setAttribute("href", addressOf({ ...state, view, point: "" }));
    if (view === state.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shown.view && shown.view !== state.view) scrollTo(0, 0);
  shown.view = state.view;
  put(byId("notes"), notes.map((text) => el("p", { class: "warn", text })));
  if (state.view === "summary") showSummary();
  if (state.view === "findings") showFindings();
  if (state.view === "data") showData();
  if (state.view === "job") showJob(mine).catch((error) => { if (mine === turn) say(`${error.message}.`, "warn"); });
  document.title = state.view === "question" ? `Almanac: ${state.model || "how fast is any engine"}` : `Almanac: ${state.view}`;
  if (state.view !== "question") { showDrawer(shown.records); return; }
  showSentence();
  const about = JSON.stringify([subjectOf(state), state.engine, data.yours.length]);
  if (shown.about !== about) {
    try {
      const records = await recordsAbout(subjectOf(state));
      const answered = records.some((record) => !state.engine || record.engine.name === state.engine);
      const like = answered ? null : await recordLike();
      if (mine !== turn) return;
      Object.assign(shown, { about, records, like });
      shown.ready.clear();
    } catch (error) {
      if (mine === turn) say(`${error.message}.`, "warn");
      return;
    }
  }
  showQuestion();
}

function showQuestion() {
  const answers = answersNow();
  const colours = coloursOf(answers);
  byId("older").checked = state.older;
  byId("older-part").hidden = newest(shown.records).length === shown.records.length;
  showAnswer(answers);
  showRanking(answers, colours);
  showCurve(answers, colours);
  showUsers(answers, colours);
  showVersions(shown.records);
  showCompare(answers);
  showFailures(state.older ? shown.records : newest(shown.records));
  showDrawer(shown.records);
}

function listenToTheme() {
  const stored = localStorage.getItem("almanac-theme");
  const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const button = byId("theme");
  const tell = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Show in ${dark() ? "light" : "dark"} colours`); };
  if (stored === "dark" || stored === "light") document.documentElement.dataset.theme = stored;
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    localStorage.setItem("almanac-theme", document.documentElement.dataset.theme);
    tell();
  });
  tell();
}

function start() {
  if (!data.index) {
    byId("notes").append(el("p", { class: "warn", text: "data/index.js, which lies beside the page, cannot be read: copy the whole folder." }));
    return;
  }
  readScale();
  readIndex();
  byId("skip").addEventListener("click", () => byId("main").focus());
  listenToTheme();
  listenToSentence();
  listenToCompare();
  listenToDrawer();
  listenToData();
  listenToJob();
  listenToDrops();
  readAddress();
  const again = () => { readAddress(); show(); };
  addEventListener("popstate", again);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width !== innerWidth && state.view === "question") showQuestion();
    width = innerWidth;
  });
  show();
}

document.addEventListener("DOMContentLoaded", start);

/* Making elements, and writing numbers for people. Every text goes in as textContent: a name is never markup.
   Knows the document; nothing of records. */

/** An element. `props`: attributes; `on…` are listeners, `class` and `text` what they say, null leaves out. */
function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same of SVG. */
function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const byId = (id) => document.getElementById(id);

/** Replaces what is in a node. */
function put(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/* --- numbers */

const thousands = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Three digits, no exponent in the range that people read: 0.0123, 4.56, 78.9, 1,234. */
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === Infinity) return "∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  if (size >= 100) return thousands.format(value);
  return String(Number(value.toPrecision(3)));
}

/** Seconds in the unit that suits. */
function time(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds === Infinity) return "never";
  if (seconds === 0) return "0\u00a0s";
  if (seconds < 0.001) return `${number(seconds * 1e6)}\u00a0µs`;
  if (seconds < 0.9995) return `${number(seconds * 1e3)}\u00a0ms`;
  return seconds < 120 ? `${number(seconds)}\u00a0s` : `${number(seconds / 60)}\u00a0min`;
}

/** A share in per cent, with as many digits as tell it from 100 %. */
function share(value) {
  if (value === null || value === undefined) return "–";
  const cent = value * 100;
  const digits = cent > 0 && cent < 100 && (cent > 99 || cent < 1) ? 2 : cent % 1 ? 1 : 0;
  return `${Number(cent.toFixed(digits))}\u00a0%`;
}

/** Dollars. */
function money(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value >= 100) return `$${thousands.format(value)}`;
  if (value >= 0.0995) return `$${value.toFixed(2)}`;
  return value === 0 ? "$0" : `$${Number(value.toPrecision(2)).toLocaleString("en-US", { maximumFractionDigits: 9 })}`;
}

/** [value, low, high] as text. */
function interval(three, unit = number) {
  if (!three) return "–";
  const [value, low, high] = three;
  if (low === null && high === null) return `${unit(value)} (no interval)`;
  const [from, to] = [low, high].map((end) => (end === null ? "?" : unit(end)));
  const [mark] = to.match(/\u00a0\S+$/) ?? [""]; // a unit that both ends have is written once
  return `${unit(value)} (${mark && from.endsWith(mark) ? from.slice(0, -mark.length) : from} to ${to})`;
}

/** Whether a rate is only known to be no less: everything at once was cut off before its end. */
const isLeast = (three) => Boolean(three) && three[1] !== null && three[2] === null;

/** A highest rate as text. */
const peakText = (three) => (isLeast(three) ? `≥ ${number(three[0])} (from ${number(three[1])})` : interval(three));

/** The same for a cell of a table: the interval smaller, under the value. */
function stacked(three, unit = number, text = interval(three, unit)) {
  const at = text.indexOf(" (");
  return at < 0 ? text : el("span", {}, text.slice(0, at), el("small", { text: text.slice(at) }));
}

const plural = (count, word) => `${thousands.format(count)} ${word}${count === 1 ? "" : "s"}`;

/** "a, b and c". */
function listed(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;
}

/* --- what the builder's script calls */

/** A word for a POSIX shell: as it is where that is safe, else in single quotes, on one line. */
function shellWord(text) {
  const line = String(text).replace(/[\x00-\x1f\x7f]+/g, " ");
  return /^[A-Za-z0-9_./:=@%+,-]+$/.test(line) ? line : `'${line.replaceAll("'", "'\\''")}'`;
}

/** A button that copies a text, and says so. */
function copyButton(text) {
  const button = el("button", { type: "button", class: "small", text: "Copy" });
  button.addEventListener("click", async () => {
    const box = el("textarea", { class: "away" });
    box.value = text;
    button.after(box);
    box.select();
    const done = document.execCommand("copy"); // works from the file system too, where navigator.clipboard is missing
    box.remove();
    button.focus();
    button.textContent = done ? "Copied" : "Select it by hand";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

/** A command in a box, with its button. */
function commandBox(text) {
  return el("div", { class: "command" }, el("code", { text }), copyButton(text));
}

/** Hands a text to the browser as a file to keep. */
function keep(name, text, type) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Rows as CSV; a text that a spreadsheet would take for a formula is quoted as they do it. */
function csv(rows) {
  const cell = (value) => {
    let text = value === null || value === undefined ? "" : String(value);
    if (typeof value === "string" && /^[=+\-@\t]/.test(text)) text = `'${text}`;
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

/** A table with its caption; `rows` of texts or nodes; a button keeps it as CSV. */
function table(caption, heads, rows, { file = "table.csv", numeric = [] } = {}) {
  const cell = (value, at, tag) =>
    el(tag, { class: numeric.includes(at) ? "number" : null, scope: tag === "th" ? "col" : null },
      value instanceof Node ? value : String(value ?? "–"));
  const text = (value) => (value instanceof Node ? value.textContent : value);
  return el("div", { class: "tabled" },
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      el("table", {},
        el("caption", { text: caption }),
        el("thead", {}, el("tr", {}, heads.map((head, at) => cell(head, at, "th")))),
        el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, at) => cell(value, at, "td"))))))),
    el("button", { type: "button", class: "small", text: "Keep as CSV",
      onclick: () => keep(file, csv([heads, ...rows.map((row) => row.map(text))]), "text/csv") }));
}

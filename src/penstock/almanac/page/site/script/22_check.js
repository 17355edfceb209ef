/* Checks a file that a reader dropped: its form by the record's own JSON schema (which the builder writes from record.py),
   then what a form cannot say. Its raw data are not here, so its numbers cannot be derived again: the page says so. */

const LARGEST_FILE = 30e6; // bytes
const OWN_CHECKED = "Its form was checked, and a few things that would contradict each other; not whether its numbers can be believed: penstock almanac validate FILE says that, out of its raw data.";

/** Faults of a value against a JSON schema, as "where: what"; at most ten. Only the words that pydantic writes are known;
    another word is a fault of the schema and is told. */
function faultsOf(value, schema, root = schema, where = "", faults = []) {
  if (faults.length >= 10) return faults;
  const say = (what) => { if (faults.length < 10) faults.push(`${where || "the file"}: ${what}`); };
  if (schema.$ref) return faultsOf(value, root.$defs[schema.$ref.split("/").pop()], root, where, faults);
  if (schema.anyOf) {
    const tries = schema.anyOf.map((each) => faultsOf(value, each, root, where, []));
    if (!tries.some((each) => !each.length)) faults.push(...tries.reduce((a, b) => (b.length < a.length || a[0]?.includes("null") ? b : a)).slice(0, 3));
    return faults;
  }
  if ("const" in schema && value !== schema.const) say(`is not ${JSON.stringify(schema.const)}`);
  if (schema.enum && !schema.enum.includes(value)) say(`is none of ${schema.enum.join(", ")}`);
  if (schema.type && !isOfType(value, schema.type)) { say(`is no ${schema.type}`); return faults; }
  if (typeof value === "number") {
    if (schema.minimum !== undefined && value < schema.minimum) say(`is below ${schema.minimum}`);
    if (schema.maximum !== undefined && value > schema.maximum) say(`is above ${schema.maximum}`);
  } else if (typeof value === "string") {
    const length = [...value].length;
    if (schema.maxLength !== undefined && length > schema.maxLength) say(`is longer than ${schema.maxLength} characters`);
    if (schema.minLength !== undefined && length < schema.minLength) say("is too short");
    if (schema.pattern && !new RegExp(schema.pattern, "u").test(value)) say("has characters that are not allowed");
  } else if (Array.isArray(value)) {
    if (schema.maxItems !== undefined && value.length > schema.maxItems) say(`has more than ${schema.maxItems} entries`);
    else if (schema.items) value.forEach((each, at) => faultsOf(each, schema.items, root, `${where}[${at}]`, faults));
  } else if (value !== null && typeof value === "object") {
    faultsOfObject(value, schema, root, where, faults, say);
  }
  return faults;
}

function faultsOfObject(value, schema, root, where, faults, say) {
  const place = (name) => (where ? `${where}.${name}` : name).slice(0, 120);
  for (const name of schema.required ?? []) if (!Object.hasOwn(value, name)) say(`lacks ${name}`);
  for (const [name, each] of Object.entries(value)) {
    const known = schema.properties && Object.hasOwn(schema.properties, name) ? schema.properties[name] : null;
    if (known) faultsOf(each, known, root, place(name), faults);
    else if (schema.additionalProperties === false) say(`has a field ${JSON.stringify(name.slice(0, 60))}, which is none`);
    else if (schema.additionalProperties) faultsOf(each, schema.additionalProperties, root, place(name), faults);
    if (schema.propertyNames) faultsOf(name, schema.propertyNames, root, place(name), faults);
  }
}

function isOfType(value, type) {
  if (type === "null") return value === null;
  if (type === "integer") return Number.isInteger(value);
  if (type === "number") return typeof value === "number" && Number.isFinite(value);
  if (type === "array") return Array.isArray(value);
  if (type === "object") return value !== null && typeof value === "object" && !Array.isArray(value);
  return typeof value === type;
}

/** Marks that turn or hide the text around them, as reading.py has them; a log may have lines and tabs. */
const HIDDEN = /[\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|(?![\n\t])\p{Cc}|\p{Cs}/u;

/** The place of the first text that holds one, or null. */
function hiddenAt(value, where = "") {
  if (typeof value === "string") return HIDDEN.test(value) ? where : null;
  if (value === null || typeof value !== "object") return null;
  for (const [name, each] of Object.entries(value)) {
    if (typeof each === "number") continue;
    const found = HIDDEN.test(name) ? where || "the file" : hiddenAt(each, where ? `${where}.${name}` : name);
    if (found !== null) return found.slice(0, 120);
  }
  return null;
}

/** What contradicts itself in a record of the right form, or would be shown as something else than it is. */
function contradictions(record) {
  const found = [];
  const hidden = hiddenAt(record);
  if (hidden !== null) found.push(`${hidden}: holds a control character`);
  const names = record.points.map((point) => point.name);
  if (new Set(names).size < names.length) found.push("points: two have the same name");
  for (const point of record.points) {
    const { first, per_token: token, end_to_end: end } = point.sample;
    const say = (what) => found.push(`point ${point.name}: ${what}`);
    if (first.length !== token.length || first.length !== end.length) say("the columns of its sample differ in length");
    if (first.length > point.requests) say("its sample has more rows than it has requests");
    if (point.kind === "open" && !(point.rate > 0)) say("an open loop has a rate, above 0");
    if (point.complete > point.requests) say("more requests were complete than issued");
    if (first.some((value, row) => end[row] >= 0 && value > end[row] * 1.001 + 1e-6)) say("a first token comes after the end");
    for (const goal of point.goals) if (!(goal.low <= goal.share && goal.share <= goal.high)) say(`the share under ${goal.seconds} s lies outside its interval`);
    for (const [name, value] of Object.entries(point.figures)) {
      const three = value === null || value === undefined ? [] : "value" in value ? [value] : Object.values(value);
      if (three.some((each) => (each.low !== null && each.low > each.value) || (each.high !== null && each.high < each.value))) say(`${name} lies outside its interval`);
    }
  }
  return found.slice(0, 10);
}

/** Takes a reader's file: {record} or {faults}. */
async function readOwn(file) {
  if (file.size > LARGEST_FILE) return { faults: [`is larger than ${LARGEST_FILE / 1e6} MB`] };
  let paper;
  try {
    paper = JSON.parse(await file.text());
  } catch (error) {
    return { faults: [`is no JSON: ${error.message}`] };
  }
  const faults = faultsOf(paper, data.index.form);
  if (!faults.length) faults.push(...contradictions(paper));
  return faults.length ? { faults } : { record: ownRecord(paper, file.name) };
}

/* Charts by hand: logarithmic axes, marks, and moving between marks by the arrow keys. Knows no record. */

const TICKS = [1, 2, 5];

/** A logarithmic scale from values to places. */
function logScale(low, high, from, to) {
  const [a, b] = [Math.log(low), Math.log(high)];
  const scale = (value) => from + ((Math.log(value) - a) / (b - a || 1)) * (to - from);
  scale.ticks = ticksBetween(low, high);
  scale.domain = [low, high];
  return scale;
}

function ticksBetween(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const step of TICKS) {
      const value = Number((step * 10 ** power).toPrecision(1));
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  if (found.length <= 9) return found;
  const tens = found.filter((value) => Number.isInteger(Math.round(Math.log10(value) * 1e6) / 1e6));
  return tens.length >= 4 ? tens : found.filter((value) => !String(value).replace(/[0.]/g, "").startsWith("2"));
}

const DIGIT = 7.5; // a digit's width in a chart's text, in pixels; commas and dots are narrower

/** Of a horizontal scale's ticks those whose labels don't touch: all, else without the twos, else powers of ten, else as
    many of these as have room. */
function fittingTicks(scale, label) {
  const touch = (left, right) => scale(right) - scale(left) < (DIGIT * (label(left).length + label(right).length)) / 2 + 6;
  const apart = (ticks) => ticks.every((tick, at) => !at || !touch(ticks[at - 1], tick));
  const starts = (...digits) => scale.ticks.filter((tick) => digits.includes(tick.toExponential()[0]));
  const tries = [scale.ticks, starts("1", "5"), starts("1")];
  const found = tries.find((ticks) => ticks.length > 1 && apart(ticks));
  if (found) return found;
  const kept = [];
  for (const tick of starts("1").length > 1 ? starts("1") : scale.ticks) if (!kept.length || !touch(kept[kept.length - 1], tick)) kept.push(tick);
  return kept;
}

/** The least and the greatest of positive finite values, with some air; null where there are none. */
function extent(values, air = 1.15) {
  const good = values.filter((value) => value > 0 && Number.isFinite(value));
  return good.length ? [Math.min(...good) / air, Math.max(...good) * air] : null;
}

/** An empty chart: {root, plot, x, y, width, height}. `marks` go into plot. */
function frame(box, { title, about, x, y, xText, yText, xUnit = number, yUnit = number }) {
  const width = Math.max(box.clientWidth || 640, 280);
  const narrow = width < 520;
  const height = narrow ? 300 : 380;
  const edge = { left: narrow ? 50 : 64, right: narrow ? 14 : 24, top: 26, bottom: 46 };
  const xs = typeof x[0] === "string" ? namedScale(x, edge.left, width - edge.right) : logScale(...x, edge.left, width - edge.right);
  const ys = logScale(...y, height - edge.bottom, edge.top);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": `${title}. ${about}` });
  for (const tick of fittingTicks(xs, xUnit)) {
    root.append(svg("line", { class: "grid", x1: xs(tick), x2: xs(tick), y1: edge.top, y2: height - edge.bottom }),
      svg("text", { class: "tick", x: xs(tick), y: height - edge.bottom + 18, "text-anchor": "middle", text: xUnit(tick) }));
  }
  for (const tick of ys.ticks) {
    root.append(svg("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: ys(tick), y2: ys(tick) }),
      svg("text", { class: "tick", x: edge.left - 8, y: ys(tick) + 4, "text-anchor": "end", text: yUnit(tick) }));
  }
  root.append(svg("text", { class: "axis", x: width - edge.right, y: height - 8, "text-anchor": "end", text: xText }),
    svg("text", { class: "axis", x: 4, y: 14, text: yText }));
  const plot = svg("g", {});
  root.append(plot);
  return { root, plot, x: xs, y: ys, width, height, edge, box };
}

/** A path through [x, y] places. */
const path = (places) => places.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

/** Makes marks into one stop for the tabulator: arrow keys go from mark to mark, Enter opens. `marks`: {node, text, open}. */
function reachable(chart, marks) {
  const tip = el("div", { class: "tip", hidden: true, role: "status" });
  const ordered = [...marks].sort((a, b) => a.x - b.x);
  ordered.forEach((mark, at) => {
    fill(mark.node, { tabindex: at ? -1 : 0, role: "button", "aria-label": mark.text, onclick: mark.open,
      onkeydown: (event) => {
        const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); mark.open(); }
        if (!by) return;
        event.preventDefault();
        const next = ordered[(at + by + ordered.length) % ordered.length];
        mark.node.setAttribute("tabindex", "-1");
        next.node.setAttribute("tabindex", "0");
        next.node.focus();
      },
      onpointerenter: () => tell(mark), onpointerleave: () => { tip.hidden = true; },
      onfocus: () => tell(mark), onblur: () => { tip.hidden = true; } }, []);
  });
  function tell(mark) {
    tip.textContent = mark.text;
    tip.hidden = false;
    const left = Math.min(Math.max(mark.x - 110, 4), chart.width - 224);
    tip.style.left = `${left}px`;
    tip.style.top = `${mark.y + 14}px`;
  }
  const held = chart.box.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  put(chart.box, chart.root, tip);
  if (held !== null) ordered.find((mark) => mark.text === held)?.node.focus();
}

/** The names of the series over a chart, each with its colour. `series`: [name, colour's number]. */
function legend(list, series) {
  put(list, series.map(([name, colour]) => el("li", { "data-colour": colour }, el("i", { class: "chip" }), name)));
}

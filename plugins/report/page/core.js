// What all parts share. Text from checkpoints reaches the page only as text nodes, and on canvases.

const data = JSON.parse(document.getElementById("data").textContent);

/** An element with attributes, listeners (`onclick`) and children; texts become text nodes. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

let _sections = 0;

/** A part of the page with a title; gives what to fill. */
function section(title, about) {
  const id = `title-${_sections++}`;
  const box = el("section", { "aria-labelledby": id }, el("h2", { id }, title));
  if (about) box.append(el("p", { class: "soft" }, about));
  return box;
}

function choice(label, options, chosen, changed) {
  const select = el("select", { onchange: () => changed(select.value) });
  for (const [value, text] of options) select.append(el("option", { value }, text));
  select.value = chosen;
  return el("label", {}, label, select);
}

function legend(items) {
  return el(
    "div",
    { class: "legend" },
    items.map(([name, text]) => {
      const swatch = el("i");
      swatch.style.background = `var(--${name})`;
      return el("span", {}, swatch, text);
    }),
  );
}

const grouped = (number) => Math.round(number).toLocaleString("en-US");
const counted = (n, one, many = one + "s") => `${grouped(n)} ${n === 1 ? one : many}`;

function bytes(number) {
  if (number < 1000) return `${Math.round(number)} B`;
  for (const unit of ["kB", "MB", "GB", "TB", "PB", "EB"]) {
    number /= 1000;
    if (number < 999.95 || unit === "EB") return `${number.toFixed(1)} ${unit}`;
  }
  return "";
}

/** Seconds, in the unit and with the digits that a number like `like` has. */
function seconds(number, like = Math.abs(number)) {
  if (number === 0) return "0 s";
  if (like < 1) return `${(number * 1000).toFixed(like < 0.01 ? 2 : like < 0.1 ? 1 : 0)} ms`;
  return `${like < 10 ? number.toFixed(2) : like < 1000 ? number.toFixed(1) : grouped(number)} s`;
}

const rate = (number) => `${bytes(number)}/s`;
const plainNumber = (number) => String(Number(number.toPrecision(6)));

/** A variable of the style sheet, in the theme of the moment. */
const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const _CIVIDIS = [
  [0, 34, 78],
  [36, 60, 110],
  [87, 93, 109],
  [124, 123, 120],
  [165, 156, 116],
  [208, 190, 100],
  [254, 232, 56],
];

/** The colour of a share from 0, dark blue, to 1, yellow. */
function heat(share) {
  const at = Math.min(1, Math.max(0, share)) * (_CIVIDIS.length - 1);
  const low = Math.min(Math.floor(at), _CIVIDIS.length - 2);
  const mixed = _CIVIDIS[low].map((c, i) =>
    Math.round(c + (at - low) * (_CIVIDIS[low + 1][i] - c)),
  );
  return `rgb(${mixed.join(",")})`;
}

/** Round numbers for an axis from 0 to `most`. */
function ticks(most, wanted) {
  if (!(most > 0)) return [0];
  const rough = most / Math.max(1, wanted),
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let n = 0; n * step <= most * 1.0001; n++) found.push(n * step);
  return found;
}

const largest = (numbers) => numbers.reduce((a, b) => (b > a ? b : a), -Infinity);
const smallest = (numbers) => numbers.reduce((a, b) => (b < a ? b : a), Infinity);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const mean = (numbers) => (numbers.length ? sum(numbers) / numbers.length : 0);
function median(numbers) {
  const sorted = Float64Array.from(numbers).sort(),
    half = sorted.length >> 1;
  if (!sorted.length) return 0;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
const range = (n) => Array.from({ length: n }, (_, i) => i);

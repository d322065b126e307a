// The metrics that steps were saved with, each over the steps.

const _PLOT_HIGH = 150,
  _PLOT_TOP = 12,
  _PLOT_FLOOR = 128;
const _NOT_FINITE = { nan: "NaN", inf: "∞", "-inf": "-∞" };

const isFinite_ = (value) => typeof value === "number";
const isMissing = (value) => value === null || value === undefined;

/** A value of a metric as text; empty if it is missing. */
const metricText = (value) =>
  isMissing(value) ? "" : isFinite_(value) ? plainNumber(value) : _NOT_FINITE[value];

function metricsSection() {
  const box = section(
    "Metrics",
    "The numbers that each step was saved with. A ring marks the best value; where a name does not say what is better, the lowest and the highest.",
  );
  box.append(
    el(
      "div",
      { class: "plots" },
      data.metrics.map((metric) =>
        el("div", {}, el("h3", {}, metric.name), _about(metric), _plot(metric).node),
      ),
    ),
  );
  if (data.more_metrics)
    box.append(
      el("p", { class: "note" }, `${counted(data.more_metrics, "more metric")} not shown.`),
    );
  return box;
}

/** What is marked of a metric: the better end, or both. */
function _marked(metric) {
  const ends = metric.better ? [metric.better] : ["lowest", "highest"];
  const found = ends.filter((end) => metric[end] !== null).map((end) => [end, metric[end]]);
  return found.length > 1 && found[0][1] === found[1][1] ? found.slice(0, 1) : found;
}

function _about(metric) {
  const { values } = metric,
    known = range(values.length).filter((n) => !isMissing(values[n]));
  const last = known[known.length - 1],
    broken = known.filter((n) => !isFinite_(values[n])),
    missing = values.length - known.length;
  const texts = [
    `last ${metricText(values[last])}`,
    ..._marked(metric).map(
      ([end, n]) =>
        `${metric.better ? "best" : end} ${metricText(values[n])} in ${data.steps[n].name}`,
    ),
    ...(missing ? [`missing in ${counted(missing, "step")}`] : []),
  ];
  const kinds = [...new Set(broken.map((n) => metricText(values[n])))].join(" or ");
  const bad = broken.length ? `${kinds} in ${counted(broken.length, "step")}` : "";
  return el(
    "p",
    { class: "soft" },
    texts.join(" · "),
    bad ? " · " : null,
    bad ? el("span", { class: "bad" }, bad) : null,
  );
}

/** Where each step is on the axis: at its number, if all names end in ascending ones. */
function _positions() {
  const numbers = data.steps.map((step) => Number((/\d{1,15}$/.exec(step.name) || ["x"])[0]));
  const ascend = numbers.every((number, n) => !n || number > numbers[n - 1]);
  return ascend && numbers.every(Number.isFinite) ? numbers : range(numbers.length);
}

/** Round numbers between two. */
function _between(low, high, wanted) {
  const rough = (high - low) / wanted,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high && found.length < 20; n++)
    found.push(Number((n * step).toPrecision(12)));
  return found;
}

function _plot(metric) {
  const { values } = metric,
    known = range(values.length).filter((n) => !isMissing(values[n]));
  const finite = known.filter((n) => isFinite_(values[n])),
    shown = finite.map((n) => values[n]);
  const at = _positions(),
    first = at[0],
    span = at[at.length - 1] - first || 1;
  let low = finite.length ? smallest(shown) : 0,
    high = finite.length ? largest(shown) : 1;
  if (!(high > low)) {
    const half = (Math.abs(low) || 1) / 2;
    [low, high] = [low - half, high + half];
  }
  let left = 0,
    wide = 1;
  const x = (n) => left + ((at[n] - first) / span) * wide;
  const up = (value) =>
    _PLOT_FLOOR - ((value - low) / (high - low)) * (_PLOT_FLOOR - _PLOT_TOP);
  const y = (n) => {
    if (isFinite_(values[n])) return up(values[n]);
    return values[n] === "-inf" ? _PLOT_FLOOR : _PLOT_TOP;
  };
  return picture({
    label: `${metric.name} over ${values.length} steps; the table of steps has the same numbers.`,
    hint: " ",
    height: () => _PLOT_HIGH,
    draw(context, width) {
      const marks = _between(low, high, 4),
        room = marks.map((v) => context.measureText(plainNumber(v)).width);
      left = Math.min(width / 3, Math.max(24, largest([0, ...room]) + 12));
      wide = Math.max(1, width - left - 12);
      context.lineWidth = 1;
      for (const value of marks) {
        const level = Math.round(up(value)) + 0.5;
        context.strokeStyle = colour("line");
        _line(context, [left, level], [left + wide, level]);
        context.fillStyle = colour("soft");
        context.textAlign = "right";
        context.fillText(plainNumber(value), left - 6, level);
      }
      _ends(context, at, left, wide);
      _curve(context, finite, values, x, y);
      for (const n of known) {
        if (isFinite_(values[n])) _dot(context, x(n), y(n), wide / values.length);
        else _cross(context, x(n), y(n));
      }
      context.strokeStyle = colour("mark");
      context.lineWidth = 1.5;
      for (const [, n] of _marked(metric)) {
        context.beginPath();
        context.arc(x(n), y(n), 6, 0, 7);
        context.stroke();
      }
    },
    at(px) {
      let best = -1;
      for (const n of known)
        if (best < 0 || Math.abs(x(n) - px) < Math.abs(x(best) - px)) best = n;
      return px < left - 8 ? -1 : best;
    },
    box: (n) => [x(n) - 5, y(n) - 5, 10, 10],
    text: (n) => [data.steps[n].name, `${metric.name} ${metricText(values[n])}`],
    move(n, key) {
      const next = along(known.indexOf(n), key, known.length, ["ArrowRight", "ArrowUp"]);
      return next < 0 ? -1 : known[next];
    },
  });
}

/** The line through the finite values; dashed where a step between two has none. */
function _curve(context, finite, values, x, y) {
  context.strokeStyle = colour("new");
  context.lineWidth = 1.5;
  finite.slice(1).forEach((n, i) => {
    const before = finite[i];
    context.setLineDash(n - before > 1 ? [2, 3] : []);
    _line(context, [x(before), y(before)], [x(n), y(n)]);
  });
  context.setLineDash([]);
}

function _dot(context, x, y, wide) {
  if (wide < 4) return; // the line shows it
  context.fillStyle = colour("new");
  context.beginPath();
  context.arc(x, y, 2.5, 0, 7);
  context.fill();
}

function _cross(context, x, y) {
  context.strokeStyle = colour("bad");
  context.lineWidth = 2;
  _line(context, [x - 4, y - 4], [x + 4, y + 4]);
  _line(context, [x - 4, y + 4], [x + 4, y - 4]);
}

/** The first and the last step, and some between them. */
function _ends(context, at, left, wide) {
  const last = at.length - 1,
    span = at[last] - at[0] || 1;
  const inner =
    wide > 260 && last > 1 ? _between(at[0], at[last], 4).filter(Number.isInteger) : [];
  context.fillStyle = colour("soft");
  const isNumber = data.steps[0].name.endsWith(String(at[0]));
  const texts = [...new Set([at[0], ...inner, at[last]])].sort((a, b) => a - b);
  let end = -Infinity;
  for (const value of texts) {
    const text = isNumber ? String(value) : data.steps[value] ? data.steps[value].name : "";
    const width = context.measureText(text).width,
      middle = left + ((value - at[0]) / span) * wide;
    const from = Math.max(left - 8, Math.min(middle - width / 2, left + wide + 10 - width));
    const isLast = value === at[last];
    const reserved = context.measureText(isNumber ? String(at[last]) : "").width + 12;
    if (from < end + 8 || (!isLast && from + width > left + wide - reserved)) continue;
    context.textAlign = "left";
    context.fillText(text, from, _PLOT_HIGH - 8);
    end = from + width;
  }
}

function _line(context, [fromX, fromY], [toX, toY]) {
  context.beginPath();
  context.moveTo(fromX, fromY);
  context.lineTo(toX, toY);
  context.stroke();
}

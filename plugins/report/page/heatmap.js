// The processes over the mesh: which host, or which stage, is slow.

const _MEASURES = [
  ["done", "done after", (save) => save.done, seconds],
  ["write", "seconds of writing", (save) => save.took.write, seconds],
  ["rate", "rate of writing", (save) => save.rate, rate],
  ["began", "began after", (save) => save.began, seconds],
  ["stage", "seconds of staging", (save) => save.took.stage, seconds],
  ["queue", "seconds of waiting for earlier saves", (save) => save.took.queue, seconds],
  ["blocked", "seconds for which the loop waited", (save) => save.blocked, seconds],
  ["written", "bytes written", (save) => save.written, bytes],
  ["reused", "bytes not written again", (save) => save.reused, bytes],
  ["staged", "bytes staged", (save) => save.staged, bytes],
];
const _BAR = 46,
  _LABEL = 54,
  _HEAD = 20,
  _TALLEST = 520;

function heatSection(save) {
  const box = section(
    "Processes over the mesh",
    "The bars beside rows and columns are their means: a slow host or stage stands out there.",
  );
  box.append(heatPicture(save, _MEASURES, (process) => describeProcess(save, process)));
  return box;
}

/** The processes of a save or a load over the mesh, what is shown of them to be chosen. */
function heatPicture(facts, all, describe) {
  const measures = all.filter(([, , of]) => of(facts).some((v) => v !== 0));
  const state = { measure: measures[0][0], grid: null };
  const grids = _arrangements(facts);
  state.grid = grids[0];
  const ramp = el("canvas", { width: 160, height: 12, role: "presentation" });
  const low = el("span"),
    high = el("span"),
    findings = el("div", {});
  const drawn = _heatmap(facts, state, measures, describe, (least, most, text) => {
    low.textContent = text(least);
    high.textContent = text(most);
    findings.replaceChildren(..._findings(facts, state, measures));
  });
  const box = el(
    "div",
    {},
    el(
      "div",
      { class: "controls" },
      choice(
        "Show",
        measures.map(([key, title]) => [key, title]),
        state.measure,
        (value) => {
          state.measure = value;
          drawn.redraw();
        },
      ),
      grids.length > 1
        ? choice(
            "On",
            grids.map((grid, n) => [String(n), grid.title]),
            "0",
            (value) => {
              state.grid = grids[Number(value)];
              drawn.redraw();
            },
          )
        : null,
      el("span", { class: "ramp soft" }, low, ramp, high),
    ),
    el("div", { class: "two" }, drawn.node, findings),
  );
  const context = ramp.getContext("2d");
  for (const x of range(160)) {
    context.fillStyle = heat(x / 159);
    context.fillRect(x, 0, 1, 12);
  }
  return box;
}

/** The grids on which the processes can be shown: the meshes, and rows of so many processes. */
function _arrangements(facts) {
  const meshes = facts.meshes.map((mesh) => {
    const axes = mesh.axes.map((axis, i) => `${axis}=${mesh.shape[i]}`);
    const devices = mesh.processes || range(mesh.shape.reduce((a, b) => a * b, 1));
    return _grid(
      `mesh ${axes.join(" × ") || "of one device"}`,
      mesh,
      devices,
      _downward(mesh.shape),
    );
  });
  const square = 2 ** Math.max(0, Math.round(Math.log2(Math.sqrt(facts.n * 2))));
  const widths = [...new Set([square, 4, 8, 16, 32, 64])].filter((w) => w < facts.n || w === square);
  const rows = widths.map((width) => {
    const columns = Math.min(width, facts.n),
      shape = [Math.ceil(facts.n / columns), columns];
    return _grid(
      `rows of ${columns} processes`,
      { axes: ["row", "column"], shape },
      range(facts.n),
      [0],
    );
  });
  // A mesh of one long axis is a line in which nobody sees anything.
  const isFlat = meshes.length && _skew(meshes[0].rows, meshes[0].columns) > Math.log(24);
  return isFlat ? [...rows, ...meshes] : [...meshes, ...rows];
}

const _product = (sizes) => sizes.reduce((a, b) => a * b, 1);
const _skew = (rows, columns) => Math.abs(Math.log(columns / rows / 1.3));

/** The axes that run down, so that the picture is about as wide as high. */
function _downward(shape) {
  const axes = range(Math.min(shape.length, 10));
  let best = [],
    least = Infinity;
  for (const bits of range(2 ** axes.length)) {
    const down = axes.filter((axis) => bits & (1 << axis));
    const rows = _product(down.map((axis) => shape[axis]));
    const skew = _skew(rows, _product(shape) / rows);
    if (skew < least - 1e-9) [best, least] = [down, skew];
  }
  return best;
}

/** Where each device is drawn. Between the places of outer axes is a gap of `period` rows or columns. */
function _grid(title, mesh, devices, down) {
  const across = range(mesh.shape.length).filter((axis) => !down.includes(axis));
  const place = (at, axes) => axes.reduce((sum, axis) => sum * mesh.shape[axis] + at[axis], 0);
  const sizes = (axes) => axes.map((axis) => mesh.shape[axis]);
  const columns = _product(sizes(across)),
    rows = _product(sizes(down));
  const cells = new Int32Array(rows * columns).fill(-1),
    x = [],
    y = [];
  devices.forEach((_, device) => {
    const at = coordinate(mesh, device);
    x.push(place(at, across));
    y.push(place(at, down));
    cells[y[device] * columns + x[device]] = device;
  });
  const period = (axes) => (axes.length > 1 ? _product(sizes(axes.slice(1))) : 0);
  return {
    title,
    mesh,
    devices,
    down,
    across,
    rows,
    columns,
    x,
    y,
    cells,
    periods: [period(across), period(down)],
  };
}

function _heatmap(facts, state, measures, describe, told) {
  let wide = 1,
    high = 1,
    values = null;
  const gap = (n, period) => (period > 1 ? Math.floor(n / period) * 3 : 0);
  const left = (x) => _LABEL + x * wide + gap(x, state.grid.periods[0]);
  const top = (y) => _HEAD + y * high + gap(y, state.grid.periods[1]);
  const of = {
    label: "",
    hint: "Point at a cell, or use the arrow keys.",
    height(width) {
      const { rows, columns, periods } = state.grid;
      wide = Math.min(
        28,
        Math.max(0.5, (width - _LABEL - _BAR - gap(columns - 1, periods[0])) / columns),
      );
      if (wide > 3) wide = Math.floor(wide);
      high = Math.min(28, Math.max(1, Math.min(wide * 1.5, _TALLEST / rows)));
      if (high > 3) high = Math.floor(high);
      return top(rows - 1) + high + _BAR + 4;
    },
    draw(context) {
      const [, title, column, text] = measures.find(([key]) => key === state.measure);
      values = column(facts);
      const least = smallest(values),
        most = largest(values);
      const share = (v) => (most > least ? (v - least) / (most - least) : 0);
      const { devices, x, y } = state.grid;
      of.label = `Heat map of ${facts.n} processes: ${title}, from ${text(least)} to ${text(most)}.`;
      const line = wide > 5 && high > 5 ? 1 : 0;
      devices.forEach((process, device) => {
        context.fillStyle = heat(share(values[process]));
        context.fillRect(
          left(x[device]),
          top(y[device]),
          Math.max(0.5, wide - line),
          Math.max(0.5, high - line),
        );
      });
      _margins(context, values, state.grid, { wide, high, left, top });
      _axisTitles(context, state.grid, high, top);
      told(least, most, text);
    },
    at(px, py) {
      const { rows, columns, cells } = state.grid;
      const x = range(columns).findIndex((n) => px >= left(n) && px < left(n) + wide);
      const y = range(rows).findIndex((n) => py >= top(n) && py < top(n) + high);
      return x < 0 || y < 0 ? -1 : cells[y * columns + x];
    },
    box: (device) => [left(state.grid.x[device]), top(state.grid.y[device]), wide, high],
    text(device) {
      const [, title, , text] = measures.find(([key]) => key === state.measure);
      const process = state.grid.devices[device],
        { mesh } = state.grid;
      const at = coordinate(mesh, device).map((c, i) => `${mesh.axes[i]}=${c}`);
      return [
        `${title} ${text(values[process])}`,
        ...(at.length ? [at.join(", ")] : []),
        ...describe(process),
      ];
    },
    move(device, key) {
      const { devices, rows, columns, cells, x, y } = state.grid;
      if (key === "End") return devices.length - 1;
      if (device < 0 || key === "Home") return 0;
      const nextX = x[device] + ({ ArrowLeft: -1, ArrowRight: 1 }[key] || 0);
      const nextY = y[device] + ({ ArrowUp: -1, ArrowDown: 1 }[key] || 0);
      if (nextX < 0 || nextY < 0 || nextX >= columns || nextY >= rows) return device;
      const next = cells[nextY * columns + nextX];
      return next < 0 ? device : next;
    },
  };
  return picture(of);
}

/** The means of rows and of columns, as bars on the right and below. */
function _margins(context, values, grid, { wide, high, left, top }) {
  const { devices, rows, columns, x, y } = grid;
  const down = _means(devices, values, rows, (device) => y[device]);
  const across = _means(devices, values, columns, (device) => x[device]);
  const full = (_BAR - 8) / (Math.max(largest(down), largest(across)) || 1);
  const right = left(columns - 1) + wide + 4,
    below = top(rows - 1) + high + 4;
  const thin = (size) => Math.max(0.7, size - (size > 3 ? 1 : 0));
  context.fillStyle = colour("soft");
  down.forEach((v, n) => context.fillRect(right, top(n), full * Math.max(0, v), thin(high)));
  across.forEach((v, n) => context.fillRect(left(n), below, thin(wide), full * Math.max(0, v)));
}

function _means(devices, values, count, group) {
  const sums = new Float64Array(count),
    counts = new Float64Array(count);
  devices.forEach((process, device) => {
    sums[group(device)] += values[process];
    counts[group(device)] += 1;
  });
  return sums.map((v, n) => (counts[n] ? v / counts[n] : 0));
}

function _axisTitles(context, grid, high, top) {
  const { mesh, rows, down, across } = grid,
    end = top(rows - 1) + high;
  const title = (axes) => {
    const text = axes.map((axis) => mesh.axes[axis]).join(" × ");
    return text.length > 40 ? `${text.slice(0, 39)}…` : text;
  };
  context.fillStyle = colour("soft");
  context.textAlign = "left";
  context.fillText(across.length ? `${title(across)} →` : "", _LABEL, _HEAD / 2);
  context.textAlign = "right";
  const most = ticks(rows - 1, Math.min(8, (end - _HEAD) / 24)).map(Math.round);
  for (const row of new Set(most.filter((row) => row < rows))) {
    context.fillText(String(row), _LABEL - 6, top(row) + high / 2);
  }
  if (!down.length || end - _HEAD < 60) return;
  context.save();
  context.translate(10, (_HEAD + end) / 2);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText(`← ${title(down)}`, 0, 0);
  context.restore();
}

/** Where on the mesh the mean is farthest from the others': which host or stage is slow. */
function _findings(facts, state, measures) {
  const [key, title, column, text] = measures.find(([name]) => name === state.measure);
  const { mesh, devices } = state.grid,
    isRate = key === "rate";
  const worse = (a, b) => (isRate ? a < b : a > b);
  const at = devices.map((_, device) => coordinate(mesh, device));
  const axes = range(mesh.axes.length).filter((axis) => mesh.shape[axis] > 1);
  const pairs = axes.flatMap((a, n) => axes.slice(n + 1).map((b) => [a, b]));
  const values = column(facts),
    found = [];
  for (const group of [...axes.map((axis) => [axis]), ...pairs]) {
    const size = _product(group.map((axis) => mesh.shape[axis]));
    if (size * 2 > devices.length) continue; // one process is no host
    const number = (device) =>
      group.reduce((sum, axis) => sum * mesh.shape[axis] + at[device][axis], 0);
    const means = _means(devices, values, size, number),
      usual = median(means);
    const worst = range(size).reduce((a, b) => (worse(means[b], means[a]) ? b : a), 0);
    const place = at[range(devices.length).find((device) => number(device) === worst)];
    found.push([
      group.map((axis) => `${mesh.axes[axis]}=${place[axis]}`).join(", "),
      means[worst],
      usual ? means[worst] / usual : 1,
    ]);
  }
  if (!found.length) return [];
  found.sort((a, b) => (isRate ? a[2] - b[2] : b[2] - a[2]));
  return [
    el("h3", {}, isRate ? "The lowest means" : "The largest means"),
    el(
      "p",
      { class: "soft" },
      `Of ${title}, by place on the mesh, against the median of such places.`,
    ),
    el(
      "table",
      {},
      el(
        "tbody",
        {},
        found
          .slice(0, 6)
          .map(([place, value, ratio]) =>
            el(
              "tr",
              {},
              el("th", { scope: "row" }, place),
              el("td", { class: "number" }, text(value)),
              el("td", { class: "number" }, `${ratio.toFixed(2)} ×`),
            ),
          ),
      ),
    ),
  ];
}

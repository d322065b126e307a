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
const _BAR = 46, _LABEL = 54, _HEAD = 20, _TALLEST = 520;

function heatSection(save) {
  const box = section("Processes over the mesh",
    "The bars beside rows and columns are their means: a slow host or stage stands out there.");
  const measures = _MEASURES.filter(([, , of]) => of(save).some((v) => v !== 0));
  const state = { measure: measures[0][0], grid: null };
  const grids = _arrangements(save);
  state.grid = grids[0];
  const ramp = el("canvas", { width: 160, height: 12, role: "presentation" });
  const low = el("span"), high = el("span"), findings = el("div", {});
  const drawn = _heatmap(save, state, measures, (least, most, text) => {
    low.textContent = text(least);
    high.textContent = text(most);
    findings.replaceChildren(..._findings(save, state, measures));
  });
  box.append(
    el("div", { class: "controls" },
      choice("Show", measures.map(([key, title]) => [key, title]), state.measure, (value) => { state.measure = value; drawn.redraw(); }),
      grids.length > 1 ? choice("On", grids.map((grid, n) => [String(n), grid.title]), "0",
        (value) => { state.grid = grids[Number(value)]; drawn.redraw(); }) : null,
      el("span", { class: "ramp soft" }, low, ramp, high)),
    el("div", { class: "two" }, drawn.node, findings));
  const context = ramp.getContext("2d");
  for (const x of range(160)) {
    context.fillStyle = heat(x / 159);
    context.fillRect(x, 0, 1, 12);
  }
  return box;
}

/** The grids on which the processes can be shown: the meshes, and rows of so many processes. */
function _arrangements(save) {
  const found = save.meshes.map((mesh) => {
    const devices = mesh.processes || range(mesh.shape.reduce((a, b) => a * b, 1));
    return {
      title: `mesh ${mesh.axes.map((axis, i) => `${axis}=${mesh.shape[i]}`).join(" × ") || "of one device"}`,
      devices, mesh, ..._split(mesh.shape),
    };
  });
  const square = 2 ** Math.max(0, Math.round(Math.log2(Math.sqrt(save.n * 2))));
  const widths = [...new Set([square, 4, 8, 16, 32, 64])].filter((w) => w < save.n || w === square);
  for (const width of widths) {
    const columns = Math.min(width, save.n), rows = Math.ceil(save.n / columns);
    found.push({
      title: `rows of ${columns} processes`, devices: range(save.n), rows, columns, after: 1,
      mesh: { axes: ["row", "column"], shape: [rows, columns] },
    });
  }
  return found;
}

/** How many of the axes run down, so that the picture is about as wide as high. */
function _split(shape) {
  const product = (sizes) => sizes.reduce((a, b) => a * b, 1);
  const options = range(shape.length + 1).map((after) => ({
    after, rows: product(shape.slice(0, after)), columns: product(shape.slice(after)),
  }));
  const skew = ({ rows, columns }) => Math.abs(Math.log(columns / rows / 1.6));
  return options.reduce((a, b) => (skew(b) < skew(a) ? b : a));
}

function _heatmap(save, state, measures, told) {
  let wide = 1, high = 1, values = null;
  const of = {
    label: "", hint: "Point at a cell, or use the arrow keys.",
    height(width) {
      const { rows, columns } = state.grid;
      wide = Math.min(28, (width - _LABEL - _BAR) / columns);
      high = Math.min(28, Math.max(1, Math.min(wide * 1.5, _TALLEST / rows)));
      return _HEAD + rows * high + _BAR + 4;
    },
    draw(context) {
      const [, title, column, text] = measures.find(([key]) => key === state.measure);
      values = column(save);
      const least = smallest(values), most = largest(values);
      const share = (v) => (most > least ? (v - least) / (most - least) : 0);
      const { devices, rows, columns } = state.grid;
      of.label = `Heat map of ${save.n} processes: ${title}, from ${text(least)} to ${text(most)}.`;
      const gap = wide > 5 && high > 5 ? 1 : 0;
      devices.forEach((process, device) => {
        const x = device % columns, y = Math.floor(device / columns);
        context.fillStyle = heat(share(values[process]));
        context.fillRect(_LABEL + x * wide, _HEAD + y * high, Math.max(0.5, wide - gap), Math.max(0.5, high - gap));
      });
      _margins(context, values, state.grid, wide, high, most);
      _axisTitles(context, state.grid, wide, high, rows);
      told(least, most, text);
    },
    at(px, py) {
      const { devices, rows, columns } = state.grid;
      const x = Math.floor((px - _LABEL) / wide), y = Math.floor((py - _HEAD) / high);
      const device = y * columns + x;
      return x < 0 || y < 0 || x >= columns || y >= rows || device >= devices.length ? -1 : device;
    },
    box: (device) => [_LABEL + (device % state.grid.columns) * wide,
      _HEAD + Math.floor(device / state.grid.columns) * high, wide, high],
    text(device) {
      const [, title, , text] = measures.find(([key]) => key === state.measure);
      const process = state.grid.devices[device];
      const at = coordinate(state.grid.mesh, device).map((c, i) => `${state.grid.mesh.axes[i]}=${c}`);
      return [`${title} ${text(values[process])}`, ...(at.length ? [at.join(", ")] : []), ...describeProcess(save, process)];
    },
    move(device, key) {
      const { devices, columns } = state.grid;
      if (device < 0 || key === "Home") return 0;
      if (key === "End") return devices.length - 1;
      const next = device + { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[key];
      return next < 0 || next >= devices.length ? device : next;
    },
  };
  return picture(of);
}

/** The means of rows and of columns, as bars on the right and below. */
function _margins(context, values, grid, wide, high, most) {
  const { devices, rows, columns } = grid;
  const down = _means(devices, values, rows, (device) => Math.floor(device / columns));
  const across = _means(devices, values, columns, (device) => device % columns);
  context.fillStyle = colour("soft");
  const x = _LABEL + columns * wide + 4, y = _HEAD + rows * high + 4, full = most > 0 ? _BAR - 8 : 0;
  down.forEach((v, n) => context.fillRect(x, _HEAD + n * high, Math.max(0, (full * v) / (most || 1)), Math.max(0.7, high - (high > 3 ? 1 : 0))));
  across.forEach((v, n) => context.fillRect(_LABEL + n * wide, y, Math.max(0.7, wide - (wide > 3 ? 1 : 0)), Math.max(0, (full * v) / (most || 1))));
}

function _means(devices, values, count, group) {
  const sums = new Float64Array(count), counts = new Float64Array(count);
  devices.forEach((process, device) => {
    sums[group(device)] += values[process];
    counts[group(device)] += 1;
  });
  return sums.map((v, n) => (counts[n] ? v / counts[n] : 0));
}

function _axisTitles(context, grid, wide, high, rows) {
  const { mesh, after } = grid, cut = (text) => (text.length > 40 ? `${text.slice(0, 39)}…` : text);
  const title = (axes) => cut(axes.join(" × "));
  context.fillStyle = colour("soft");
  context.textAlign = "left";
  context.fillText(`${title(mesh.axes.slice(after)) || " "} →`, _LABEL, _HEAD / 2);
  const most = ticks(rows - 1, Math.min(8, (rows * high) / 24)).map(Math.round);
  context.textAlign = "right";
  for (const row of new Set(most.filter((row) => row < rows))) {
    context.fillText(String(row), _LABEL - 6, _HEAD + (row + 0.5) * high);
  }
  context.save();
  context.translate(10, _HEAD + Math.max(30, (rows * high) / 2));
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  if (rows * high > 60) context.fillText(`← ${title(mesh.axes.slice(0, after))}`, 0, 0);
  context.restore();
}

/** For each axis the place with the largest mean, as a table: which host or stage is slow. */
function _findings(save, state, measures) {
  const [key, title, column, text] = measures.find(([name]) => name === state.measure);
  const values = column(save), { mesh, devices } = state.grid, isRate = key === "rate";
  const rows = mesh.axes.map((axis, at) => {
    const means = _means(devices, values, mesh.shape[at], (device) => coordinate(mesh, device)[at]);
    const worst = range(means.length).reduce((a, b) => ((isRate ? means[b] < means[a] : means[b] > means[a]) ? b : a), 0);
    return [axis, worst, means[worst], median(means), mesh.shape[at]];
  }).filter(([, , , , size]) => size > 1);
  if (!rows.length) return [];
  return [
    el("h3", {}, isRate ? "The lowest mean along each axis" : "The largest mean along each axis"),
    el("p", { class: "soft" }, `Of ${title}, against the median of the means.`),
    el("table", {}, el("tbody", {}, rows.map(([axis, worst, found, usual]) => el("tr", {},
      el("th", { scope: "row" }, `${axis}=${worst}`),
      el("td", { class: "number" }, text(found)),
      el("td", { class: "number" }, usual ? `${(found / usual).toFixed(2)} ×` : ""))))),
  ];
}

// When each process did what: a line for each process, or for several of which the last one is shown.

const PHASES = ["describe", "plan", "stage", "queue", "write"];
const _PHASE_TEXTS = {
  describe: "describe",
  plan: "plan",
  stage: "stage",
  queue: "wait for earlier saves",
  write: "write",
};
const _MOST_LINES = 480,
  _AXIS = 30,
  _TOP = 18;

/** The columns of a detail in seconds, with what follows from them. */
function saveOf(detail) {
  const n = detail.processes;
  const column = (name, unit = detail.unit) =>
    detail[name] ? Float64Array.from(detail[name], (v) => v / unit) : new Float64Array(n);
  const save = {
    name: detail.name,
    n,
    meshes: detail.meshes,
    collected: detail.collected / detail.unit,
    merged: detail.merged / detail.unit,
    began: column("began"),
    blocked: column("blocked"),
    at: {},
    took: {},
    written: column("written", 1),
    stored: column("stored", 1),
    reused: column("reused", 1),
    staged: column("staged", 1),
    chunks: column("chunks", 1),
  };
  for (const phase of PHASES) {
    save.at[phase] = column(`${phase}_at`);
    save.took[phase] = column(`${phase}_s`);
  }
  save.phases = PHASES.filter((phase) => save.took[phase].some((v) => v > 0));
  save.done = save.began.map((v, p) => v + save.at.write[p] + save.took.write[p]);
  save.last = largest(save.done);
  save.waited = save.done.map((v) => save.last - v);
  save.rate = save.written.map((v, p) => (save.took.write[p] > 0 ? v / save.took.write[p] : 0));
  save.slowest = range(n).sort((a, b) => save.done[b] - save.done[a] || a - b);
  save.place = placeOf(save);
  return save;
}

/** Where a process is on the largest mesh, as text. */
function placeOf(save) {
  const mesh = save.meshes[0];
  if (!mesh) return () => "";
  const first = new Map();
  const devices = mesh.processes || range(save.n);
  devices.forEach((process, device) => first.has(process) || first.set(process, device));
  return (process) => {
    if (!first.has(process)) return "";
    return coordinate(mesh, first.get(process))
      .map((c, i) => `${mesh.axes[i]}=${c}`)
      .join(", ");
  };
}

/** The coordinates of a device, which are counted row-major. */
function coordinate(mesh, device) {
  const found = [];
  for (let at = mesh.shape.length - 1; at >= 0; at--) {
    found.unshift(device % mesh.shape[at]);
    device = Math.floor(device / mesh.shape[at]);
  }
  return found;
}

function describeProcess(save, process) {
  const place = save.place(process);
  return [
    `process ${process}${place ? ` (${place})` : ""}`,
    `done after ${seconds(save.done[process])}, then waited ${seconds(save.waited[process])}`,
    ...save.phases.map((phase) => `${_PHASE_TEXTS[phase]} ${seconds(save.took[phase][process])}`),
    `${bytes(save.written[process])} written${save.rate[process] ? `, ${rate(save.rate[process])}` : ""}`,
    ...(save.reused[process] ? [`${bytes(save.reused[process])} not written again`] : []),
  ];
}

function timelineSection(save) {
  const box = section("What each process did, and when");
  let order = "number";
  const about = el("p", { class: "soft" });
  const drawn = _timeline(save, () => order, about);
  box.append(
    about,
    el(
      "div",
      { class: "controls" },
      choice(
        "Order",
        [
          ["number", "by number"],
          ["done", "the slowest first"],
        ],
        order,
        (value) => {
          order = value;
          drawn.redraw();
        },
      ),
    ),
    legend([
      ...save.phases.map((phase) => [phase, _PHASE_TEXTS[phase]]),
      ["waited", "done, and waiting for the last one"],
    ]),
    drawn.node,
  );
  return box;
}

function _timeline(save, order, about) {
  const each = Math.ceil(save.n / _MOST_LINES),
    lines = Math.ceil(save.n / each);
  const high = save.n <= 24 ? 16 : save.n <= 80 ? 8 : Math.max(1, Math.floor(_MOST_LINES / lines));
  const start = Math.min(0, smallest(save.began)),
    end = Math.max(save.last, save.merged) || 1;
  let shown = [],
    left = 0,
    scale = 1,
    right = 0;

  function choose() {
    const every = order() === "done" ? save.slowest : range(save.n);
    shown = range(lines).map((line) =>
      every
        .slice(line * each, (line + 1) * each)
        .reduce((a, b) => (save.done[b] > save.done[a] ? b : a)),
    );
    const last = save.slowest[0],
      others = Math.max(1, save.n - 1);
    about.textContent =
      (each > 1
        ? `${counted(save.n, "process", "processes")}; each line stands for ${each} of them, and shows the one that was done last. `
        : "") +
      (save.n > 1
        ? `All waited for process ${last}, on average ${seconds(sum(save.waited) / others)}.`
        : "");
  }

  const x = (time) => left + (time - start) * scale;
  const drawn = picture({
    label:
      `Timeline of ${save.n} processes. The last one, process ${save.slowest[0]}, was done after ` +
      `${seconds(save.last)}. The table of processes has the same numbers.`,
    hint: "Point at a line, or use the arrow keys.",
    height: () => _TOP + lines * high + _AXIS,
    draw(context, width, height) {
      choose();
      left = high >= 8 ? 44 : 8;
      right = width - 10;
      scale = (right - left) / (end - start || 1);
      _timeAxis(context, start, end, x, height - _AXIS);
      shown.forEach((process, line) => {
        const y = _TOP + line * high,
          h = high >= 8 ? high - 2 : high;
        const bar = (from, to, name) => {
          if (to <= from) return;
          context.fillStyle = colour(name);
          context.fillRect(x(from), y, Math.max(0.6, (to - from) * scale), h);
        };
        bar(save.done[process], save.last, "waited");
        for (const phase of save.phases) {
          const from = save.began[process] + save.at[phase][process];
          bar(from, from + save.took[phase][process], phase);
        }
        if (high >= 8 && (high >= 12 || line % 2 === 0)) {
          context.fillStyle = colour("soft");
          context.textAlign = "right";
          context.fillText(String(process), left - 6, y + h / 2 + 0.5);
        }
      });
      _moments(context, [[save.merged, "merged"]], x, height - _AXIS);
    },
    at(px, py) {
      const line = Math.floor((py - _TOP) / high);
      return line < 0 || line >= lines ? -1 : line;
    },
    box: (line) => [left, _TOP + line * high, right - left, high >= 8 ? high - 2 : high],
    text: (line) => describeProcess(save, shown[line]),
    move: (line, key) => along(line, key, lines),
  });
  return drawn;
}

function _timeAxis(context, start, end, x, bottom) {
  context.textAlign = "center";
  const most = ticks(end, 6);
  for (const time of most) {
    const at = Math.round(x(time)) + 0.5;
    context.strokeStyle = colour("line");
    context.beginPath();
    context.moveTo(at, _TOP);
    context.lineTo(at, bottom + 4);
    context.stroke();
    context.fillStyle = colour("soft");
    context.fillText(seconds(time, end), Math.max(14, Math.min(at, x(end) - 14)), bottom + 16);
  }
}

function _moments(context, moments, x, bottom) {
  context.setLineDash([4, 3]);
  for (const [time, text] of moments) {
    const at = Math.round(x(time)) - 0.5;
    context.strokeStyle = colour("text");
    context.beginPath();
    context.moveTo(at, 4);
    context.lineTo(at, bottom);
    context.stroke();
    context.fillStyle = colour("text");
    context.textAlign = "right";
    context.fillText(text, at - 5, _TOP / 2);
  }
  context.setLineDash([]);
}

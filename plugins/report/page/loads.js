// Loads, and the processes of each.

function loadsSection() {
  const box = section("Loads", "By the files of --metrics. Bytes are of all processes.");
  const figure = (title, value, text) => ({
    title,
    number: true,
    value,
    text: (l) => (value(l) > 0 ? text(value(l)) : ""),
  });
  const several = data.loads.some((load) => load.processes > 1);
  const kinds = [...new Set(data.loads.flatMap((load) => Object.keys(load.counts)))];
  box.append(
    table(
      [
        { title: "time", value: (l) => l.time, text: (l) => _date(l.time) },
        { title: "checkpoint", name: true, value: (l) => l.name, text: (l) => l.name },
        ...(several
          ? [
              {
                title: "processes",
                number: true,
                value: (l) => l.told,
                text: (l) =>
                  l.told === l.processes ? grouped(l.told) : `${l.told} of ${grouped(l.processes)}`,
              },
              { title: "slowest", number: true, value: (l) => l.slowest, text: (l) => String(l.slowest) },
            ]
          : []),
        ...kinds.map((kind) => ({
          title: kind,
          number: true,
          value: (l) => (Object.hasOwn(l.counts, kind) ? l.counts[kind] : 0),
          text: (l) => (Object.hasOwn(l.counts, kind) ? grouped(l.counts[kind]) : ""),
        })),
        figure("seconds", (l) => l.seconds, seconds),
        figure("bytes", (l) => l.bytes, bytes),
        figure("rate", (l) => (l.seconds > 0 ? l.bytes / l.seconds : 0), rate),
        figure("read", (l) => l.read, bytes),
        figure("received", (l) => l.received, bytes),
        {
          ...figure("waited", (l) => l.waited, seconds),
          text: (l) =>
            l.waited > 0
              ? seconds(l.waited) + (l.waitedFor ? `, most for process ${l.waitedFor}` : "")
              : "",
        },
        {
          title: "what",
          name: true,
          value: (l) => l.rows.length,
          text: (l) => l.rows.flat().join(" "),
          cell: (l) =>
            l.rows.length
              ? el(
                  "details",
                  {},
                  el("summary", {}, counted(l.rows.length, "row")),
                  l.rows.map((row) =>
                    el("div", {}, `${row[0]} `, el("code", {}, row[1]), ` ${row[2]}`),
                  ),
                )
              : "",
        },
      ],
      { rows: data.loads, shown: 20, sort: [0, -1], noun: ["load", "loads"] },
    ),
  );
  const detailed = data.loads.filter((load) => load.each).reverse();
  if (detailed.length) box.append(_processesOfLoads(detailed));
  return box;
}

/** The processes of a load that can be chosen: their seconds as bars, and all figures. */
function _processesOfLoads(loads) {
  const box = el("div");
  const show = (number) => {
    const load = loads[Number(number)];
    box.replaceChildren(
      legend([
        ["new", "seconds of the load"],
        ["shared", "of these, waiting for other processes"],
      ]),
      _loadBars(load).node,
      ..._loadMap(load),
      _loadTable(load),
    );
    redrawAll();
  };
  const options = loads.map((load, n) => [String(n), `${load.name}, ${_date(load.time)}`]);
  const picker = choice("Processes of", options, "0", show);
  show("0");
  return el(
    "div",
    {},
    el("h3", {}, "Processes of a load, the slowest first"),
    loads.length > 1 ? el("div", { class: "controls" }, picker) : null,
    box,
  );
}

const _slowestFirst = (load) =>
  range(load.each.process.length).sort(
    (a, b) => load.each.seconds[b] - load.each.seconds[a] || a - b,
  );

function _loadBars(load) {
  const { process, seconds: took, waited } = load.each;
  const most = largest(took) || 1,
    order = _slowestFirst(load);
  let wide = 1,
    shown = [];
  return picture({
    label: `Seconds of the load of each of ${process.length} processes, the slowest first.`,
    hint: "Point at a bar, or use the arrow keys.",
    height: () => _BALANCE_HIGH + 16,
    draw(context, width) {
      const room = width - _SIDE - 8,
        every = Math.ceil(order.length / room);
      shown = order.filter((_, n) => n % every === 0);
      wide = Math.min(40, room / shown.length);
      context.fillStyle = colour("soft");
      context.textAlign = "right";
      for (const value of ticks(most, 3)) {
        const y = Math.round(8 + _BALANCE_HIGH * (1 - value / most)) + 0.5;
        context.fillText(seconds(value, most), _SIDE - 6, y);
      }
      shown.forEach((n, bar) => {
        const x = _SIDE + bar * wide,
          w = Math.max(0.5, wide - (wide > 4 ? 1 : 0));
        const high = (_BALANCE_HIGH * took[n]) / most,
          idle = (_BALANCE_HIGH * Math.min(waited[n], took[n])) / most;
        context.fillStyle = colour("new");
        context.fillRect(x, 8 + _BALANCE_HIGH - high, w, high);
        context.fillStyle = colour("shared");
        context.fillRect(x, 8 + _BALANCE_HIGH - high, w, idle);
      });
    },
    at(x, y) {
      const bar = Math.floor((x - _SIDE) / wide);
      return bar < 0 || bar >= shown.length || y > _BALANCE_HIGH + 8 ? -1 : bar;
    },
    box: (bar) => [_SIDE + bar * wide, 8, wide, _BALANCE_HIGH],
    text: (bar) => _describeLoad(load.each, shown[bar]),
    move: (bar, key) => along(bar, key, shown.length),
  });
}

const _MEASURES_OF_LOADS = [
  ["seconds", "seconds of the load", (load) => load.seconds, seconds],
  ["waited", "seconds of waiting for others", (load) => load.waited, seconds],
  ["rate", "rate of the load", (load) => load.rate, rate],
  ["began", "began after", (load) => load.began, seconds],
  ["bytes", "bytes loaded", (load) => load.bytes, bytes],
  ["read", "bytes read", (load) => load.read, bytes],
  ["received", "bytes received", (load) => load.received, bytes],
];

/** The processes of a load over the mesh of a save by as many; nothing if some did not tell. */
function _loadMap(load) {
  const { each } = load,
    n = each.process.length;
  const isWhole = n === load.processes && each.process.every((process, p) => process === p);
  if (!isWhole || !each.seconds.some((v) => v > 0)) return [];
  const rates = range(n).map((p) => (each.seconds[p] > 0 ? each.bytes[p] / each.seconds[p] : 0));
  const save = data.details.find((detail) => detail.processes === n);
  const facts = { ...each, rate: rates, n, meshes: save ? save.meshes : [] };
  const describe = (process) => _describeLoad(each, process);
  return [heatPicture(facts, _MEASURES_OF_LOADS, describe)];
}

function _describeLoad({ process, seconds: took, waited, bytes: size, read }, n) {
  return [
    `process ${process[n]}`,
    `${seconds(took[n])}, waited ${seconds(waited[n])}`,
    `${bytes(size[n])} loaded, ${bytes(read[n])} read`,
  ];
}

function _loadTable(load) {
  const { each } = load;
  const figure = (title, column, text) => ({
    title,
    number: true,
    value: (n) => column[n],
    text: (n) => text(column[n]),
  });
  return table(
    [
      figure("process", each.process, String),
      figure("began", each.began, seconds),
      figure("seconds", each.seconds, seconds),
      {
        title: "rate",
        number: true,
        value: (n) => each.bytes[n] / (each.seconds[n] || 1),
        text: (n) => rate(each.bytes[n] / (each.seconds[n] || 1)),
      },
      figure("bytes", each.bytes, bytes),
      figure("read", each.read, bytes),
      figure("received", each.received, bytes),
      figure("waited", each.waited, seconds),
      { title: "for", value: (n) => each.waitedFor[n], text: (n) => each.waitedFor[n] },
    ],
    { rows: _slowestFirst(load), shown: _TEN, noun: ["process", "processes"] },
  );
}

// How evenly the processes shared the work; and the processes as a table, the slowest first.

const _BALANCE_HIGH = 150,
  _TEN = 10;

function balanceSection(save) {
  const total = save.written.map((v, p) => v + save.reused[p]);
  const most = largest(save.written),
    average = mean(Array.from(save.written));
  const busiest = save.written.indexOf(most);
  const idle = save.written.filter((v) => v === 0).length;
  const about =
    `The busiest process, ${busiest}, wrote ${bytes(most)}` +
    (average ? `, ${(most / average).toFixed(2)} times the mean of ${bytes(average)}` : "") +
    (idle ? `; ${counted(idle, "process", "processes")} wrote nothing` : "") +
    ".";
  const box = section("Balance of bytes", about);
  let sorted = true;
  const drawn = _balance(save, total, () => sorted);
  box.append(
    el(
      "div",
      { class: "controls" },
      choice(
        "Order",
        [
          ["bytes", "the most first"],
          ["number", "by number"],
        ],
        "bytes",
        (value) => {
          sorted = value === "bytes";
          drawn.redraw();
        },
      ),
    ),
    legend([
      ["new", "written"],
      ...(save.reused.some((v) => v)
        ? [["shared", "not written again, because an earlier checkpoint has it"]]
        : []),
      ["time", "mean of what was written"],
    ]),
    drawn.node,
  );
  return box;
}

function _balance(save, total, isSorted) {
  const most = largest(total) || 1,
    average = mean(Array.from(save.written));
  let shown = [],
    wide = 1,
    left = _SIDE;
  return picture({
    label: `Bytes written by each of ${save.n} processes.`,
    hint: "Point at a bar, or use the arrow keys.",
    height: () => _BALANCE_HIGH + 16,
    draw(context, width) {
      const room = width - _SIDE - 8,
        each = Math.ceil(save.n / room);
      const order = range(save.n);
      if (isSorted()) order.sort((a, b) => total[b] - total[a] || a - b);
      shown = range(Math.ceil(save.n / each)).map((bar) =>
        order.slice(bar * each, (bar + 1) * each).reduce((a, b) => (total[b] > total[a] ? b : a)),
      );
      wide = Math.min(40, room / shown.length);
      for (const value of ticks(most, 3)) {
        const y = Math.round(8 + _BALANCE_HIGH * (1 - value / most)) + 0.5;
        context.strokeStyle = colour("line");
        context.beginPath();
        context.moveTo(left, y);
        context.lineTo(width, y);
        context.stroke();
        context.fillStyle = colour("soft");
        context.textAlign = "right";
        context.fillText(bytes(value), left - 6, y);
      }
      shown.forEach((process, bar) => {
        const x = Math.round(left + bar * wide),
          w = Math.round(left + (bar + 1) * wide) - x - (wide > 4 ? 1 : 0);
        const high = (_BALANCE_HIGH * total[process]) / most,
          own = (_BALANCE_HIGH * save.written[process]) / most;
        context.fillStyle = colour("shared");
        context.fillRect(x, 8 + _BALANCE_HIGH - high, w, high - own);
        context.fillStyle = colour("new");
        context.fillRect(x, 8 + _BALANCE_HIGH - own, w, own);
      });
      const y = 8 + _BALANCE_HIGH * (1 - average / most);
      context.strokeStyle = colour("time");
      context.lineWidth = 1.5;
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(left + wide * shown.length, y);
      context.stroke();
    },
    at(x, y) {
      const bar = Math.floor((x - left) / wide);
      return bar < 0 || bar >= shown.length || y > _BALANCE_HIGH + 8 ? -1 : bar;
    },
    box: (bar) => [left + bar * wide, 8, wide, _BALANCE_HIGH],
    text: (bar) => describeProcess(save, shown[bar]),
    move: (bar, key) => along(bar, key, shown.length),
  });
}

/** In how many saves by the same number of processes each was among the ten slowest. */
function _oftenSlow(save, saves) {
  const alike = saves.filter((other) => other.n === save.n),
    counts = new Int32Array(save.n);
  for (const other of alike)
    for (const process of other.slowest.slice(0, _TEN)) counts[process] += 1;
  return { counts, of: alike.length };
}

function processesSection(save, saves) {
  const often = _oftenSlow(save, saves);
  const box = section(
    "Processes, the slowest first",
    "Each waited, when it was done, until the last one was." +
      (often.of > 1 && save.n > _TEN
        ? ` “Often” says in how many of the ${often.of} steps that can be chosen above it was among the ten slowest.`
        : ""),
  );
  const timed = (title, of, hint) => ({
    title,
    hint,
    number: true,
    value: (p) => of[p],
    text: (p) => seconds(of[p]),
  });
  const sized = (title, of, text = bytes) => ({
    title,
    number: true,
    value: (p) => of[p],
    text: (p) => text(of[p]),
  });
  const some = (of) => of.some((v) => v !== 0);
  box.append(
    table(
      [
        { title: "process", number: true, value: (p) => p, text: String },
        ...(often.of > 1 && save.n > _TEN
          ? [
              {
                title: "often",
                number: true,
                hint: "among the ten slowest",
                value: (p) => often.counts[p],
                text: (p) => (often.counts[p] ? `${often.counts[p]} of ${often.of}` : ""),
              },
            ]
          : []),
        ...(save.meshes.length
          ? [
              {
                title: "place",
                value: save.place,
                text: save.place,
                hint: "of its first device, on the largest mesh",
              },
            ]
          : []),
        timed("began", save.began, "after process 0 was asked to save"),
        ...save.phases.map((phase) => timed(phase, save.took[phase], _PHASE_TEXTS[phase])),
        timed("done", save.done, "when it had written its part"),
        timed("waited", save.waited),
        ...(some(save.blocked)
          ? [timed("loop waited", save.blocked, "for how long the call blocked its caller")]
          : []),
        sized("written", save.written),
        ...(save.stored.some((v, p) => v !== save.written[p])
          ? [sized("stored", save.stored)]
          : []),
        ...(some(save.reused) ? [sized("not again", save.reused)] : []),
        ...(some(save.staged) ? [sized("staged", save.staged)] : []),
        sized("chunks", save.chunks, grouped),
        sized("rate", save.rate, rate),
      ],
      { rows: save.slowest, shown: _TEN, noun: ["process", "processes"] },
    ),
  );
  return box;
}

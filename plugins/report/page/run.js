// The steps of a run: how large each is, what is new in it, and how long it took.

const _BAR_TOP = 14,
  _BAR_BOTTOM = 40,
  _SIDE = 64;

function runSection() {
  const box = section("Steps", _runAbout());
  const steps = data.steps;
  if (steps.length > 1) {
    box.append(
      legend([
        ["new", "bytes that the step wrote"],
        ...(steps.some((s) => s.new !== null && s.new < s.bytes)
          ? [["shared", "bytes that it shares with earlier ones"]]
          : []),
        ...(steps.some((s) => s.state === "removed") ? [["removed", "removed since"]] : []),
        ["time", "how long the save took (right scale)"],
      ]),
      _stepsPicture(steps).node,
    );
  }
  box.append(_stepsTable(steps));
  if (data.left.length) {
    box.append(el("h3", {}, "What failed saves left, and what is being written"), _leftTable());
    if (data.holder) box.append(el("p", { class: "soft" }, `A job saves here: ${data.holder}`));
  }
  return box;
}

function _runAbout() {
  const gone = data.steps.filter((step) => step.state === "removed").length;
  const kept = data.steps.length - gone;
  if (gone) return `${counted(kept, "step")} kept, ${grouped(gone)} removed since they were saved.`;
  if (data.has_lines) return `${counted(kept, "step")} kept; none that was told of is removed.`;
  return (
    "Steps that were removed are shown if the report is made with --metrics: the storage keeps " +
    "no trace of them."
  );
}

/** How long a save took: until the commit if that is known, else until all was merged before it. */
const _took = (step) =>
  isMissing(step.committed) ? step.durations && step.durations.merged : step.committed;
const _tookText = (step) =>
  isMissing(step.committed) ? "until all was merged" : "from the call to the commit";

function _stepsPicture(steps) {
  const mostBytes = largest(steps.map((s) => s.bytes)) || 1;
  const mostTime = largest(steps.map((s) => _took(s) || 0)) || 1;
  let left = 0,
    wide = 1,
    high = 1;
  return picture({
    label: `Bytes and seconds of ${steps.length} steps; the table below has the same numbers.`,
    hint: "Point at a step, or use the arrow keys.",
    height: () => 230,
    draw(context, width, height) {
      left = _SIDE;
      wide = (width - 2 * _SIDE) / steps.length;
      high = height - _BAR_TOP - _BAR_BOTTOM;
      _axes(context, width, mostBytes, mostTime, high);
      const gap = wide > 6 ? 2 : wide > 2 ? 0.5 : 0;
      steps.forEach((step, n) => {
        const x = left + n * wide + gap / 2,
          w = Math.max(0.5, Math.min(60, wide - gap));
        const isNew = step.new === null ? step.bytes : step.new;
        const total = (high * step.bytes) / mostBytes,
          fresh = (high * isNew) / mostBytes;
        context.fillStyle = colour("shared");
        context.fillRect(x, _BAR_TOP + high - total, w, total);
        context.fillStyle = colour(step.state === "removed" ? "removed" : "new");
        context.fillRect(x, _BAR_TOP + high - fresh, w, fresh);
      });
      context.strokeStyle = context.fillStyle = colour("time");
      context.lineWidth = 1.5;
      steps.forEach((step, n) => {
        const took = _took(step);
        if (took === null || took === undefined) return;
        const x = left + n * wide + Math.min(62, wide) / 2;
        const y = _BAR_TOP + high - (high * took) / mostTime;
        context.beginPath();
        context.arc(x, y, Math.min(4, Math.max(1.5, wide / 3)), 0, 7);
        context.stroke();
        if (wide > 8) context.fill();
      });
      _stepLabels(context, steps, left, wide, height);
    },
    at(x, y) {
      const n = Math.floor((x - left) / wide);
      return y < _BAR_TOP || y > _BAR_TOP + high || n < 0 || n >= steps.length ? -1 : n;
    },
    box: (n) => [left + n * wide, _BAR_TOP, Math.min(62, wide), high],
    text(n) {
      const step = steps[n],
        took = _took(step);
      return [
        `${step.name}${step.state === "stored" ? "" : ` (${step.state})`}`,
        bytes(step.bytes),
        ...(step.new === null ? [] : [`${bytes(step.new)} new`]),
        ...(took === null || took === undefined ? [] : [seconds(took)]),
        ...(step.created ? [_date(step.created)] : []),
      ];
    },
    move: (n, key) => along(n, key, steps.length),
  });
}

function _axes(context, width, mostBytes, mostTime, high) {
  context.lineWidth = 1;
  for (const [most, text, isRight] of [
    [mostBytes, bytes, false],
    [mostTime, seconds, true],
  ]) {
    for (const value of ticks(most, 4)) {
      const y = Math.round(_BAR_TOP + high - (high * value) / most) + 0.5;
      context.fillStyle = colour(isRight ? "time" : "soft");
      context.textAlign = isRight ? "left" : "right";
      context.fillText(text(value, most), isRight ? width - _SIDE + 6 : _SIDE - 6, y);
      if (isRight) continue;
      context.strokeStyle = colour("line");
      context.beginPath();
      context.moveTo(_SIDE, y);
      context.lineTo(width - _SIDE, y);
      context.stroke();
    }
  }
}

function _stepLabels(context, steps, left, wide, height) {
  context.fillStyle = colour("soft");
  context.textAlign = "center";
  const every = Math.max(1, Math.ceil(72 / wide));
  for (let n = 0; n < steps.length; n += every) {
    const text = steps[n].name.replace(/^step_/, "").slice(0, 10);
    context.fillText(text, left + n * wide + Math.min(62, wide) / 2, height - _BAR_BOTTOM + 14);
  }
  context.fillText("step", left + (wide * steps.length) / 2, height - 8);
}

const _date = (created) => created.replace("T", " ").replace(/\.\d+/, "").replace("+00:00", " UTC");

function _stepsTable(steps) {
  const d = (key) => (s) => s.durations && s.durations[key];
  const timed = (value, hint, title) => ({
    title,
    hint,
    number: true,
    value,
    text: (s) => blank(value(s), seconds),
  });
  const size = (key, title, hint, text = bytes) => ({
    title,
    hint,
    number: true,
    value: (s) => s[key],
    text: (s) => blank(s[key], text),
  });
  const text = (key, title, hint) => ({
    title,
    hint,
    name: true,
    value: (s) => s[key],
    text: (s) => s[key],
  });
  const isSame = (key) => steps.every((s) => s[key] === steps[0][key]); // a tile says it
  const several = steps.some((s) => s.processes > 1);
  const columns = [
    _nameColumn(),
    {
      title: "state",
      isNews: (s) => s.state !== "stored" || s.saved_times > 1,
      value: (s) => s.state,
      text: (s) => s.state + (s.saved_times > 1 ? `, saved ${s.saved_times} times` : ""),
    },
    {
      title: "time, UTC",
      value: (s) => s.created,
      text: (s) => _date(s.created).replace(/ UTC$/, ""),
    },
    ..._metricColumns(steps),
    size("bytes", "bytes", "of its arrays"),
    size("new", "new", "bytes that its save wrote; the others, earlier steps have"),
    size("rate", "rate", "new bytes, by the seconds until all processes had written", rate),
    several
      ? timed(d("median"), "until half of the processes had written", "median wrote")
      : null,
    timed(d("done"), "until all processes had written", several ? "all wrote" : "wrote"),
    several
      ? {
          ...timed(d("slowest"), "the process for which all waited", "slowest"),
          text: (s) => blank(d("slowest")(s), String),
        }
      : null,
    _commitColumn(steps),
    {
      ...timed((s) => s.waited, "the longest that a call blocked its caller", "loop waited"),
      text: (s) =>
        blank(s.waited, seconds) + (s.durations && s.durations.blocked === null ? " (all)" : ""),
    },
    isSame("processes") ? null : size("processes", "processes", "", grouped),
    {
      ...text("bases", "shares with", "the steps that have bytes of it"),
      value: (s) => s.bases.join(", "),
      text: (s) => s.bases.join(", "),
    },
    size("after", "went on from", "the step from which its job went on", String),
    { ...text("error", "remark"), cell: (s) => el("span", { class: "bad" }, s.error) },
  ].filter(Boolean);
  const any = (value) => steps.some((step) => !isMissing(value(step)) && value(step) !== "");
  return table(
    columns.filter((c) => any(c.isNews ? (s) => c.isNews(s) || null : c.text)),
    {
      rows: steps,
      shown: 20,
      sort: [0, -1],
      noun: ["step", "steps"],
      rowClass: (s) => (s.state === "removed" ? "removed" : null),
    },
  );
}

function _nameColumn() {
  const detailed = new Set(data.details.map((detail) => detail.id));
  const button = (s) =>
    el(
      "button",
      {
        class: "link",
        type: "button",
        title: "show its processes below",
        onclick: () => showStep(s.id),
      },
      s.name,
    );
  return {
    title: "step",
    name: true,
    value: (s) => s.name,
    text: (s) => s.name,
    cell: (s) => (detailed.has(s.id) && data.details.length > 1 ? button(s) : s.name),
  };
}

function _metricColumns(steps) {
  const place = new Map(steps.map((step, n) => [step, n]));
  return data.metrics.slice(0, 6).map(({ name, values }) => ({
    title: name,
    number: true,
    value: (s) => (isFinite_(values[place.get(s)]) ? values[place.get(s)] : null),
    text: (s) => metricText(values[place.get(s)]),
  }));
}

/** How long saves took; until they were merged where nobody told more. */
function _commitColumn(steps) {
  const isTold = steps.some((s) => !isMissing(s.committed));
  const least = (s) => (isTold && isMissing(s.committed) ? "> " : "");
  return {
    title: isTold ? "committed" : "merged",
    hint: isTold
      ? "after the call, as process 0 told; else (>) when it had merged what all wrote"
      : "when process 0 had merged what all wrote; the commit followed",
    number: true,
    value: _took,
    text: (s) => blank(_took(s), (took) => least(s) + seconds(took)),
  };
}

function _leftTable() {
  return table(
    [
      { title: "name", name: true, value: (r) => r.name, text: (r) => r.name },
      { title: "what", value: (r) => r.what, text: (r) => `${r.what} (${r.kind})` },
      { title: "files", number: true, value: (r) => r.files, text: (r) => grouped(r.files) },
      { title: "bytes", number: true, value: (r) => r.bytes, text: (r) => bytes(r.bytes) },
    ],
    { rows: data.left, shown: 10, noun: ["orphan", "orphans"] },
  );
}

// The processes as a table, the slowest first.

const _TEN = 10;

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

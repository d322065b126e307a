// The time that interruptions cost, and failures.

function lostSection() {
  const { wall, effective, share, count, steps, skipped, rows } = data.lost;
  const box = section(
    "Lost time",
    `At least ${share} of the time was effective training: ${seconds(effective)} of ` +
      `${seconds(wall)} in steps that were kept. ${counted(count, "interruption")}; ` +
      `at least ${counted(steps, "step")} trained again.` +
      (skipped ? ` ${counted(skipped, "step")} not saved, as an earlier save had not ended.` : ""),
  );
  if (!rows.length) return box;
  const timed = (title, key, hint) => ({
    title,
    hint,
    number: true,
    value: (r) => r[key],
    text: (r) => blank(r[key], seconds),
  });
  const step = (title, key, hint) => ({ ...timed(title, key, hint), text: (r) => blank(r[key], String) });
  box.append(
    table(
      [
        { title: "last sign of life", value: (r) => r.time, text: (r) => _date(r.time) },
        step("reached", "reached", "the last step that the run is known to have reached"),
        step("resumed from", "resumed", "the step that the next job loaded"),
        step("steps lost", "lost_steps", "at least"),
        timed("noticed", "noticed_s", "at most: from the last known step to the first failure"),
        timed("down", "down_s", "at most: from the last sign of life to the next job"),
        timed("load", "load_s"),
        timed("lost", "lost_s", "at most: from the save of the resumed step to its load"),
        {
          title: "end",
          name: true,
          value: (r) => r.error,
          text: (r) => r.error || (r.closed ? "closed" : "no word: killed, or it did not close"),
        },
      ],
      { rows, shown: 20, sort: [0, -1], noun: ["interruption", "interruptions"] },
    ),
  );
  return box;
}

function failuresSection() {
  const box = section("Failures", "Failed saves and copies, and damage that loads passed over.");
  box.append(
    table(
      [
        { title: "time", value: (f) => f.time, text: (f) => _date(f.time) },
        { title: "what", value: (f) => f.kind, text: (f) => f.kind },
        { title: "checkpoint", name: true, value: (f) => f.name, text: (f) => f.name },
        {
          title: "processes",
          number: true,
          value: (f) => f.processes.length,
          text: (f) => f.processes.slice(0, 8).join(", ") + (f.processes.length > 8 ? ", …" : ""),
        },
        { title: "error", name: true, value: (f) => f.error, text: (f) => f.error },
      ],
      { rows: data.failures, shown: 20, sort: [0, -1], noun: ["failure", "failures"] },
    ),
  );
  return box;
}

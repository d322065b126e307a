// The page: what is there, in this order.

let showStep = () => {};

function _theme() {
  const root = document.documentElement,
    dark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const button = el("button", {
    type: "button",
    id: "theme",
    onclick: () => {
      chosen = root.dataset.theme === "dark" ? "light" : "dark";
      apply();
    },
  });
  function apply() {
    root.dataset.theme = chosen || (dark.matches ? "dark" : "light");
    root.style.colorScheme = root.dataset.theme;
    button.textContent = root.dataset.theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `switch to the ${button.textContent.toLowerCase()} theme`);
    redrawAll();
  }
  dark.addEventListener("change", apply);
  apply();
  return button;
}

function _tiles(tiles) {
  return el(
    "div",
    { class: "tiles" },
    tiles
      .filter(Boolean)
      .map(([number, text]) =>
        el("div", { class: "tile" }, el("b", {}, number), el("span", {}, text)),
      ),
  );
}

/** What stands out, in one line. */
function _headline() {
  const { level, text } = data.headline;
  const first = level === "fine" ? null : el("b", {}, "Look at this first: ");
  return el("p", { class: `headline ${level}`, id: "headline" }, first, text);
}

/** What saving cost the loop; of a run, also why it is not known. */
function _costTile() {
  if (data.cost) {
    const { waited, total, share, is_least } = data.cost;
    const times = `${seconds(waited)} of ${seconds(total)}`;
    return [`${is_least ? "≥ " : ""}${share}`, `of the loop’s time, it waited for saves: ${times}`];
  }
  if (data.steps.length < 2) return null;
  return ["?", "of the loop’s time, waiting for saves: for so short a time it needs --metrics"];
}

const _stepsText = (kept, gone) =>
  (kept === 1 ? "step" : "steps") + (gone ? ` kept, ${grouped(gone)} removed` : "");

function _overview() {
  const kept = data.steps.filter((step) => step.state !== "removed");
  const last = kept[kept.length - 1] || data.steps[data.steps.length - 1];
  const gone = data.steps.length - kept.length,
    took = last.durations;
  const every = sum(kept.map((step) => step.bytes)),
    shares = kept.some((step) => step.new !== null && step.new < step.bytes);
  const alone = data.steps.length > 1 ? [] : data.metrics.slice(0, 6);
  return _tiles([
    data.is_run
      ? [grouped(kept.length), _stepsText(kept.length, gone)]
      : null,
    ...alone.map((metric) => [metricText(metric.values[0]), metric.name]),
    data.is_run
      ? [bytes(data.on_disk), shares ? `on disk; ${bytes(every)} without sharing` : "on disk"]
      : null,
    [bytes(last.bytes), data.is_run ? `the newest, ${last.name}` : "of arrays"],
    last.new === null || data.is_run ? null : [bytes(last.new), "written by its save"],
    last.processes
      ? [grouped(last.processes), last.processes === 1 ? "process" : "processes"]
      : null,
    last.arrays === null ? null : [grouped(last.arrays), "arrays"],
    data.is_run ? _costTile() : null,
    data.lost && data.lost.count
      ? [`≥ ${data.lost.share}`, "of the time of all jobs, effective training"]
      : null,
    last.rate ? [rate(last.rate), "written, until all processes were done"] : null,
    isMissing(_took(last)) ? null : [seconds(_took(last)), _tookText(last)],
    took && took.blocked !== null ? [seconds(took.blocked), "the loop waited, at most"] : null,
    last.bases.length && !data.is_run
      ? [grouped(last.bases.length), `shares with ${last.bases.join(", ")}`]
      : null,
    took && last.processes > 1
      ? [
          String(took.slowest),
          `the slowest process: ${seconds(took.done)}, median ${seconds(took.median)}`,
        ]
      : null,
  ]);
}

function _detail() {
  const box = el("div", { id: "detail" });
  const saves = data.details.map(saveOf),
    options = saves.map((save, n) => [String(n), save.name]);
  const show = (number) => {
    const save = saves[Number(number)];
    const several = save.n > 1 ? [heatSection(save), balanceSection(save)] : [];
    box.replaceChildren(timelineSection(save), ...several, processesSection(save, saves));
    redrawAll();
  };
  const picker = choice("Processes of", options, "0", show);
  showStep = (id) => {
    const number = String(data.details.findIndex((detail) => detail.id === id));
    picker.querySelector("select").value = number;
    show(number);
    box.scrollIntoView({ block: "start" });
  };
  return {
    node: el(
      "div",
      {},
      saves.length > 1 ? el("div", { class: "controls sticky" }, picker) : null,
      box,
    ),
    start: () => show("0"),
  };
}

function _start() {
  document
    .getElementById("header")
    .append(
      el("div", { class: "top" }, el("h1", {}, data.title), _theme()),
      el("div", { class: "path mono" }, data.url),
    );
  const main = document.getElementById("content");
  main.append(_headline(), _overview(), ...data.notes.map((note) => el("p", { class: "note" }, note)));
  if (data.metrics.length && data.steps.length > 1) main.append(metricsSection());
  if (data.is_run) main.append(runSection());
  else if (data.steps[0].error) main.append(el("p", { class: "note bad" }, data.steps[0].error));
  if (data.lost) main.append(lostSection());
  if (data.failures.length) main.append(failuresSection());
  const detail = data.details.length ? _detail() : null;
  if (detail) main.append(detail.node);
  else
    main.append(
      el(
        "p",
        { class: "note" },
        "What each process did is not shown: it was not kept, or there are more than 65,536 processes.",
      ),
    );
  if (data.arrays) main.append(arraysSection());
  if (data.loads.length) main.append(loadsSection());
  document
    .getElementById("footer")
    .append(`Made ${data.made} by ${data.library}. This page uses no network.`);
  if (detail) detail.start();
  redrawAll();
}

_start();

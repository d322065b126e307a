// The arrays of the newest step, and which process held which part of each.

const _HUES = ["c0", "c1", "c2", "c3", "c4", "c5", "c6"];

function arraysSection() {
  const found = data.arrays;
  const rows = found.rows.map(([name, dtype, shape, size, layout, fragments, map]) => ({
    name,
    dtype,
    shape,
    bytes: size,
    layout: found.layouts[layout],
    fragments,
    map: found.maps[map],
  }));
  const about = data.is_run ? `Of ${found.of}, the newest step that can be read.` : null;
  const box = section("Arrays", about);
  if (!rows.length) {
    box.append(el("p", {}, "It has no arrays."));
    return box;
  }
  const one = el("div", {}),
    colours = { layout: _coloured(rows, "layout"), dtype: _coloured(rows, "dtype") };
  let by = "layout";
  const open = (row) => {
    one.replaceChildren(..._arrayMap(row));
    one.scrollIntoView({ block: "nearest" });
  };
  const drawn = treemap(arrayTree(rows), { hue: (row) => colours[by].hue(row), opened: open });
  const key = el("div", {}, colours[by].legend());
  box.append(
    el(
      "div",
      { class: "controls" },
      choice(
        "Colours",
        [
          ["layout", "by layout"],
          ["dtype", "by dtype"],
        ],
        by,
        (value) => {
          by = value;
          key.replaceChildren(colours[by].legend());
          drawn.redraw();
        },
      ),
    ),
    key,
    drawn.node,
    one,
    _arraysTable(rows, open),
  );
  if (found.more)
    box.append(
      el(
        "p",
        { class: "note" },
        `${counted(found.more, "smaller array")}, ${bytes(found.more_bytes)} together, ${found.more === 1 ? "is" : "are"} not shown.`,
      ),
    );
  return box;
}

/** Colours for the most common values of a field, the last one for all others. */
function _coloured(rows, field) {
  const sizes = new Map();
  for (const row of rows) sizes.set(row[field], (sizes.get(row[field]) || 0) + row.bytes);
  const common = [...sizes]
    .sort((a, b) => b[1] - a[1])
    .slice(0, _HUES.length)
    .map(([value]) => value);
  const others = sizes.size - common.length;
  return {
    hue: (row) => _HUES[common.indexOf(row[field])] || "c7",
    legend: () =>
      legend([
        ...common.map((value, n) => [
          _HUES[n],
          `${value === "-" ? "one device" : value} (${bytes(sizes.get(value))})`,
        ]),
        ...(others > 0 ? [["c7", counted(others, "other")]] : []),
      ]),
  };
}

function _arraysTable(rows, open) {
  return table(
    [
      {
        title: "name",
        name: true,
        value: (r) => r.name,
        text: (r) => r.name,
        cell: (r) =>
          el(
            "button",
            { type: "button", class: "link", title: "show its fragments", onclick: () => open(r) },
            r.name || "(root)",
          ),
      },
      { title: "dtype", value: (r) => r.dtype, text: (r) => r.dtype },
      { title: "shape", value: (r) => r.shape, text: (r) => r.shape },
      { title: "bytes", number: true, value: (r) => r.bytes, text: (r) => bytes(r.bytes) },
      {
        title: "layout",
        value: (r) => r.layout,
        text: (r) => r.layout,
        hint: "the mesh axes that split each dimension",
      },
      {
        title: "fragments",
        number: true,
        value: (r) => r.fragments,
        text: (r) => grouped(r.fragments),
      },
    ],
    { rows, shown: 20, noun: ["array", "arrays"] },
  );
}

/** The map of an array's fragments: which process held which part. */
function _arrayMap(row) {
  const head = [
    el("h3", {}, "Fragments of ", el("code", {}, row.name || "(root)")),
    el(
      "p",
      { class: "soft" },
      `${row.dtype} ${row.shape}, ${bytes(row.bytes)}, layout ${row.layout}, ${counted(row.fragments, "fragment")}`,
    ),
  ];
  if (!row.fragments) return [...head, el("p", {}, "It has no elements.")];
  if (!row.map)
    return [
      ...head,
      el("p", {}, "Too many fragments to draw here; unickpt inspect draws each array."),
    ];
  const { down, across, owner, labels, remark } = row.map;
  const lines = owner.map((cells, r) =>
    el(
      "tr",
      {},
      down ? el("th", { scope: "row" }, down[r]) : null,
      cells.map((number, c) => _mapCell(owner, labels, r, c)),
    ),
  );
  const heads = across
    ? el(
        "tr",
        {},
        down ? el("td") : null,
        across.map((text) => el("th", { scope: "col" }, text)),
      )
    : null;
  return [
    ...head,
    scrolling(
      el("table", { class: "map" }, el("thead", {}, heads), el("tbody", {}, lines)),
      "map of fragments",
    ),
    el("p", { class: "soft" }, `p: process, d: device${remark ? `; ${remark}` : ""}`),
  ];
}

/** A cell that spans its whole fragment; null if it is a part of one above, or on the left. */
function _mapCell(owner, labels, r, c) {
  const number = owner[r][c];
  if (number < 0) return el("td", {}, "…");
  if ((r && owner[r - 1][c] === number) || (c && owner[r][c - 1] === number)) return null;
  let rowSpan = 1,
    colSpan = 1;
  while (r + rowSpan < owner.length && owner[r + rowSpan][c] === number) rowSpan++;
  while (c + colSpan < owner[r].length && owner[r][c + colSpan] === number) colSpan++;
  const cell = el(
    "td",
    { rowSpan, colSpan },
    labels[number].flatMap((line, n) => (n ? [el("br"), line] : [line])),
  );
  const first = parseInt(labels[number][0].slice(1), 10);
  if (Number.isFinite(first)) cell.style.background = `hsla(${(first * 137) % 360},65%,50%,.25)`;
  return cell;
}

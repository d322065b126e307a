// A table that sorts by any column and filters by text. Of long ones, the first rows are shown.

/**
 * A table.
 *
 * columns: {title, value(row): what to sort by, text(row), cell(row): a node; optional, number,
 *     name, hint}.
 * of.rows, of.shown: rows, and how many to show at first.
 * of.sort: [number of a column, 1 or -1]. of.noun: of a row, and of several.
 * of.rowClass(row): optional.
 */
function table(columns, of) {
  let [by, direction] = of.sort || [-1, 1],
    most = of.shown,
    wanted = "";
  const body = el("tbody"),
    status = el("span", { class: "soft", role: "status" });
  const heads = columns.map((column, at) =>
    el(
      "th",
      { scope: "col", class: column.number ? "number" : null, title: column.hint },
      el("button", { type: "button", onclick: () => sortBy(at) }, column.title),
    ),
  );
  const more = el("button", {
    type: "button",
    onclick: () => {
      most += 100;
      fill();
    },
  });
  const filter = el("input", {
    type: "search",
    placeholder: "filter",
    "aria-label": `filter ${of.noun[1]}`,
    oninput: () => {
      wanted = filter.value.toLowerCase();
      fill();
    },
  });
  let texts = null; // made when they are first asked for

  function sortBy(at) {
    const first = columns[at].number ? -1 : 1;
    direction = at === by ? -direction : first;
    by = at;
    fill();
  }

  function text(n) {
    texts ||= of.rows.map((row) =>
      columns
        .map((c) => c.text(row))
        .join("\u0000")
        .toLowerCase(),
    );
    return texts[n];
  }

  function order() {
    const kept = range(of.rows.length).filter((n) => !wanted || text(n).includes(wanted));
    if (by < 0) return kept;
    const values = of.rows.map(columns[by].value);
    return kept.sort((a, b) => {
      const x = values[a],
        y = values[b];
      if (isMissing(x) || isMissing(y)) return isMissing(x) - isMissing(y) || a - b;
      const found = typeof x === "string" ? compare(x, String(y)) : x - y;
      return direction * found || a - b;
    });
  }

  function fill() {
    const found = order();
    heads.forEach((head, at) => {
      if (at === by) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
      head.firstChild.textContent =
        columns[at].title + (at === by ? (direction > 0 ? " \u25b2" : " \u25bc") : "");
    });
    body.replaceChildren(...found.slice(0, most).map((n) => line(of.rows[n])));
    const shown = Math.min(most, found.length);
    const all = counted(of.rows.length, ...of.noun);
    status.textContent = wanted ? `${grouped(found.length)} of ${all}` : all;
    if (shown < found.length) status.textContent += `, ${grouped(shown)} shown`;
    more.hidden = shown >= found.length;
    more.textContent = `Show ${grouped(Math.min(100, found.length - shown))} more`;
  }

  function line(row) {
    return el(
      "tr",
      { class: of.rowClass ? of.rowClass(row) : null },
      columns.map((column) => {
        const kind = column.number ? "number" : column.name ? "name" : null;
        return el("td", { class: kind }, column.cell ? column.cell(row) : column.text(row));
      }),
    );
  }

  fill();
  return el(
    "div",
    {},
    el("div", { class: "controls" }, filter, status),
    scrolling(el("table", {}, el("thead", {}, el("tr", {}, heads)), body), of.noun[1]),
    el("div", { class: "controls" }, more),
  );
}

let _scrolled = 0;

/** A box around a table that says above it how many columns do not fit, and scrolls to them. */
function scrolling(inner, label) {
  const id = `scrolls-${_scrolled++}`,
    hint = el("p", { class: "scrolls", id, hidden: true });
  const box = el(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": label, "aria-describedby": id },
    inner,
  );
  const isBeyond = (edge, view) => edge > view + 1;
  function look() {
    const { left, right } = box.getBoundingClientRect();
    const row = inner.rows[0],
      cells = [...(row ? row.cells : [])].map((cell) => cell.getBoundingClientRect());
    const after = cells.filter((cell) => isBeyond(cell.right, right)).length,
      before = cells.slice(1).filter((cell) => isBeyond(left, cell.left)).length;
    const doesScroll = box.scrollWidth > box.clientWidth + 1;
    hint.hidden = !doesScroll;
    box.classList.toggle("scrolls-on", doesScroll && after > 0);
    hint.textContent = after
      ? `${counted(after, "more column")} to the right: scroll the table, or use its arrow keys →`
      : `← ${counted(before, "column")} to the left`;
  }
  box.addEventListener("scroll", look, { passive: true });
  const watch = new ResizeObserver(look);
  watch.observe(box);
  watch.observe(inner);
  return el("div", {}, hint, box);
}

const _collator = new Intl.Collator("en", { numeric: true });
const compare = (a, b) => _collator.compare(a, b);

const blank = (value, text) => (value === null || value === undefined ? "" : text(value));

// The arrays as a map of areas, in containers by their names.

/** The tree of arrays by the parts of their names. */
function arrayTree(rows) {
  const top = { label: "", children: new Map(), size: 0, rows: [], up: null, depth: 0 };
  for (const row of rows) {
    const parts = row.name.split("/");
    let node = top;
    parts.forEach((part, at) => {
      if (!node.children.has(part)) {
        node.children.set(part, {
          label: part,
          children: new Map(),
          size: 0,
          rows: [],
          up: node,
          depth: at + 1,
        });
      }
      node = node.children.get(part);
    });
    node.rows.push(row);
  }
  _measure(top);
  return top;
}

function _measure(node) {
  node.parts = [...node.children.values()];
  for (const child of node.parts) _measure(child);
  node.size = sum(node.rows.map((row) => row.bytes)) + sum(node.parts.map((child) => child.size));
  node.count = node.rows.length + sum(node.parts.map((child) => child.count));
}

/** Cuts a box into boxes of given sizes, as square as possible (Bruls, Huizing and van Wijk). */
function squarify(items, [x, y, w, h]) {
  const total = sum(items.map((item) => item.size)),
    found = [];
  if (!(total > 0) || w <= 0 || h <= 0) return found;
  const scale = (w * h) / total;
  const left = items.filter((item) => item.size > 0).sort((a, b) => b.size - a.size);
  let at = 0;
  while (at < left.length) {
    const side = Math.min(w, h);
    let end = at,
      area = 0,
      worst = Infinity;
    while (end < left.length) {
      const next = area + left[end].size * scale,
        thick = next / side;
      const ratio = Math.max(
        (left[at].size * scale) / thick / thick,
        (thick * thick) / (left[end].size * scale),
      );
      if (end > at && ratio > worst) break;
      [area, worst] = [next, ratio];
      end += 1;
    }
    const thick = area / side;
    let offset = 0;
    for (const item of left.slice(at, end)) {
      const long = (item.size * scale) / thick;
      found.push([item, w >= h ? [x, y + offset, thick, long] : [x + offset, y, long, thick]]);
      offset += long;
    }
    if (w >= h) [x, w] = [x + thick, w - thick];
    else [y, h] = [y + thick, h - thick];
    at = end;
  }
  return found;
}

/**
 * The picture of a tree of arrays.
 *
 * of.hue(row): the name of the colour of an array. of.opened(row): called for an array that is chosen.
 */
function treemap(top, of) {
  let root = top,
    leaves = [],
    heads = [];
  const crumbs = el("nav", { class: "crumbs", "aria-label": "container" });
  const drawn = picture({
    label: `Map of ${top.count} arrays by their bytes, in containers. The table below has the same arrays.`,
    hint: "Click on an area to open its container; Backspace goes back. Arrow keys select.",
    height: (width) => Math.max(240, Math.min(460, width * 0.55)),
    draw(context, width, height) {
      [leaves, heads] = [[], []];
      _place(root, [0, 0, width, height], 0);
      for (const [row, [x, y, w, h]] of leaves) {
        context.fillStyle = colour(of.hue(row));
        context.fillRect(x + 0.5, y + 0.5, Math.max(0.4, w - 1), Math.max(0.4, h - 1));
        if (w > 30 && h > 15) _inside(context, row.name, [x, y, w, h], _ink(of.hue(row)));
      }
      for (const [label, size, [x, y, w]] of heads) {
        context.fillStyle = colour("text");
        context.textAlign = "left";
        context.fillText(_fitting(context, `${label}  ${bytes(size)}`, w - 8), x + 4, y + 9);
      }
      path();
    },
    at(x, y) {
      return leaves.findIndex(
        ([, [left, up, w, h]]) => x >= left && y >= up && x < left + w && y < up + h,
      );
    },
    box: (n) => leaves[n][1],
    text(n) {
      const row = leaves[n][0];
      return [
        row.name || "(root)",
        `${row.dtype} ${row.shape}`,
        bytes(row.bytes),
        `layout ${row.layout}`,
        counted(row.fragments, "fragment"),
      ];
    },
    move: (n, key) => along(n, key, leaves.length),
    chosen(n) {
      const row = leaves[n][0],
        below = _childOf(root, row);
      if (below && below.count > 1) go(below);
      else of.opened(row);
    },
    key(key) {
      if (key !== "Backspace" && key !== "Escape") return false;
      if (root.up) go(root.up);
      return true;
    },
  });

  function go(node) {
    root = node;
    drawn.select(-1);
    drawn.redraw();
  }

  function path() {
    const nodes = [];
    for (let node = root; node; node = node.up) nodes.unshift(node);
    crumbs.replaceChildren(
      ...nodes.flatMap((node, n) =>
        [
          n ? el("span", { class: "soft" }, "/") : null,
          el(
            "button",
            {
              type: "button",
              class: "link",
              "aria-current": n === nodes.length - 1 ? "true" : null,
              onclick: () => go(node),
            },
            n ? node.label || "(no name)" : "all arrays",
          ),
        ].filter(Boolean),
      ),
      el("span", { class: "soft" }, ` ${bytes(root.size)} in ${counted(root.count, "array")}`),
    );
  }

  function _place(node, [x, y, w, h], depth) {
    const items = [...node.parts, ...node.rows.map((row) => ({ row, size: row.bytes }))];
    for (const [item, box] of squarify(items, [x, y, w, h])) {
      if (item.row) leaves.push([item.row, box]);
      else if (item.count === 1) leaves.push([_only(item), box]);
      else _container(item, box, depth);
    }
  }

  function _container(node, [x, y, w, h], depth) {
    let label = node.label;
    while (node.parts.length === 1 && !node.rows.length && node.parts[0].parts.length) {
      node = node.parts[0];
      label += `/${node.label}`;
    }
    const room = depth < 2 && w > 70 && h > 44 ? 18 : 0,
      edge = depth < 2 && Math.min(w, h) > 8 ? 2 : 0;
    if (room) heads.push([label || "(no name)", node.size, [x, y, w]]);
    _place(node, [x + edge, y + room, w - 2 * edge, h - room - edge], depth + 1);
  }

  return { node: el("div", {}, crumbs, drawn.node), redraw: drawn.redraw };
}

/** The array of a container that has one. */
const _only = (node) => node.rows[0] || _only(node.parts[0]);

/** The container right below a node that an array is in. */
const _childOf = (node, row) => node.children.get(row.name.split("/")[node.depth]);

/** Writes the path of an array into its area, in as many lines as fit. */
function _inside(context, path, [x, y, w, h], ink) {
  const lines = _pathLines(context, path, w - 8, Math.floor((h - 2) / _LINE_HIGH));
  context.fillStyle = ink;
  context.textAlign = "center";
  lines.forEach((line, n) =>
    context.fillText(line, x + w / 2, y + h / 2 + (n - (lines.length - 1) / 2) * _LINE_HIGH),
  );
}

const _LINE_HIGH = 14;

/** A path in lines that end at slashes; of one that does not fit, the end, which tells most. */
function _pathLines(context, path, width, most) {
  const parts = path.split("/"),
    fits = (text) => context.measureText(text).width <= width;
  for (let first = 0; first < parts.length; first++) {
    const lines = [first ? "…/" : ""];
    parts.slice(first).forEach((part, n, all) => {
      const text = part + (n < all.length - 1 ? "/" : "");
      const last = lines.length - 1;
      if (!lines[last] || fits(lines[last] + text)) lines[last] += text;
      else lines.push(text);
    });
    if (lines.length <= most && lines.every(fits)) return lines;
  }
  const end = _fitting(context, parts[parts.length - 1], width);
  return end.length > 3 ? [end] : [];
}

/** Black or white, whichever is easier to read on a colour. */
function _ink(name) {
  const [r, g, b] = colour(name)
    .match(/[0-9a-f]{2}/gi)
    .map((part) => parseInt(part, 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000000" : "#ffffff";
}

function _fitting(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let most = text.length;
  while (most > 1 && context.measureText(`${text.slice(0, most)}…`).width > width)
    most -= Math.ceil(most / 8);
  return most > 1 ? `${text.slice(0, most)}…` : "";
}

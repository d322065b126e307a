// A canvas that is redrawn for each width and theme, is pointed at by mouse and by keyboard, and says
// below what is pointed at.

const _pictures = new Set();
const _tip = document.getElementById("tip");

function redrawAll() {
  for (const picture of _pictures) {
    if (picture.canvas.isConnected) picture.redraw();
    else if (picture.wasShown) _pictures.delete(picture);
  }
}

/**
 * A picture of things with numbers.
 *
 * of.label: what it shows, for those who do not see it.
 * of.height(width): its height, both in CSS pixels.
 * of.draw(context, width, height): draws it.
 * of.at(x, y): the number of the thing there; -1 if none.
 * of.box(number): [x, y, width, height] of a thing, which is marked.
 * of.text(number): what to say of a thing; lines.
 * of.move(number, key): the thing in the direction of an arrow key, Home or End; -1 for none.
 * of.chosen(number): called for a click, or Enter; optional.
 * of.key(key): called for other keys; optional.
 */
function picture(of) {
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": of.label });
  const readout = el("div", { class: "readout", "aria-live": "polite" }, of.hint || "");
  const node = el("div", { class: "picture" }, canvas, readout);
  const base = document.createElement("canvas");
  const self = { node, canvas, redraw, wasShown: false, select: show };
  let selected = -1,
    width = 0,
    height = 0;

  function redraw() {
    width = node.clientWidth;
    if (!width) return;
    self.wasShown = true;
    height = Math.ceil(of.height(width));
    const scale = Math.min(2, window.devicePixelRatio || 1);
    for (const each of [canvas, base]) {
      each.width = Math.round(width * scale);
      each.height = Math.round(height * scale);
    }
    canvas.style.height = `${height}px`;
    const context = base.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font =
      '12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
    context.textBaseline = "middle";
    of.draw(context, width, height);
    canvas.setAttribute("aria-label", of.label);
    paint();
  }

  function paint() {
    const context = canvas.getContext("2d"),
      scale = canvas.width / (width || 1);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(base, 0, 0);
    if (selected < 0) return;
    const [x, y, w, h] = of.box(selected);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.strokeStyle = colour("mark");
    context.lineWidth = 2;
    context.strokeRect(x - 1, y - 1, Math.max(2, w + 2), Math.max(2, h + 2));
  }

  function show(number) {
    if (number === selected) return;
    selected = number;
    readout.textContent = number < 0 ? of.hint || "" : of.text(number).join(" · ");
    paint();
  }

  function point(event) {
    const at = canvas.getBoundingClientRect();
    const number = of.at(event.clientX - at.left, event.clientY - at.top);
    show(number);
    _tip.hidden = number < 0;
    if (number < 0) return;
    _tip.textContent = of.text(number).join("\n");
    const room = _tip.getBoundingClientRect();
    const left = event.clientX + 14 + room.width < window.innerWidth;
    const x = left ? event.clientX + 14 : Math.max(4, event.clientX - 14 - room.width);
    const y = Math.min(event.clientY + 14, window.innerHeight - room.height - 4);
    _tip.style.left = `${x}px`;
    _tip.style.top = `${Math.max(4, y)}px`;
  }

  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", () => {
    _tip.hidden = true;
    if (document.activeElement !== canvas) show(-1);
  });
  canvas.addEventListener("click", () => selected >= 0 && of.chosen && of.chosen(selected));
  canvas.addEventListener("blur", () => show(-1));
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (/^(Arrow|Home|End)/.test(event.key)) {
      const next = of.move(selected, event.key);
      if (next >= 0) show(next);
    } else if (event.key === "Enter" && selected >= 0 && of.chosen) of.chosen(selected);
    else if (!(of.key && of.key(event.key))) return;
    event.preventDefault();
    _tip.hidden = true;
  });
  new ResizeObserver(() => node.clientWidth !== width && redraw()).observe(node);
  _pictures.add(self);
  return self;
}

/** The next of `count` things in a row. */
function along(number, key, count, forward = ["ArrowRight", "ArrowDown"]) {
  if (!count) return -1;
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  if (number < 0) return 0;
  return Math.min(count - 1, Math.max(0, number + (forward.includes(key) ? 1 : -1)));
}

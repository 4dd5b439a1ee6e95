// Builds nodes and brings them up to date. Texts become text nodes, so no text of a job can become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Children that are null or false are left out; lists of children are taken apart. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** How much `part` is of `whole`, drawn; `label` says it in words. */
export function bar(part, whole, label) {
  const share = whole > 0 ? Math.min(100, (100 * part) / whole) : 0;
  const shape = (name, attributes) => filled(document.createElementNS(SVG, name), attributes, []);
  const drawn = shape("svg", { class: "bar", role: "img", "aria-label": label });
  drawn.append(
    shape("rect", { class: "whole", width: "100%", height: "100%", rx: "3" }),
    shape("rect", { class: "part", width: `${share.toFixed(1)}%`, height: "100%", rx: "3" }),
  );
  return drawn;
}

/** A table in a frame of its own, which narrow windows can scroll. */
export function table(caption, columns, ...bodies) {
  const heads = columns.map((column) => h("th", { scope: "col", class: column.class ?? "" }, column.name ?? column));
  const inner = h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, heads)), bodies);
  return h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": caption }, inner);
}

/** Makes `old` look like `fresh`. What is there already stays the same node, and keeps focus and place. */
export function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType === Node.TEXT_NODE) {
    old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    // Which details are open is the reader's choice.
    if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  morphChildren(old, fresh);
}

function morphChildren(old, fresh) {
  const keyed = new Map([...old.children].map((child) => [child.dataset.key, child]));
  keyed.delete(undefined);
  let place = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const twin = keyed.get(child.dataset?.key) ?? place;
    if (twin === null || !isAlike(twin, child)) {
      old.insertBefore(child, place);
    } else {
      if (twin === place) place = place.nextSibling;
      else old.insertBefore(twin, place);
      morph(twin, child);
    }
  }
  while (place !== null) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function isAlike(one, other) {
  return one.nodeName === other.nodeName && one.dataset?.key === other.dataset?.key;
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== false));
  return node;
}

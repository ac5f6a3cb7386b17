// The radix tree as an icicle plot: a bar is a node, as wide as its tokens, and its children stand to its right.
// One row a leaf. Bars are laid out here and kept from look to look, so that focus and pointer stay where they are.

import { count, element, many } from "./elements.js";
import { layOut, pathOf } from "./layout.js";

const ROW = 26; // pixels
const LINE = 17; // of text in a bar of several rows
const GAP = 2;
const LONG_AGO = 2000; // look-ups of the tree

/** `frame` scrolls around `root`; `details` tells about the bar that has the focus or the pointer. */
export class TreeView {
  constructor(root, frame, details) {
    this.root = root;
    this.frame = frame;
    this.details = details;
    this.bars = new Map(); // node id -> its element
    this.view = null;
    this.chat = []; // token ids of the conversation
    this.current = null; // id of the node that the details tell about
    this.placed = [];
    new ResizeObserver(() => this.#draw()).observe(frame);
    root.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** `view`: the answer of /cache_tree. */
  show(view) {
    this.view = view;
    this.#draw();
  }

  /** Mark the branch of this conversation. */
  follow(ids) {
    this.chat = ids;
    this.#draw();
  }

  #draw() {
    if (!this.view) return;
    const mine = pathOf(this.view.nodes, this.chat);
    this.placed = layOut(this.view.nodes, mine, this.frame.clientWidth);
    const before = this.bars;
    this.bars = new Map();
    const order = [];
    for (const place of this.placed) {
      if (place.space !== undefined) {
        order.push(spaceLabel(place));
        continue;
      }
      const bar = before.get(place.node.id) ?? this.#newBar();
      this.bars.set(place.node.id, bar);
      update(bar, place, mine.has(place.node.id), this.view.texts);
      order.push(bar);
    }
    this.#arrange(order);
    this.root.style.height = `${ROW * (this.placed.at(-1)?.end ?? 1)}px`;
    const first = this.placed.find((place) => place.node)?.node.id;
    if (!this.bars.has(this.current)) {
      this.current = first ?? null;
      this.details.replaceChildren(); // what they told is no more
    }
    for (const [id, bar] of this.bars) bar.tabIndex = id === this.current ? 0 : -1;
    this.#tell();
  }

  /** Put the elements in order; one that is in its place already is not touched, or it would lose the focus. */
  #arrange(order) {
    const wanted = new Set(order);
    for (const child of [...this.root.children]) if (!wanted.has(child)) child.remove();
    order.forEach((bar, index) => {
      if (this.root.children[index] !== bar) this.root.insertBefore(bar, this.root.children[index] ?? null);
    });
  }

  #newBar() {
    const bar = element("div", { class: "bar", role: "treeitem", tabIndex: -1 }, element("span"));
    const look = () => this.#select(bar);
    bar.addEventListener("focus", look);
    bar.addEventListener("pointerenter", look);
    return bar;
  }

  #select(bar) {
    this.current = Number(bar.dataset.id);
    for (const [id, each] of this.bars) each.tabIndex = id === this.current ? 0 : -1;
    this.#tell();
  }

  /** What is known of the selected node. */
  #tell() {
    const place = this.placed.find((each) => each.node?.id === this.current);
    if (!place || !this.root.matches(":hover, :focus-within")) return;
    const { node } = place;
    const facts = [
      many(node.tokens, "token"),
      many(node.pages, "page"),
      `position ${count(place.start)}`,
      node.locks ? `locked by ${many(node.locks, "request")}` : "not locked",
      `found ${many(node.hits, "time")}`,
      node.age ? `last used ${many(node.age, "look-up")} ago` : "used last",
      node.children ? `${count(node.children)} below it` : "a leaf",
    ];
    const text = node.preview === null ? "Texts are left out: several keys share this server." : oneLine(node.preview);
    const next = [element("pre", {}, text), element("ul", { class: "facts" }, ...facts.map((fact) => element("li", {}, fact)))];
    if (this.details.textContent !== next.map((each) => each.textContent).join("")) this.details.replaceChildren(...next);
  }

  #onKey(event) {
    const bars = this.placed.filter((place) => place.node);
    const at = bars.findIndex((place) => place.node.id === this.current);
    const { node } = bars[at] ?? {};
    const targets = {
      ArrowDown: () => bars[at + 1]?.node.id,
      ArrowUp: () => bars[at - 1]?.node.id,
      ArrowLeft: () => node.parent,
      ArrowRight: () => bars.find((place) => place.node.parent === node.id)?.node.id,
      Home: () => bars[0].node.id,
      End: () => bars.at(-1).node.id,
    };
    if (!node || !targets[event.key]) return;
    event.preventDefault();
    this.bars.get(targets[event.key]())?.focus();
  }
}

function update(bar, place, mine, texts) {
  const { node } = place;
  bar.dataset.id = node.id;
  bar.style.left = `${place.x}px`;
  bar.style.top = `${place.row * ROW}px`;
  bar.style.width = `${place.width - GAP}px`;
  bar.style.height = `${(place.end - place.row) * ROW - GAP}px`;
  bar.style.setProperty("--fresh", node.locks ? 1 : freshness(node.age).toFixed(2));
  bar.classList.toggle("locked", node.locks > 0);
  bar.classList.toggle("mine", mine);
  bar.classList.toggle("narrow", place.width < 40);
  bar.classList.toggle("roomy", place.width >= 100 && place.end - place.row > 1);
  bar.firstChild.style.webkitLineClamp = Math.max(1, Math.floor(((place.end - place.row) * ROW - GAP - 6) / LINE));
  const text = node.preview === null ? many(node.tokens, "token") : oneLine(withoutMarks(node.preview));
  if (bar.firstChild.textContent !== text) bar.firstChild.textContent = text;
  bar.setAttribute("aria-level", place.level);
  bar.setAttribute(
    "aria-label",
    `${many(node.tokens, "token")}${mine ? ", of this chat" : ""}${node.locks ? `, locked by ${node.locks}` : ""}${texts ? `: ${text}` : ""}`,
  );
}

function spaceLabel(place) {
  const label = element("div", { class: "space soft", role: "none" }, place.space ? `namespace ${place.space}` : "no namespace");
  label.style.top = `${place.row * ROW}px`;
  return label;
}

/** 1 for what was used last, 0 for what is long ago; on a logarithmic scale, since old nodes may look alike. */
const freshness = (age) => Math.max(0, 1 - Math.log1p(age) / Math.log1p(LONG_AGO));

/** Without the template's marks such as <|im_start|>: they stand in every node and say little. */
const withoutMarks = (text) => text.replace(/<\|[^|]*(\||$)>?/g, "").trim() || text;

const oneLine = (text) => text.replace(/\s*\n\s*/g, " ↵ ").trim() || "(blank)";

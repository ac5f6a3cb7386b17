// The pool as small cells, coloured by owner, in the order of page ids.

import { count } from "./elements.js";

const SIZES = [14, 12, 10, 8, 7, 6, 5, 4, 3]; // of a cell with its gap, in pixels: the largest that keeps the map low
const HEIGHT = 120;

/** Draws on a canvas; colours are the style sheet's, so light and dark follow it. */
export class PoolMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.view = null;
    new ResizeObserver(() => this.#draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  /** `view`: the answer of /cache_tree. */
  show(view) {
    this.view = view;
    const { pages, page_map: map } = view;
    const cell = map.pages_per_cell > 1 ? ` A cell is ${count(map.pages_per_cell)} pages, in the colour of most of them.` : "";
    const quarantine = pages.quarantine ? `${count(pages.quarantine)} in quarantine, ` : "";
    this.canvas.setAttribute(
      "aria-label",
      `Owners of the KV pages: ${count(pages.tree)} of the radix tree, ${count(pages.request)} of requests, ${quarantine}${count(pages.free)} free.${cell}`,
    );
    this.canvas.title = cell.trim();
    this.#draw();
  }

  #draw() {
    if (!this.view) return;
    const { runs } = this.view.page_map;
    const cells = runs.reduce((sum, [, length]) => sum + length, 0);
    const width = this.canvas.parentElement.clientWidth - horizontalPadding(this.canvas.parentElement);
    if (width <= 0) return;
    const size = SIZES.find((each) => Math.ceil(cells / Math.floor(width / each)) * each <= HEIGHT) ?? SIZES.at(-1);
    const columns = Math.floor(width / size);
    this.#resize(width, Math.ceil(cells / columns) * size);
    const style = getComputedStyle(this.canvas);
    const colours = this.view.owners.map((owner) => style.getPropertyValue(`--${owner}`));
    const context = this.canvas.getContext("2d");
    const gap = size > 4 ? 1 : 0.5;
    let at = 0;
    for (const [owner, length] of runs) {
      context.fillStyle = colours[owner];
      for (const end = at + length; at < end; at += 1) {
        context.fillRect((at % columns) * size, Math.floor(at / columns) * size, size - gap, size - gap);
      }
    }
  }

  #resize(width, height) {
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.canvas.getContext("2d").scale(scale, scale);
  }
}

function horizontalPadding(box) {
  const style = getComputedStyle(box);
  return parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
}

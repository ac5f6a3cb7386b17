// The live view of the cache: asks /cache_tree every second while somebody can see it, and slower while it fails.

import { askJson } from "./api.js";
import { byId, count, element, many, percent } from "./elements.js";
import { PoolMap } from "./pool.js";
import { TreeView } from "./tree.js";

const EVERY = 1000; // milliseconds
const LONGEST = 30000; // between two tries while the server fails
const DENIED = [401, 403];

/** `askAdminKey` is called when somebody wants to give one. */
export class CacheView {
  constructor(askAdminKey) {
    this.pool = new PoolMap(byId("pool"));
    this.tree = new TreeView(byId("tree"), byId("tree-frame"), byId("node"));
    this.timer = null;
    this.failures = 0;
    this.started = false;
    byId("admin-key").addEventListener("click", askAdminKey);
    document.addEventListener("visibilitychange", () => this.started && this.start());
  }

  /** Look now, and from now on. */
  start() {
    this.started = true;
    this.failures = 0;
    this.#next(0);
  }

  /** Show where this conversation lies in the tree. */
  follow(ids) {
    this.tree.follow(ids);
  }

  #next(wait) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#look(), wait);
  }

  async #look() {
    const timer = this.timer;
    // Out of sight nothing is asked; becoming visible starts again.
    if (document.visibilityState !== "visible" || byId("cache").offsetParent === null) return;
    try {
      this.#show(await askJson("cache_tree", { kind: "admin", signal: AbortSignal.timeout(LONGEST) }));
      this.failures = 0;
    } catch (error) {
      this.failures += 1;
      this.#trouble(error);
    }
    if (timer === this.timer) this.#next(Math.min(LONGEST, EVERY * 2 ** this.failures));
  }

  #show(view) {
    byId("trouble").hidden = true;
    const { pages } = view;
    byId("pool-size").textContent = `${count(pages.total)} pages of ${count(view.page_size)} tokens`;
    this.pool.show(view);
    const owners = [
      ["tree", "radix tree", pages.tree, pages.locked ? `${count(pages.locked)} of them locked` : ""],
      ["request", "requests", pages.request, ""],
      ...(pages.quarantine ? [["quarantine", "quarantine", pages.quarantine, "a peer may still write there"]] : []),
      ["free", "free", pages.free, ""],
    ];
    byId("owners").replaceChildren(
      ...owners.map(([owner, name, number, more]) =>
        element(
          "li",
          { "data-owner": owner },
          element("i", { class: `swatch ${owner}` }),
          `${name} `,
          element("b", {}, count(number)),
          element("span", { class: "soft" }, ` (${[percent(number, pages.total), more].filter(Boolean).join(", ")})`),
        ),
      ),
    );
    this.tree.show(view);
    byId("tree-size").textContent = treeSize(view);
  }

  #trouble(error) {
    const denied = DENIED.includes(error.status);
    const again = denied ? "" : ` Trying again in ${Math.min(LONGEST, EVERY * 2 ** this.failures) / 1000} s.`;
    byId("trouble").firstElementChild.textContent = `The cache cannot be shown: ${error.message}.${again}`;
    byId("admin-key").hidden = !denied;
    byId("trouble").hidden = false;
  }
}

function treeSize(view) {
  const shown = `${count(view.pages.tree * view.page_size)} tokens`;
  if (!view.hidden_pages) return `${shown} in ${many(view.nodes.length, "node")}`;
  return `${shown}; the latest ${count(view.nodes.length)} nodes, ${count(view.hidden_pages * view.page_size)} tokens in others`;
}

// The status page: one stream of events, drawn as it comes; while nobody can see it there is none.

import { ask, events } from "./api.js";
import { byId, count, element, percent } from "./elements.js";
import { askKey } from "./keys.js";
import { explain, ms } from "./why.js";

const FIRST_WAIT = 1000; // milliseconds before the stream is asked for again; doubles while that fails
const LONGEST_WAIT = 30000;

let watching = null; // the AbortController of the stream

async function watch() {
  watching?.abort();
  const mine = (watching = new AbortController());
  let wait = FIRST_WAIT;
  while (watching === mine && document.visibilityState === "visible") {
    try {
      for await (const state of events(await ask("events", { signal: mine.signal }))) {
        wait = FIRST_WAIT;
        show(state);
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      if ([401, 403].includes(error.status)) {
        trouble(error.message);
        askKey(error.message, watch);
        return;
      }
      trouble(`${error.message}; trying again in ${wait / 1000} s`);
    }
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(LONGEST_WAIT, 2 * wait);
  }
}

function trouble(message) {
  byId("status").textContent = "no connection";
  byId("status").dataset.state = "gone";
  byId("trouble").textContent = message;
  byId("trouble").hidden = false;
}

function show(state) {
  const up = state.workers.filter((worker) => worker.state === "up").length;
  byId("status").textContent = state.draining ? "draining" : `${up} of ${state.workers.length} workers up`;
  byId("status").dataset.state = up && !state.draining ? "ready" : "failed";
  byId("policy").textContent = state.policy;
  byId("trouble").textContent = state.workers_file_error && `The workers file is not used as it is now: ${state.workers_file_error}`;
  byId("trouble").hidden = !state.workers_file_error;
  byId("figures").replaceChildren(
    figure("running", "at workers", count(state.running)),
    figure("waiting", "waiting", count(state.waiting)),
    figure("rejected", "refused", count(state.rejected), refusals(state.rejected_by)),
    figure("hit-rate", "prompt tokens cached", state.told ? percent(state.cached_tokens, state.prompt_tokens) : "unknown"),
  );
  byId("workers").tBodies[0].replaceChildren(...state.workers.map(workerRow));
  decisions(state.decisions);
}

function figure(name, label, value, title = "") {
  return element("li", { "data-figure": name, title }, element("b", {}, value), element("span", {}, label));
}

function refusals(counts) {
  return Object.entries(counts)
    .filter(([, number]) => number)
    .map(([reason, number]) => `${reason}: ${count(number)}`)
    .join(", ");
}

function workerRow(worker) {
  const { load, ended_requests: ended } = worker;
  return element(
    "tr",
    {},
    cell(worker.name),
    cell(worker.url),
    cell(worker.role),
    element("td", {}, element("span", { "data-state": worker.state }, worker.state)),
    number(worker.open_requests),
    number(load.running),
    number(load.waiting),
    element("td", {}, ...memory(load)),
    number(ended.ok),
    number(ended.fault),
    number(worker.incarnation - 1),
  );
}

function memory({ kv_tokens: all, free_tokens: free }) {
  if (!all) return ["unknown"];
  const meter = element("meter", { "aria-label": "KV in use" });
  meter.max = all;
  meter.value = all - free;
  return [meter, percent(all - free, all)];
}

function decisions(list) {
  const body = byId("decisions").tBodies[0];
  const focused = document.activeElement?.dataset?.rid;
  body.replaceChildren(...list.map(decisionRow));
  // The rows are new; whoever was on one of them stays there.
  if (focused !== undefined) [...body.querySelectorAll("button")].find((button) => button.dataset.rid === focused)?.focus();
}

function decisionRow(told) {
  const name = element("button", { type: "button", title: told.rid, "data-rid": told.rid }, told.rid);
  name.addEventListener("click", () => explain(told.rid));
  return element(
    "tr",
    {},
    element("td", {}, name),
    cell(new Date(1000 * told.at).toLocaleTimeString("en-GB")),
    cell(told.names),
    number(told.tokens),
    number(told.hits),
    told.cached === null ? cell("", "number") : number(told.cached),
    cell(ms(told.estimated_ttft_s), "number"),
    cell(ms(told.ttft_s), "number"),
    number(told.tries),
    element("td", {}, element("span", { "data-state": told.outcome }, told.outcome)),
    cell(told.reason, "why"),
  );
}

const cell = (text, kind = "") => element("td", kind ? { class: kind } : {}, text);
const number = (value) => cell(count(value), "number");

document.addEventListener("visibilitychange", () => (document.visibilityState === "visible" ? watch() : watching?.abort()));
watch();

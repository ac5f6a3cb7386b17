// Why one request went where it went: who was considered, and the parts of each estimate.

import { askJson } from "./api.js";
import { byId, count, element } from "./elements.js";

const PARTS = [
  ["queue_s", "queue"],
  ["prefill_s", "prefill"],
  ["transfer_s", "transfer"],
  ["decode_s", "decode"],
  ["evict_s", "eviction"],
  ["imbalance_s", "imbalance"],
];

/** 0.0123 -> "12.3 ms"; nothing for null. */
export const ms = (seconds) => (seconds === null ? "" : `${(1000 * seconds).toFixed(1)} ms`);

/** Show the explanation of a request. */
export async function explain(rid) {
  byId("why-title").textContent = rid;
  try {
    const told = await askJson(`explain?rid=${encodeURIComponent(rid)}`);
    byId("why-text").replaceChildren(...told.tries.map((tried, index) => oneTry(tried, index, told)), outcome(told));
  } catch (error) {
    byId("why-text").replaceChildren(element("p", { class: "error" }, error.message));
  }
  if (!byId("why").open) byId("why").showModal();
}

function outcome(told) {
  const parts = [
    told.outcome,
    told.status && `status ${told.status}`,
    told.ttft_s !== null && `first token after ${ms(told.ttft_s)}, expected ${ms(told.estimated_ttft_s)}`,
    told.error,
  ];
  return element("p", {}, parts.filter(Boolean).join("; "));
}

function oneTry(tried, index, told) {
  const head = ["Worker", "Device hit", "Host hit", "Known", ...PARTS.map(([, name]) => name), "TTFT", "Score"];
  const rows = tried.candidates.map((each) => {
    const name = each.decode ? `${each.worker} + ${each.decode}` : each.worker;
    const hits = [count(each.hits.device), count(each.hits.host), each.hits.exact ? "by its events" : "by what was sent"];
    const parts = PARTS.map(([part]) => ms(each.parts[part]));
    return element("tr", {}, ...[name, ...hits, ...parts, ms(each.ttft_s), ms(each.score)].map((text) => element("td", {}, text)));
  });
  return element(
    "div",
    {},
    element("p", {}, `${told.tries.length > 1 ? `Try ${index + 1}: ` : ""}${tried.names}: ${tried.reason}${tried.failure ? `; failed: ${tried.failure}` : ""}`),
    element(
      "div",
      { class: "wide-table" },
      element("table", {}, element("thead", {}, element("tr", {}, ...head.map((text) => element("th", {}, text)))), element("tbody", {}, ...rows)),
    ),
  );
}

// A prompt in its own text: what came from the cache in one colour, what was computed in another.

import { count, element, percent } from "./elements.js";

/** `prompt`: the answer of /tokenize with token strings; `usage`: that of the request. Closed until somebody opens it. */
export function promptView(prompt, usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const [summary, text] = cached === undefined ? unreported(prompt) : coloured(prompt, cached);
  const notes = [];
  if (cached === undefined) notes.push("This server does not report cached tokens (--no-enable-cache-report).");
  if (prompt.count !== usage.prompt_tokens) {
    notes.push(`The request had ${count(usage.prompt_tokens)} prompt tokens, its text now has ${count(prompt.count)}: the template gives another text each time.`);
  }
  return element(
    "details",
    { class: "prompt" },
    element("summary", {}, ...summary),
    ...notes.map((note) => element("p", { class: "soft" }, note)),
    element("pre", { tabIndex: 0, "aria-label": "The prompt as the model reads it" }, ...text),
  );
}

function coloured(prompt, cached) {
  const pieces = prompt.token_strings;
  const [before, after] = [pieces.slice(0, cached).join(""), pieces.slice(cached).join("")];
  const bar = element("span", { class: "share", "aria-hidden": "true" }, element("span"));
  bar.firstChild.style.width = percent(cached, prompt.count).replace(" ", "");
  const words = element(
    "span",
    {},
    "Prompt: ",
    element("span", { class: "cached" }, `${count(cached)} cached`),
    " + ",
    element("span", { class: "computed" }, `${count(prompt.count - cached)} computed`),
  );
  return [
    [words, bar],
    [element("span", { class: "cached", title: "from the cache" }, before), element("span", { class: "computed", title: "computed" }, after)],
  ];
}

function unreported(prompt) {
  return [[element("span", {}, `Prompt: ${count(prompt.count)} tokens`)], [prompt.token_strings.join("")]];
}

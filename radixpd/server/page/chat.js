// The conversation: one turn after another, streamed, each with its figures and its prompt.
// A turn that failed stays to be seen but is not sent again. One answer at a time.

import { ask, askJson, events } from "./api.js";
import { byId, count, element, percent } from "./elements.js";
import { promptView } from "./prompt.js";

const NEAR_END = 80; // pixels: whoever has scrolled further up is reading and is left there

/** `model`: the answer of /get_model_info; `onTokens(ids)`: the token ids of the whole conversation, after each answer. */
export class Chat {
  constructor(model, onTokens) {
    this.model = model;
    this.onTokens = onTokens;
    this.turns = [];
    this.running = null; // the AbortController of the answer that is being written
  }

  /** Send a message and show the answer as it comes. */
  async send(text) {
    const turn = { text, answer: "", failed: false };
    const request = this.#request(turn);
    this.turns.push(turn);
    const view = new TurnView(turn, this.model);
    const running = (this.running = new AbortController());
    const usage = await this.#stream(request, turn, view, running.signal);
    if (this.running !== running) return; // a new chat has begun
    this.running = null;
    // Not awaited: the next message need not wait for it.
    if (usage) this.#explain(request, turn, view, usage);
  }

  /** End the answer that is being written; what came of it stays. */
  stop() {
    this.running?.abort();
  }

  /** Forget everything. */
  clear() {
    this.stop();
    this.running = null;
    this.turns = [];
    for (const shown of byId("log").querySelectorAll(".turn")) shown.remove();
    byId("welcome").hidden = false;
    this.onTokens([]);
  }

  /** What is sent, and the same as /tokenize reads it. */
  #request(turn) {
    const before = this.turns.filter((each) => !each.failed);
    const numbers = { temperature: numberIn("temperature"), max_tokens: numberIn("max-tokens") };
    const options = Object.fromEntries(Object.entries(numbers).filter(([, value]) => value !== null));
    const common = { ...options, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    if (!this.model.has_chat_template) {
      const prompt = before.map((each) => each.text + each.answer).join("") + turn.text;
      return { path: "v1/completions", body: { prompt, ...common }, prompt: { prompt }, whole: (answer) => ({ prompt: prompt + answer }) };
    }
    const system = byId("system").value.trim();
    const messages = [
      ...(system ? [{ role: "system", content: system }] : []),
      ...before.flatMap((each) => [{ role: "user", content: each.text }, { role: "assistant", content: each.answer }]),
      { role: "user", content: turn.text },
    ];
    const whole = (answer) => ({ messages: [...messages, { role: "assistant", content: answer }], add_generation_prompt: false });
    return { path: "v1/chat/completions", body: { messages, ...common }, prompt: { messages }, whole };
  }

  /** Run one request to its end; the last usage that the server told, or null. */
  async #stream(request, turn, view, signal) {
    const times = { sent: performance.now(), first: 0, last: 0 };
    let usage = null;
    let finish = "";
    try {
      const response = await ask(request.path, { body: request.body, signal });
      for await (const event of events(response)) {
        usage = event.usage ?? usage;
        const choice = event.choices[0];
        const text = choice?.delta?.content ?? choice?.text ?? "";
        finish = choice?.finish_reason ?? finish;
        if (text) {
          times.last = performance.now();
          times.first ||= times.last;
          turn.answer += text;
        }
        view.write(text, times, usage, finish);
      }
    } catch (error) {
      if (signal.aborted) finish = "stopped by you";
      else view.fail(error.message);
      turn.failed = !signal.aborted || !turn.answer;
    }
    view.end(times, usage, finish);
    return usage;
  }

  /** The prompt in its own text, and the conversation's tokens for whoever wants to find them in the tree. */
  async #explain(request, turn, view, usage) {
    try {
      const prompt = await askJson("tokenize", { body: { ...request.prompt, return_token_strings: true } });
      view.prompt(prompt, usage);
      const whole = await askJson("tokenize", { body: request.whole(turn.answer) });
      if (this.turns.at(-1) === turn) this.onTokens(whole.tokens);
    } catch (error) {
      view.noPrompt(error.message);
    }
  }
}

/** What is on the screen of one turn. */
class TurnView {
  constructor(turn, model) {
    this.shown = document.createTextNode("");
    this.unshown = "";
    this.latest = [];
    this.frame = 0;
    this.text = element("div", { class: "text" }, this.shown);
    this.facts = element("ul", { class: "facts", "aria-label": "Figures of this answer" });
    this.root = element(
      "div",
      { class: "turn", "aria-busy": "true" },
      element("div", { class: "said user" }, element("h3", {}, "You"), element("div", { class: "text" }, turn.text)),
      element("div", { class: "said model" }, element("h3", {}, model.served_model_name), this.text, this.facts),
    );
    byId("welcome").hidden = true;
    byId("log").append(this.root);
    this.root.scrollIntoView({ block: "end" });
  }

  /** Take more text and the figures so far. A fast model writes more often than a screen is drawn: once a frame is enough. */
  write(text, ...figures) {
    this.unshown += text;
    this.latest = figures;
    this.frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.frame = 0;
    this.#keepingEndInSight(() => {
      this.shown.appendData(this.unshown);
      this.#figures(...this.latest);
    });
    this.unshown = "";
  }

  fail(message) {
    this.#keepingEndInSight(() => this.text.after(element("p", { class: "error", role: "alert" }, message)));
  }

  #figures(times, usage, finish) {
    const facts = times.first ? [["TTFT", `${((times.first - times.sent) / 1000).toFixed(2)} s`]] : [];
    const rate = ((usage?.completion_tokens ?? 0) - 1) / ((times.last - times.first) / 1000);
    if (Number.isFinite(rate) && rate > 0) facts.push(["tokens/s", rate < 10 ? rate.toFixed(1) : rate.toFixed(0)]);
    if (usage) {
      const { prompt_tokens: prompt, completion_tokens: answer } = usage;
      facts.push(["prompt tokens", count(prompt)], ["cached", cachedText(usage)], ["answer tokens", count(answer)]);
    }
    if (finish) facts.push(["finish", finish]);
    this.facts.replaceChildren(...facts.map(([name, value]) => element("li", { "data-fact": name }, `${name} `, element("b", {}, value))));
  }

  end(...figures) {
    cancelAnimationFrame(this.frame);
    this.latest = figures;
    this.#draw();
    this.root.removeAttribute("aria-busy");
  }

  prompt(prompt, usage) {
    this.#add(promptView(prompt, usage));
  }

  noPrompt(message) {
    this.#add(element("p", { class: "soft" }, `The prompt cannot be shown: ${message}`));
  }

  #add(shown) {
    this.#keepingEndInSight(() => this.facts.after(shown));
  }

  #keepingEndInSight(change) {
    const log = byId("log");
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    change();
    if (follow) log.scrollTop = log.scrollHeight;
  }
}

function cachedText(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens;
  return cached === undefined ? "not reported" : `${count(cached)} (${percent(cached, usage.prompt_tokens)})`;
}

function numberIn(id) {
  const value = byId(id).valueAsNumber;
  return Number.isFinite(value) ? value : null;
}

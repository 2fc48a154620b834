// The tab "Server": what /metrics says, once a second while somebody looks.

import {ask} from "./api.js";
import {draw, makeChart} from "./chart.js";
import {$, el} from "./dom.js";

const SECONDS = 120;  // that charts go back
const whole = value => value.toLocaleString("en", {maximumFractionDigits: 0});
const exact = value => value.toLocaleString("en", {maximumSignificantDigits: 3});
const percent = share => `${exact(100 * share)}%`;
const duration = seconds => seconds < 1 ? `${exact(1000 * seconds)} ms` : `${exact(seconds)} s`;

// From one reading of the metrics and the one before it.
const gauge = name => now => now.get(name);
const change = name => (now, then) => now.get(name) - then.get(name);
const rate = name => (now, then) => change(name)(now, then) / (now.time - then.time);
const ratio = (name, of) => (now, then) => change(of)(now, then) ? change(name)(now, then) / change(of)(now, then) : NaN;
const mean = name => ratio(`${name}_sum`, `${name}_count`);

// A chart each: its title, how its values are written, the least value at its top, its lines; and what is said without values.
const TILES = [
  ["Requests", whole, 4, {running: gauge("vllm:num_requests_running"), waiting: gauge("vllm:num_requests_waiting")}],
  ["Tokens a second", exact, 10, {generated: rate("vllm:generation_tokens_total"), "of prompts": rate("vllm:prompt_tokens_total")}],
  ["Tokens in a step", exact, 4, {
    computed: ratio("compiled_llm:computed_tokens_total", "compiled_llm:steps_total"),
    padding: ratio("compiled_llm:padding_tokens_total", "compiled_llm:steps_total"),
  }],
  ["Time of a step", duration, 0.001, {mean: ratio("compiled_llm:step_seconds_total", "compiled_llm:steps_total")}],
  ["Share of the machine's limit", percent, 1, {mean: ratio("compiled_llm:limit_seconds_total", "compiled_llm:device_seconds_total")},
    "Unknown until compiled-llm report run has measured this machine, and the server is started again."],
  ["KV cache in use", percent, 1, {now: now => now.get("vllm:kv_cache_usage_perc") / now.get("compiled_llm:engine_up")}],
  ["Prefix cache hits", percent, 1, {"of prompt tokens": ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")}],
  ["Preemptions", whole, 4, {new: change("vllm:num_preemptions_total")}],
  ["Time to the first token", duration, 0.001, {mean: mean("vllm:time_to_first_token_seconds")}],
  ["Time between tokens", duration, 0.001, {mean: mean("vllm:inter_token_latency_seconds")}],
];
const TOTALS = {
  "Answers that ended by themselves": now => now.get('vllm:request_success_total{finished_reason="stop"}'),
  "Answers that were cut off at max tokens": now => now.get('vllm:request_success_total{finished_reason="length"}'),
  "Requests refused, as the queue was full": gauge("vllm:admission_rejections_total"),
  "Tokens of prompts": gauge("vllm:prompt_tokens_total"),
  "Tokens found in the prefix cache": gauge("vllm:prefix_cache_hits_total"),
  "Tokens generated": gauge("vllm:generation_tokens_total"),
  "Preemptions": gauge("vllm:num_preemptions_total"),
  "Steps": gauge("compiled_llm:steps_total"),
};

class Reading {
  // By name, over all labels; and by name with the reason that a request ended for. What there is none of is NaN.
  constructor(text) {
    this.time = performance.now() / 1000;
    this.values = new Map();
    for (const [, name, labels, value] of text.matchAll(/^([\w:]+)(?:\{(.*)\})? (\S+)$/gm)) {
      const reason = labels?.match(/finished_reason="\w+"/);
      for (const key of reason ? [name, `${name}{${reason[0]}}`] : [name]) {
        this.values.set(key, (this.values.get(key) ?? 0) + Number(value));
      }
    }
  }

  get(name) {
    return this.values.get(name) ?? NaN;
  }
}

let tiles = [];
let readings = [];

export function startServer(model) {
  tiles = TILES.map(([title, , , lines, note]) => {
    const values = Object.keys(lines).map(name => el("output", {"aria-label": `${title}: ${name}`}, "–"));
    const chart = makeChart(values.length), top = el("span", {class: "top", "aria-hidden": "true"});
    const legend = Object.keys(lines).map((name, index) => el("span", {class: `line-${index}`}, name, " ", values[index]));
    const hint = note && el("p", {class: "hint"}, note);
    $("tiles").append(el("section", {class: "tile"}, el("h2", {}, title), el("p", {}, ...legend), top, chart, hint));
    return {values, chart, top, hint};
  });
  look(model);
}

async function look(model) {
  for (;;) {
    if (!$("server").hidden && !document.hidden) {
      try {
        readings.push(new Reading(await (await ask("metrics")).text()));
        show(model);
        $("fault").hidden = true;
      } catch (error) {
        $("fault").hidden = false;
        $("fault").textContent = error.message;
      }
    }
    await new Promise(resolve => setTimeout(resolve, 1000));
  }
}

function show(model) {
  const now = readings.at(-1);
  readings = readings.filter(({time}) => now.time - time <= SECONDS);
  const known = value => Number.isFinite(value) ? value : null;
  TILES.forEach(([, written, least, lines], index) => {
    const points = Object.values(lines).map(value => readings.slice(1).map((reading, before) =>
      [now.time - reading.time, known(value(reading, readings[before]))]));
    const {values, chart, top, hint} = tiles[index];
    if (hint) hint.hidden = !Number.isNaN(now.get("compiled_llm:limit_seconds_total"));
    top.textContent = `0 – ${written(draw(chart, points, SECONDS, least))}`;
    points.forEach((line, number) => {
      const value = line.at(-1)?.[1] ?? null;
      values[number].textContent = value === null ? "–" : written(value);
    });
  });
  $("facts").textContent = [model(), compileState(now)].filter(Boolean).join(" · ");
  $("totals").tBodies[0].replaceChildren(...Object.entries(TOTALS).map(([name, value]) =>
    el("tr", {}, el("th", {scope: "row"}, name), el("td", {}, whole(known(value(now)) ?? 0)))));
}

function compileState(now) {
  const graphs = now.get("compiled_llm:graphs"), pending = now.get("compiled_llm:graphs_pending");
  if (Number.isNaN(graphs)) return "";
  if (!graphs) return "uncompiled";
  return pending ? `compiling: ${graphs - pending} of ${graphs} graphs are ready` : `compiled: ${graphs} graphs`;
}

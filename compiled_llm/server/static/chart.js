// Lines over the last minutes, drawn as SVG.

import {svg} from "./dom.js";

const WIDTH = 300, HEIGHT = 60;

export function makeChart(numLines) {
  const lines = Array.from({length: numLines}, (_, index) => svg("path", {class: `line-${index}`}));
  return svg("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true"}, ...lines);
}

// lines: of each, [seconds ago, value or null]; null, and longer pauses, are gaps. Returns the value at the top.
export function draw(chart, lines, seconds, least) {
  const most = Math.max(least, ...lines.flatMap(line => line.map(([, value]) => value ?? 0)));
  lines.forEach((line, index) => {
    let path = "", last = Infinity;
    for (const [ago, value] of line) {
      if (value !== null) {
        const x = WIDTH * (1 - ago / seconds), y = HEIGHT - 2 - (HEIGHT - 4) * value / most;
        path += `${last - ago < 5 ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}h0`;  // h0: a dot, if no other point follows
      }
      last = value === null ? Infinity : ago;
    }
    chart.children[index].setAttribute("d", path);
  });
  return most;
}

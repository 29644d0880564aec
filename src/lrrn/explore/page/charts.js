// Charts as SVG: few lines, every mark with a meaning.

const SPACE = "http://www.w3.org/2000/svg";
const WIDTH = 420, HEIGHT = 210, LEFT = 40, RIGHT = 8, TOP = 18, BOTTOM = 34;

export function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

function ticks(low, high) {
  const rough = (high - low) / 5;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].reduce((best, by) => (Math.abs(by * unit - rough) < Math.abs(best * unit - rough) ? by : best));
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(+(k * step).toPrecision(6));
  return found;
}

// A frame with axes; `x` and `y` place values.
function frame(label, [x0, x1], [y0, y1], xName, percent) {
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  const x = (value) => LEFT + ((value - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + ((y1 - value) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  for (const tick of ticks(y0, y1)) {
    svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }));
    const text = percent ? `${Math.round(tick * 1000) / 10} %` : String(tick);
    svg.append(element("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, text));
  }
  for (const tick of ticks(x0, x1)) {
    svg.append(element("text", { x: x(tick), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, String(tick)));
  }
  svg.append(element("path", { class: "axis", d: `M${LEFT} ${HEIGHT - BOTTOM}H${WIDTH - RIGHT}` }));
  svg.append(element("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, xName));
  return { svg, x, y };
}

const path = (points) => points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// A line at a value, with a word; `move(value)` puts it elsewhere. Values beyond the axis stick to its end.
function marker({ svg, x }, [low, high]) {
  const line = element("line", { class: "here", y1: TOP - 4, y2: HEIGHT - BOTTOM });
  const text = element("text", { class: "here-text", y: TOP - 7 });
  svg.append(line, text);
  return (value, word) => {
    const shown = value !== null && value !== undefined;
    for (const part of [line, text]) part.setAttribute("visibility", shown ? "visible" : "hidden");
    if (!shown) return;
    const at = x(Math.min(high, Math.max(low, value)));
    line.setAttribute("x1", at);
    line.setAttribute("x2", at);
    text.setAttribute("x", at);
    text.setAttribute("text-anchor", at > WIDTH - 90 ? "end" : at < LEFT + 50 ? "start" : "middle");
    text.textContent = value > high ? `${word} →` : word;
  };
}

// Accuracy that is proven, over the norm of the perturbation.
export function curve(place, { norms, shares }) {
  const ends = [0, norms.at(-1)];
  const made = frame("Certified accuracy over the norm of the perturbation", ends, [0, 1], "norm of the perturbation", true);
  const points = norms.map((norm, k) => [made.x(norm), made.y(shares[k])]);
  const floor = HEIGHT - BOTTOM;
  made.svg.append(element("path", { class: "area", d: `${path(points)}L${points.at(-1)[0]} ${floor}L${points[0][0]} ${floor}Z` }));
  made.svg.append(element("path", { class: "line", d: path(points) }));
  place.replaceChildren(made.svg);
  return marker(made, ends);
}

// Energies of samples as an area, of out-of-distribution inputs as lines.
export function histogram(place, { edges, shares }, names) {
  const ends = [edges[0], edges.at(-1)];
  const top = Math.max(...Object.values(shares).flat()) * 1.05;
  const made = frame(`Energies of ${names.join(", ")}`, ends, [0, top], "energy", true);
  Object.values(shares).forEach((values, series) => {
    const points = values.flatMap((share, k) => [[made.x(edges[k]), made.y(share)], [made.x(edges[k + 1]), made.y(share)]]);
    if (series === 0) {
      const floor = HEIGHT - BOTTOM;
      made.svg.append(element("path", { class: "area", d: `M${points[0][0]} ${floor}${path(points).replace("M", "L")}L${points.at(-1)[0]} ${floor}Z` }));
    }
    made.svg.append(element("path", { class: series === 0 ? "line" : `line-${series}`, d: path(points) }));
  });
  const legend = document.createElement("div");
  legend.className = "legend";
  names.forEach((name, series) => {
    const entry = document.createElement("span");
    if (series) entry.className = `line-${series}`;
    entry.append(document.createElement("i"), name);
    legend.append(entry);
  });
  place.replaceChildren(made.svg, legend);
  return marker(made, ends);
}

// Horizontal bars, one a class; made once, then moved. They go from zero to their value on a rail that reaches at least to one
// or, if values are only there to be compared, from a little below the least of them.
export class Bars {
  constructor(place, names, compared = false) {
    this.compared = compared;
    this.rows = names.map((name) => {
      const row = document.createElement("div");
      row.className = "bar";
      const [label, rail, value] = ["name", "rail", "value"].map((part) => {
        const made = document.createElement("span");
        made.className = part;
        return made;
      });
      const fill = document.createElement("span");
      fill.className = "fill";
      rail.append(fill);
      label.textContent = label.title = name;
      row.append(label, rail, value);
      return { row, fill, value };
    });
    place.replaceChildren(...this.rows.map(({ row }) => row));
  }

  show(values, best) {
    const least = Math.min(...values), most = Math.max(...values);
    const low = this.compared ? least - 0.1 * (most - least) - 1e-12 : Math.min(0, least);
    const high = this.compared ? most : Math.max(1, most);
    const zero = this.compared ? low : 0;
    values.forEach((value, k) => {
      const { row, fill, value: text } = this.rows[k];
      const from = (Math.min(zero, value) - low) / (high - low), to = (Math.max(zero, value) - low) / (high - low);
      // a transform moves without a new layout, which would cost more than the answer
      fill.style.transform = `translateX(${(100 * from).toFixed(2)}%) scaleX(${Math.max(to - from, 0.004).toFixed(4)})`;
      text.textContent = value.toFixed(this.compared ? 4 : 3).replace("-", "−");
      row.classList.toggle("best", k === best);
    });
  }
}

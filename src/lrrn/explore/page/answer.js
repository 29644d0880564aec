// The answer to an image: label, margin, radius, energy, reconstructions and activations.

import { Bars } from "./charts.js";
import * as paint from "./paint.js";
import { figure, find, made, ordinal, percent } from "./text.js";

const ACROSS = 32; // units side by side
const MAPS = 8; // maps of channels side by side; twice as many if there are many
const NAMES = { rows: "its filter", kernels: "its kernel", fields: "its receptive field" };

export class AnswerView {
  constructor(model) {
    this.model = model;
    this.last = model.sizes.length - 1;
    this.answer = null;
    this.bars = model.classes.length ? new Bars(find("scores"), model.classes, model.objective === "class_energy") : null;
    find("margin-fact").hidden = !model.classes.length;
    find("main").classList.toggle("unlabelled", !model.classes.length);
    find("scores-text").textContent = model.obstacles.scores ?? (model.objective === "class_energy" ? "Minus the energy of each label:" : "");
    this.largest = [];
    const local = model.layers.some(({ maps }) => maps) && model.classes.length ? model.obstacles.local : null;
    find("local-obstacle").hidden = !local;
    find("local-obstacle").textContent = local ?? "";
    this.prepare();
  }

  prepare() {
    const figures = [made("figure", {}, (this.seen = made("canvas")), made("figcaption", { textContent: "input, as seen" }))];
    this.images = [];
    this.grids = [];
    for (let layer = 1; layer <= this.last; layer++) {
      const rebuilt = this.model.beta.slice(0, layer).every((beta) => beta > 0);
      if (rebuilt) {
        const view = { layer, canvas: made("canvas"), caption: made("figcaption") };
        this.images.push(view);
        figures.push(made("figure", {}, view.canvas, view.caption));
      }
      const grid = this.grid(layer);
      grid.canvas.setAttribute("role", "img");
      grid.name = layer === this.last && this.model.classes.length ? "Output" : `Layer ${layer}`;
      const head = made("p", {}, made("span", { textContent: `${grid.name}, ${grid.holds}` }), grid.note);
      grid.block = made("div", { className: "layer-units" }, head, grid.canvas);
      grid.canvas.addEventListener("pointermove", (event) => this.point(layer, grid, event));
      this.grids.push(grid);
    }
    find("reconstructions").replaceChildren(...figures);
    find("activations").replaceChildren(...this.grids.map(({ block }) => block));
  }

  // Units row by row; those of a convolution as a map for each channel.
  grid(layer) {
    const canvas = made("canvas"), note = made("span"), units = this.model.sizes[layer];
    const { maps, shown } = this.model.layers[layer - 1];
    const most = maps ? (shown <= 2 * MAPS ? MAPS : 2 * MAPS) : ACROSS;
    const columns = Math.min(most, maps ? shown : units);
    canvas.style.width = `${(100 * columns) / most}%`;
    const some = maps && shown < maps[0] ? `, the first ${shown} shown` : "";
    return { canvas, note, columns, maps, units, holds: maps ? `${maps[0]} channels of ${maps[1]} × ${maps[2]}${some}` : `${units} units` };
  }

  show(answer, pixels) {
    Object.assign(this, { answer, pixels });
    const { classes } = this.model;
    const { value, verdict, share, threshold } = answer.energy;
    const word = classes.length ? classes[answer.prediction] : verdict;
    find("prediction").textContent = word;
    find("prediction").classList.toggle("long", word.length > 2);
    if (this.bars) {
      this.bars.show(answer.scores, answer.prediction);
      find("margin").textContent = figure(answer.margin);
    }
    this.radius(answer.radius, classes.length ? "proven" : "of this decision, proven");
    find("energy").textContent = figure(value);
    find("energy-note").textContent = threshold === null ? "" : `out-of-distribution above ${figure(threshold)}`;
    const chip = find("distribution");
    chip.hidden = !verdict || !classes.length;
    chip.className = `chip ${verdict ?? ""}`;
    chip.textContent = verdict ?? "";
    chip.title = share === null ? "" : `${percent(share)} of the held-out samples have less energy`;
    this.solve(answer.solve);
    this.redraw();
  }

  radius(value, note) {
    find("radius").textContent = figure(value);
    find("radius-note").textContent = note;
  }

  solve({ sweeps, residual, allowed, error, converged, solver }) {
    const way = solver.replaceAll("_", " ");
    const end = converged ? `residual ${figure(residual)}, allowed ${figure(allowed)}` : `not converged: residual ${figure(residual)}`;
    const proof = error === null ? "no error bound" : `activations proven within ${figure(error)}`;
    find("solve").textContent = `${sweeps} sweeps of ${way} · ${end} · ${proof}`;
  }

  redraw() {
    if (!this.answer) return;
    const { shape } = this.model;
    paint.image(this.seen, this.pixels, shape);
    for (const { layer, canvas, caption } of this.images) {
      const image = this.answer.reconstructions[layer - 1];
      paint.image(canvas, image, shape);
      const off = Math.sqrt(image.reduce((sum, value, k) => sum + (value - this.pixels[k]) ** 2, 0) / image.length);
      caption.textContent = `from ${ordinal(layer, this.model.classes.length ? this.last : 0)}, off ${figure(off)}`;
    }
    this.answer.activations.forEach((values, k) => {
      const { canvas, note, columns, name, maps, units } = this.grids[k];
      const active = this.answer.active[k];
      // the scale only grows, so that a colour keeps its meaning from stroke to stroke
      this.largest[k] = Math.max(this.largest[k] ?? 0, paint.largest(values));
      if (maps) paint.maps(canvas, values, maps.slice(1), columns, this.largest[k]);
      else paint.units(canvas, values, columns, this.largest[k]);
      note.textContent = active < units ? `${active} active` : "";
      canvas.setAttribute("aria-label", `${name}: ${active} of ${units} units active`);
    });
  }

  point(layer, grid, event) {
    if (!this.answer) return;
    const values = this.answer.activations[layer - 1], { maps } = grid;
    const unit = maps ? inMaps(grid, event) : inRows(grid, values.length, event);
    if (unit === null || unit >= values.length) return;
    const { kind, images, shape } = this.model.filters[layer - 1];
    const [row, column] = maps ? [Math.floor(unit / maps[2]) % maps[1], unit % maps[2]] : [0, 0];
    const one = maps ? Math.floor(unit / (maps[1] * maps[2])) : unit;
    const filter = images[one];
    if (filter) paint.difference(find("unit-filter"), filter, shape, 100);
    const output = layer === this.last && this.model.classes.length ? `“${this.model.classes[unit]}”` : `unit ${unit + 1}`;
    const label = maps ? `channel ${one + 1}, row ${row + 1}, column ${column + 1}` : output;
    find("unit-text").textContent = `${grid.name}, ${label}: ${figure(values[unit])}${filter ? `; ${NAMES[kind]}` : ""}`;
  }
}

const at = (place, size, n) => Math.min(n - 1, Math.max(0, Math.floor((place / size) * n)));

function inRows({ canvas, columns }, n, event) {
  const box = canvas.getBoundingClientRect();
  return at(event.clientY - box.top, box.height, Math.ceil(n / columns)) * columns + at(event.clientX - box.left, box.width, columns);
}

// The unit of a map that is pointed at; null between maps.
function inMaps({ canvas, columns, maps: [, high, wide] }, event) {
  const box = canvas.getBoundingClientRect(), cell = paint.cellOf(wide);
  const x = at(event.clientX - box.left, box.width, canvas.width), y = at(event.clientY - box.top, box.height, canvas.height);
  const [across, down] = [wide * cell + paint.LINE, high * cell + paint.LINE];
  const [row, column] = [Math.floor((y % down) / cell), Math.floor((x % across) / cell)];
  if (row >= high || column >= wide) return null;
  const channel = Math.floor(y / down) * columns + Math.floor(x / across);
  return (channel * high + row) * wide + column;
}

// The answer to an image: label, margin, radius, energy, reconstructions and activations.

import { Bars } from "./charts.js";
import * as paint from "./paint.js";
import { figure, find, made, ordinal, percent } from "./text.js";

const ACROSS = 32; // units side by side

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
      const units = this.model.sizes[layer];
      const grid = { canvas: made("canvas"), note: made("span"), columns: Math.min(ACROSS, units) };
      grid.canvas.style.width = `${(100 * grid.columns) / ACROSS}%`;
      grid.canvas.setAttribute("role", "img");
      grid.name = layer === this.last && this.model.classes.length ? "Output" : `Layer ${layer}`;
      const head = made("p", {}, made("span", { textContent: `${grid.name}, ${units} units` }), grid.note);
      grid.block = made("div", { className: "layer-units" }, head, grid.canvas);
      grid.canvas.addEventListener("pointermove", (event) => this.point(layer, grid, event));
      this.grids.push(grid);
    }
    find("reconstructions").replaceChildren(...figures);
    find("activations").replaceChildren(...this.grids.map(({ block }) => block));
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
      const { canvas, note, columns, name } = this.grids[k];
      const active = values.filter((value) => value !== 0).length;
      // the scale only grows, so that a colour keeps its meaning from stroke to stroke
      this.largest[k] = Math.max(this.largest[k] ?? 0, ...values.map(Math.abs));
      paint.units(canvas, values, columns, this.largest[k]);
      note.textContent = active < values.length ? `${active} active` : "";
      canvas.setAttribute("aria-label", `${name}: ${active} of ${values.length} units active`);
    });
  }

  point(layer, { canvas, columns, name }, event) {
    if (!this.answer) return;
    const box = canvas.getBoundingClientRect();
    const values = this.answer.activations[layer - 1];
    const rows = Math.ceil(values.length / columns);
    const at = (place, size, n) => Math.min(n - 1, Math.max(0, Math.floor((place / size) * n)));
    const unit = at(event.clientY - box.top, box.height, rows) * columns + at(event.clientX - box.left, box.width, columns);
    if (unit >= values.length) return;
    const filter = this.model.filters[layer - 1].images[unit];
    if (filter) paint.difference(find("unit-filter"), filter, this.model.shape, 100);
    const label = layer === this.last && this.model.classes.length ? `“${this.model.classes[unit]}”` : `unit ${unit + 1}`;
    find("unit-text").textContent = `${name}, ${label}: ${figure(values[unit])}${filter ? "; its filter" : ""}`;
  }
}

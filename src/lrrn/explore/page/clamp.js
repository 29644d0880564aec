// Clamping: the output held at a label, the energy that costs, and what it does to the layers below.

import { Latest, rounded } from "./api.js";
import * as paint from "./paint.js";
import { figure, find, made, offer } from "./text.js";

const PAUSE = 120; // ms without a new answer; the layers below a clamped label wait until the pen rests

export class ClampView {
  constructor(model) {
    this.model = model;
    this.off = Boolean(model.obstacles.clamp);
    offer("clamp", model.obstacles.clamp);
    if (this.off) return;
    Object.assign(this, { label: null, pixels: null, clamped: undefined });
    this.latest = new Latest("api/clamp", (found, about) => this.found(found, about), (error) => (find("clamp-text").textContent = error.message));
    this.buttons = model.classes.map((name, label) => {
      const fill = made("span", { className: "fill" }), value = made("span", { className: "value" });
      const parts = [made("span", { className: "name", textContent: name }), made("span", { className: "rail" }, fill), value];
      const button = made("button", { type: "button", title: `Clamp ${name}` }, ...parts);
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => this.choose(this.label === label ? null : label));
      return { button, fill, value };
    });
    find("labels").replaceChildren(...this.buttons.map(({ button }) => button));
    this.layers = model.sizes.slice(1, -1).map((_, k) => k + 1).filter((layer) => model.beta.slice(0, layer).every((beta) => beta > 0));
    this.rows = this.layers.map((layer) => {
      const parts = ["settled freely", "clamped", "difference"].map((name) => ({ canvas: made("canvas"), caption: made("figcaption", { textContent: name }) }));
      const figures = parts.map(({ canvas, caption }) => made("figure", {}, canvas, caption));
      return { layer, parts, row: made("div", { className: "figures" }, made("span", { className: "row-name", textContent: `from layer ${layer}` }), ...figures) };
    });
    find("clamp-figures").replaceChildren(...this.rows.map(({ row }) => row));
    this.redraw();
  }

  // The gaps of all labels come with every answer.
  show(answer, pixels) {
    if (this.off) return;
    this.pixels = pixels;
    this.gaps = answer.gaps;
    const most = Math.max(...answer.gaps);
    answer.gaps.forEach((gap, label) => {
      const { fill, value, button } = this.buttons[label];
      fill.style.transform = `scaleX(${Math.max(0, gap / most).toFixed(4)})`;
      value.textContent = figure(gap);
      button.setAttribute("aria-label", `Clamp ${this.model.classes[label]}, energy gap ${figure(gap)}`);
    });
    // the first time, the second best: something to look at
    if (this.clamped === undefined) this.choose(answer.scores.indexOf([...answer.scores].sort((a, b) => b - a)[1]));
    else {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.ask(), PAUSE);
    }
  }

  choose(label) {
    this.label = label;
    this.clamped ??= null;
    this.buttons.forEach(({ button }, k) => button.setAttribute("aria-pressed", String(k === label)));
    if (label === null) this.clamped = null;
    this.ask();
    this.redraw();
  }

  ask() {
    if (this.label !== null && this.pixels) this.latest.ask({ pixels: rounded(this.pixels), label: this.label }, this.label);
  }

  found(clamped, about) {
    if (about !== this.label) return;
    this.clamped = clamped;
    this.redraw();
  }

  redraw() {
    if (this.off) return;
    const { clamped, model } = this;
    const blank = new Float64Array(model.shape[0] * model.shape[1] * model.channels);
    for (const { layer, parts } of this.rows) {
      const free = clamped?.free[layer - 1] ?? blank, held = clamped?.reconstructions[layer - 1] ?? blank;
      const change = held.map((value, k) => value - free[k]);
      const scale = paint.largest(change);
      paint.image(parts[0].canvas, free, model.shape);
      paint.image(parts[1].canvas, held, model.shape);
      paint.difference(parts[2].canvas, change, model.shape, scale);
      parts[2].caption.textContent = clamped ? `difference, up to ${figure(scale)}` : "difference";
    }
    const text = find("clamp-text");
    if (!clamped) {
      text.textContent = this.label === null ? "Choose a label." : "Draw something, or pick a sample.";
      return;
    }
    const least = this.gaps.indexOf(Math.min(...this.gaps));
    const name = model.classes[clamped.label];
    const rest = clamped.label === least ? "the least of all labels" : `${model.classes[least]} would cost ${figure(this.gaps[least])}`;
    text.replaceChildren(`Holding the output at `, made("b", { textContent: name }), ` costs an energy of `, made("b", { textContent: figure(clamped.gap) }), `; ${rest}.`);
  }
}

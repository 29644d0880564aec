// What is known of the model before anything is drawn: a line about it, samples, filters, the curve and the histograms.

import { post } from "./api.js";
import * as charts from "./charts.js";
import * as paint from "./paint.js";
import { figure, find, made, offer, percent } from "./text.js";

const OBJECTIVES = {
  contrastive: "contrastive learning", semi_supervised: "contrastive learning with free energy", margin: "a margin loss",
  class_energy: "class energies", cross_entropy: "cross-entropy", squared_error: "squared error",
};

const ACROSS = 7; // samples side by side
const LEAST = 8; // filters of convolutions side by side, and as much room if there are fewer

const FILTERS = {
  rows: (layer) => (layer === 0 ? "Rows of the first weights" : `Rows of the product of the first ${layer + 1} weights`),
  kernels: () => "Kernels of the first layer",
  fields: (layer) => `Receptive fields of layer ${layer + 1}, of the unit in the middle of each channel`,
};

export class ModelView {
  // `pick` is called with a sample and the time of the event, `tell` with a message.
  constructor(model, pick, tell) {
    Object.assign(this, { pick, tell });
    this.layer = 0;
    this.chosen = null;
    this.update(model);
    this.samples();
    this.filterTabs();
  }

  // The overview comes again when the server has proven more.
  update(model) {
    this.model = model;
    const compared = typeof model.reference === "object";
    const facts = [`${model.name}`, model.architecture, `trained by ${OBJECTIVES[model.objective] ?? model.objective}`];
    if (compared && model.reference.score !== null) facts.push(`${percent(model.reference.score)} right on held-out samples`);
    if (model.lipschitz) facts.push(`Lipschitz constant ≤ ${figure(model.lipschitz)}`);
    find("model-line").textContent = facts.join(" · ");
    offer("energies", compared ? null : model.reference);
    const curve = compared ? model.reference.curve : null;
    offer("curve", compared ? (curve ? null : "The samples have no labels to be right about.") : model.reference);
    this.markEnergy = this.markRadius = () => {};
    if (compared) this.energies(model.reference);
    if (curve) {
      const { n, source } = model.reference;
      find("curve-text").textContent = `Share of ${n} samples (${source}) that are right under every perturbation of a norm${model.gallery?.published ? ", by published radii" : ""}. Median radius ${figure(curve.median)}.`;
      this.markRadius = charts.curve(find("curve"), curve);
    }
    this.filters();
  }

  energies({ energies, auroc, source }) {
    const kinds = Object.keys(energies.shares);
    const names = kinds.map((kind) => (kind === "samples" ? source : kind === "Gaussian" ? "Gaussian of their covariance" : kind));
    const told = kinds.slice(1).map((kind, k) => `${names[k + 1]} ${auroc[kind].toFixed(2)}`).join(", ");
    const weak = Math.max(...Object.values(auroc)) < 0.6;
    find("energies-text").textContent =
      `Low energy means in-distribution. AUROC against samples: ${told}.` +
      (weak ? " This model was not trained for out-of-distribution detection; its energy hardly separates them." : "");
    this.markEnergy = charts.histogram(find("energies"), energies, names);
  }

  mark(answer) {
    this.markEnergy(answer.energy.value, "this input");
    if (this.model.classes.length) this.markRadius(answer.radius, "this input");
  }

  radius(value) {
    this.markRadius(value, "this input");
  }

  // --- samples ---

  // One canvas for all: a canvas each would slow every frame of the page down.
  samples() {
    const { samples, classes } = this.model;
    find("samples-part").hidden = !samples.length;
    const present = [...new Set(samples.map(({ label }) => label))].filter((label) => label !== null).sort((a, b) => a - b);
    const select = find("samples-class");
    select.replaceChildren(new Option("all", ""), ...present.map((label) => new Option(classes[label], label)));
    select.hidden = present.length < 2;
    select.addEventListener("change", () => this.thumbs());
    this.buttons = samples.map((sample, k) => {
      const { label } = sample;
      const name = label === null ? `Sample ${k + 1}` : `Sample ${k + 1}, a ${classes[label]}`;
      const button = made("button", { type: "button", title: name });
      button.setAttribute("aria-label", name);
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", (event) => {
        this.pick(sample, event.timeStamp);
        this.choose(button);
      });
      return button;
    });
    this.thumbs();
    this.gallery();
  }

  // Any image of the data, by its number.
  gallery() {
    const { gallery } = this.model;
    find("gallery-part").hidden = !gallery;
    if (!gallery) return;
    const number = find("gallery-number");
    find("gallery-name").textContent = `image of ${gallery.name}`;
    Object.assign(number, { max: gallery.images - 1, title: `From 0 to ${gallery.images - 1}` });
    number.addEventListener("change", async (event) => {
      if (number.value === "") return;
      try {
        this.pick(await post("api/image", { index: Number(number.value) }), event.timeStamp);
      } catch (error) {
        this.tell(error.message);
      }
    });
  }

  thumbs() {
    const { samples, shape } = this.model;
    const wanted = find("samples-class").value;
    const shown = samples.map((_, k) => k).filter((k) => wanted === "" || String(samples[k].label) === wanted);
    paint.thumbnails(find("samples-sheet"), shown.map((k) => samples[k].pixels), shape, ACROSS);
    find("samples-grid").style.gridTemplateColumns = `repeat(${ACROSS}, 1fr)`;
    find("samples-grid").replaceChildren(...shown.map((k) => this.buttons[k]));
  }

  choose(button) {
    if (this.chosen === button) return;
    this.chosen?.setAttribute("aria-pressed", "false");
    this.chosen = button;
    button?.setAttribute("aria-pressed", "true");
  }

  // --- filters ---

  filterTabs() {
    const last = this.model.sizes.length - 1;
    const tabs = this.model.filters.map((_, k) => {
      const input = made("input", { type: "radio", name: "filter-layer", value: k, checked: k === 0 });
      input.addEventListener("change", () => {
        this.layer = k;
        this.filters();
      });
      const name = k + 1 === last && this.model.classes.length ? "Output" : `Layer ${k + 1}`;
      return made("label", {}, input, made("span", { textContent: name }));
    });
    find("filter-layers").append(...tabs);
  }

  filters() {
    const { filters, channels } = this.model;
    const { kind, units, images, shape } = filters[this.layer];
    const some = images.length < units ? `, the first ${images.length} of ${units}` : "";
    const key = channels === 3 ? "grey is zero; more of a colour than grey raises a unit, less of it lowers it" : "what raises a unit in red, what lowers it in blue";
    find("filters-text").textContent = `${FILTERS[kind](this.layer)}${some}: ${key}.`;
    find("filters").setAttribute("aria-label", `${images.length} filters of layer ${this.layer + 1}`);
    const across = Math.min(images.length, images.length <= 20 ? 10 : 16);
    paint.sheet(find("filters"), images, shape, kind === "rows" ? across : Math.max(LEAST, across));
  }

  redraw() {
    this.thumbs();
    this.filters();
  }
}

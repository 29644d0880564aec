// The slider: attacks at growing norms, held against what is proven.

import { Latest, rounded } from "./api.js";
import { Bars } from "./charts.js";
import * as paint from "./paint.js";
import { busy, figure, find, made, offer } from "./text.js";

const BEGIN = 0.45; // of the slider: well inside what is usually proven

export class AttackView {
  constructor(model) {
    this.model = model;
    this.off = Boolean(model.obstacles.attack);
    offer("attack", model.obstacles.attack);
    if (this.off) return;
    this.bars = new Bars(find("attack-scores"), model.classes);
    if (model.channels === 3) find("keep-range").textContent = "the range of colours";
    this.slider = find("norm");
    this.latest = new Latest("api/attack", (found, about) => this.found(found, about), (error, about) => this.failed(error, about));
    this.share = BEGIN;
    this.slider.addEventListener("input", () => {
      this.share = this.slider.value / this.slider.max;
      this.redraw();
    });
    find("keep").addEventListener("change", () => this.pixels && this.ask(this.pixels));
    if (model.slow) find("attack-kind").textContent = "the nearest attack that was found, at growing strength";
    this.sample = null;
    this.reset(null);
  }

  // A new image: what was found for the old one is no longer true.
  reset(pixels) {
    const waiting = pixels ? "pen" : "nothing";
    if (this.off || this.waiting === waiting) return;
    this.waiting = waiting;
    Object.assign(this, { pixels: null, attack: null, radius: null });
    this.latest.drop();
    this.searched();
    find("search-part").hidden = true;
    this.slider.disabled = true;
    busy("attack-card", Boolean(pixels));
    this.zones();
    find("attack-text").textContent = pixels ? "Looking for attacks …" : "Draw something, or pick a sample.";
  }

  // What is known about the image from elsewhere: a sample, with its label and what was published about it.
  about(sample) {
    if (this.off) return;
    this.sample = sample;
    this.facts();
  }

  // In a large network nothing is looked for until it is asked for.
  wait(radius) {
    if (this.off) return;
    this.waiting = "request";
    this.proven(radius, " by method spectral");
    busy("attack-card", false);
    find("search-part").hidden = false;
    find("search-text").textContent = "Seconds for the proof, and about a minute for the attack.";
    find("attack-text").textContent = "No attack has been looked for yet.";
  }

  // A search is under way: for how long, as the page cannot tell how long it will be.
  search(what) {
    clearInterval(this.ticking);
    const start = performance.now();
    const tick = () => (find("search-text").textContent = `${what} … ${Math.round((performance.now() - start) / 1000)} s`);
    this.ticking = setInterval(tick, 1000);
    Object.assign(find("search"), { disabled: true });
    find("searching").hidden = false;
    busy("attack-card", true);
    tick();
  }

  searched(message = "") {
    if (this.ticking === undefined) return;
    clearInterval(this.ticking);
    find("searching").hidden = true;
    find("search").disabled = false;
    find("search-text").textContent = message;
    busy("attack-card", false);
  }

  facts() {
    const { sample, attack, radius, model } = this;
    const list = [];
    const add = (name, value, note = "") => list.push(made("div", {}, made("dt", { textContent: name }), made("dd", {}, value, made("span", { className: "note", textContent: note }))));
    if (sample) {
      const { label, number, published } = sample;
      if (number !== undefined) add("image", `${number}`, ` of ${model.gallery.name}`);
      if (label !== null) add("true label", model.classes[label]);
      if (published) add("published radius", figure(published.radius), published.prediction === label ? "" : ` of the label ${model.classes[published.prediction]}`);
      if (published?.attack) add("published attack", figure(published.attack));
    }
    if (radius !== null && (attack || model.slow)) add("certified radius", figure(radius), this.note);
    if (attack) {
      const times = radius > 0 ? ` ${(attack.distance / radius).toFixed(2)} times the certified radius` : "";
      add("nearest attack found", attack.distance === null ? "none" : figure(attack.distance), attack.distance === null ? "" : times);
    }
    find("image-facts").hidden = list.length === 0;
    find("image-facts").replaceChildren(...list);
  }

  // While attacks are looked for: the input as it is, with the scores of its answer.
  untouched({ scores, prediction }, pixels) {
    if (this.off || this.attack) return;
    const { classes, shape } = this.model;
    for (const id of ["attack-before", "attack-after"]) paint.image(find(id), pixels, shape);
    paint.difference(find("attack-delta"), new Float64Array(pixels.length), shape, 1);
    this.bars.show(scores, prediction);
    find("attack-scores").classList.remove("broken");
    find("attack-norm").textContent = "norm 0";
    find("attack-label").textContent = `seen as ${classes[prediction]}`;
  }

  ask(pixels) {
    if (this.off) return;
    Object.assign(this, { pixels, waiting: "attack" });
    busy("attack-card", true);
    find("attack-text").textContent = "Looking for attacks …";
    this.latest.ask({ pixels: rounded(pixels), keep: find("keep").checked }, pixels);
  }

  failed(error, about) {
    if (about !== this.pixels) return;
    this.searched();
    busy("attack-card", false);
    find("attack-text").textContent = error.message;
  }

  found(attack, about) {
    if (about !== this.pixels) return;
    this.attack = attack;
    this.searched();
    busy("attack-card", this.latest.waiting !== null);
    Object.assign(this.slider, { disabled: false, max: attack.norms.length - 1 });
    this.slider.value = Math.round(this.share * this.slider.max);
    // one scale for all norms, so that a perturbation is seen to grow
    const last = attack.images.at(-1);
    this.scale = paint.largest(last.map((value, k) => value - about[k])) || 1;
    this.zones();
    this.redraw();
  }

  proven(radius, note = "") {
    if (this.off) return;
    Object.assign(this, { radius, note });
    this.zones();
    this.redraw();
  }

  zones() {
    this.facts();
    const { attack, radius } = this;
    const reach = attack ? attack.norms.at(-1) : null;
    const at = (value) => `${100 * Math.min(1, Math.max(0, value / reach))}%`;
    const known = attack && radius !== null;
    const place = (id, from, to) => {
      find(id).hidden = !known || !(to > from);
      if (!find(id).hidden) Object.assign(find(id).style, { left: at(from), width: `calc(${at(to)} - ${at(from)})` });
    };
    const distance = attack?.distance ?? Infinity;
    place("zone-proven", 0, radius);
    place("zone-open", radius, Math.min(distance, reach));
    place("zone-broken", distance, reach);
    this.mark("mark-radius", known, at(radius), `proven to ${figure(radius)}`, radius / reach < 0.3);
    this.mark("mark-attack", known && attack.distance !== null, at(distance), `attack at ${figure(distance)}`, distance / reach > 0.75);
  }

  mark(id, shown, at, text, turned) {
    const mark = find(id);
    mark.hidden = !shown;
    if (!shown) return;
    mark.style.left = at;
    mark.textContent = text;
    mark.classList.toggle("turned", turned);
  }

  redraw() {
    if (this.off || !this.attack) return;
    const { attack, model, pixels } = this;
    const step = Number(this.slider.value);
    const norm = attack.norms[step], image = attack.images[step], now = attack.predictions[step];
    paint.image(find("attack-before"), pixels, model.shape);
    paint.difference(find("attack-delta"), image.map((value, k) => value - pixels[k]), model.shape, this.scale);
    paint.image(find("attack-after"), image, model.shape);
    this.bars.show(attack.scores[step], now);
    find("attack-scores").classList.toggle("broken", now !== attack.label);
    find("attack-norm").textContent = `norm ${figure(norm)}`;
    find("attack-label").textContent = `seen as ${model.classes[now]}`;
    const [kind, text] = this.says(norm, now);
    const says = find("attack-text");
    says.replaceChildren(Object.assign(document.createElement("b"), { className: kind, textContent: text[0] }), ` ${text[1]}`);
    this.slider.setAttribute("aria-valuetext", `norm ${figure(norm)}: ${text[0]} ${text[1]}`);
  }

  says(norm, now) {
    const { attack, radius, model } = this;
    const label = model.classes[attack.label];
    if (now !== attack.label) return ["bad", [`Broken.`, `This perturbation turns ${label} into ${model.classes[now]}.`]];
    if (radius === null) return ["", ["Proving …", "How far the label is guaranteed is being worked out."]];
    if (norm === 0) return ["good", ["Untouched.", `The network says ${label}.`]];
    if (norm < radius) return ["good", ["Guaranteed.", `No perturbation of this norm, this one or any other, makes it anything but ${label}.`]];
    return ["", ["Not settled.", `Beyond the proof, and no attack was found: still ${label}.`]];
  }
}

"use strict";

const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
let generating = null; // what aborts the answer that is being written

function element(kind, text, attributes = {}) {
  const made = kind === "td" || kind === "th" || kind === "tr" || kind === "meter"
    ? document.createElement(kind) : document.createElementNS(SVG, kind);
  if (text) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = count < 1000 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(count) / 3));
  return `${(count / 1000 ** power).toPrecision(3)} ${units[power]}`;
}

// -- the answer ------------------------------------------------------------------------------------------------------

async function generate() {
  const chat = at("chat").checked && !at("chat").disabled;
  const asked = {
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number(at("tokens").value),
    temperature: Number(at("temperature").value),
  };
  if (chat) asked.messages = [{ role: "user", content: at("prompt").value }];
  else asked.prompt = at("prompt").value;
  generating = new AbortController();
  at("answer").textContent = "";
  busy(true, "Waiting for the first token …");
  const begun = performance.now();
  let tokens = 0;
  try {
    const answer = await fetch(chat ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(asked),
      signal: generating.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      for (const choice of event.choices) {
        const delta = choice.delta || {};
        at("answer").append((delta.reasoning_content || "") + (delta.content || "") + (choice.text || ""));
      }
      at("answer").scrollTop = at("answer").scrollHeight;
    }
    const seconds = (performance.now() - begun) / 1000;
    busy(false, `${tokens} tokens in ${seconds.toFixed(1)} s, ${(tokens / seconds).toFixed(1)} a second.`);
  } catch (error) {
    if (error.name === "AbortError") busy(false, "Stopped.");
    else busy(false, error.message, true);
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split("\n");
    text = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function busy(is, outcome, wrong = false) {
  if (!is) generating = null;
  at("go").disabled = is;
  at("stop").disabled = !is;
  at("answer").setAttribute("aria-busy", String(is));
  at("outcome").textContent = outcome;
  at("outcome").classList.toggle("wrong", wrong);
}

// -- the state -------------------------------------------------------------------------------------------------------

const rates = [];

async function look() {
  try {
    const answer = await fetch("status");
    const state = await answer.json();
    if (!answer.ok) throw new Error(state.error.message);
    at("model").textContent = state.model;
    document.title = state.model;
    say("state", state.generates ? "Serving" : "Serving embeddings");
    for (const id of ["go", "prompt"]) if (!state.generates) at(id).disabled = true;
    at("chat").disabled = !state.chats;
    if (!state.chats) at("chat").checked = false;
    at("rate").textContent = state.tokens_per_second.toFixed(1);
    at("running").textContent = `${state.running} of ${state.rows}`;
    at("waiting").textContent = state.waiting;
    draw(state.tokens_per_second);
    ranks(state.memory_bytes);
  } catch (error) {
    say("state", `The server does not answer: ${error.message}`);
  }
  setTimeout(look, document.hidden ? 10000 : 1000);
}

function say(id, text) { // a reader is told of what changes alone
  if (at(id).textContent !== text) at(id).textContent = text;
}

function draw(rate) {
  rates.push(rate);
  if (rates.length > 120) rates.shift();
  const most = Math.max(1, ...rates);
  const points = rates.map((value, index) => `${(index * 240) / 119},${46 - (value * 44) / most}`);
  at("history").firstElementChild.setAttribute("points", points.join(" "));
}

function ranks(memory) {
  const most = Math.max(1, ...Object.values(memory));
  at("ranks").replaceChildren(...Object.entries(memory).map(([device, held], rank) => {
    const row = element("tr");
    const meter = element("meter", "", { min: 0, max: most, value: held, "aria-label": `memory of rank ${rank}` });
    const cell = element("td");
    cell.append(meter);
    row.append(element("th", `${rank} (${device})`, { scope: "row" }), element("td", bytes(held)), cell);
    return row;
  }));
}

// -- the plan --------------------------------------------------------------------------------------------------------

async function plan() {
  const found = await (await fetch("plan")).json();
  if (found.error) throw new Error(found.error.message);
  const ranks = found.bytes_per_rank.map((size, rank) => `rank ${rank} ${bytes(size)}`).join(", ");
  at("plan-text").textContent = `${found.model}, ${bytes(found.bytes_whole)}, by ${found.policy}: ${ranks}.`;
  picture(found);
  const head = element("tr");
  head.append(...["Part", "Whole", ...found.bytes_per_rank.map((_, rank) => `Rank ${rank}`)]
    .map((text) => element("th", text, { scope: "col" })));
  at("plan-head").replaceChildren(head);
  at("plan-rows").replaceChildren(...found.parts.map((part) => {
    const row = element("tr");
    row.append(element("th", part.name, { scope: "row" }), element("td", bytes(part.bytes)),
      ...part.ranks.map((held) => element("td", part.cut ? bytes(held) : "whole")));
    return row;
  }));
}

function picture(found) { // a line for each part of the model, in it a bar for each rank, as long as its share is large
  const label = 260, width = 800, line = 22, gap = 6;
  const count = found.bytes_per_rank.length, column = width / count;
  const most = Math.max(...found.parts.flatMap((part) => part.ranks));
  const height = (found.parts.length + 1) * line + gap;
  const drawn = element("svg", "", {
    viewBox: `0 0 ${label + width} ${height}`, width: label + width, height, role: "img",
    "aria-label": `${found.parts.length} parts of the model over ${count} ranks; the table below has the figures`,
  });
  for (let rank = 0; rank < count; rank++) {
    drawn.append(element("text", `rank ${rank}`, { x: label + rank * column, y: 15 }));
  }
  found.parts.forEach((part, index) => {
    const y = (index + 1) * line;
    drawn.append(element("text", part.name.length > 38 ? `…${part.name.slice(-37)}` : part.name, { x: 0, y: y + 14 }));
    part.ranks.forEach((held, rank) => {
      const bar = element("rect", "", {
        x: label + rank * column, y: y + 3, height: line - gap,
        width: Math.max(held ? 2 : 0, ((column - gap) * held) / most), class: part.cut ? "cut" : "copy",
      });
      bar.append(element("title", `${part.name}, rank ${rank}: ${bytes(held)}`));
      drawn.append(bar);
    });
  });
  at("picture").replaceChildren(drawn);
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!generating) generate();
});
at("stop").addEventListener("click", () => generating && generating.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.ctrlKey) at("form").requestSubmit();
  if (event.key === "Escape" && generating) generating.abort();
});
look();
plan().catch((error) => { at("plan-text").textContent = `The plan is not to be had: ${error.message}`; });

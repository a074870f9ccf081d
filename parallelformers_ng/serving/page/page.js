"use strict";

const at = (id) => document.getElementById(id);
const KEPT = "parallelformers-ng"; // key in the session storage of this tab, which survives a reload
const SETTINGS = ["system", "temperature", "top_p", "seed", "max_tokens", "stops"];
const PAINT_SECONDS = 0.1;
let turns = []; // messages of the conversation: {role, content, reasoning}
let server = { chats: true, generates: true, model: "", models: [] }; // newest answer of /status
let chosen = null; // model of the conversation, if the server has several models
let generating = null; // running answer: its abort controller and its message

function make(kind, attributes = {}, ...children) {
  const svg = ["svg", "rect", "text", "title"].includes(kind);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", kind) : document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = count < 1000 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(count) / 3));
  return `${(count / 1000 ** power).toPrecision(3)} ${units[power]}`;
}

// -- Markdown: the code creates each element, and text of a model only becomes the text of an element ----------------

const MAX_DEPTH = 8; // maximum depth of nested lists and quotes
const MAX_INLINE = 20000; // maximum characters of a paragraph that is searched for inline marks
const FENCE = /^ {0,3}(```+|~~~+)/, HEADING = /^ {0,3}(#{1,6}) +(.*)$/, RULE = /^ {0,3}([-*_]) *(\1 *){2,}$/;
const QUOTE = /^ {0,3}> ?/, ITEM = /^( *)([-*+]|\d{1,9}[.)]) +/, TABLE = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;

function markdown(parent, text, depth = 0) {
  const lines = text.split("\n");
  const take = (more) => {
    const begin = index;
    while (index < lines.length && more(lines[index])) index++;
    return lines.slice(begin, index);
  };
  const nested = depth < MAX_DEPTH;
  let index = 0;
  while (index < lines.length) {
    const line = lines[index];
    if (!line.trim()) index++;
    else if (FENCE.test(line)) {
      const mark = line.match(FENCE)[1];
      index++;
      const code = take((next) => !(next.trim().startsWith(mark) && !next.replaceAll(mark[0], "").trim()));
      index++;
      parent.append(make("pre", { tabindex: 0, dir: "ltr" }, make("code", {}, code.join("\n"))));
    } else if (HEADING.test(line)) {
      const [, marks, title] = line.match(HEADING);
      parent.append(inline(make(`h${Math.min(6, 3 + marks.length)}`, { dir: "auto" }), title));
      index++;
    } else if (RULE.test(line)) {
      parent.append(make("hr"));
      index++;
    } else if (nested && QUOTE.test(line)) {
      const quote = take((next) => QUOTE.test(next)).map((next) => next.replace(QUOTE, ""));
      parent.append(markdown(make("blockquote"), quote.join("\n"), depth + 1));
    } else if (nested && ITEM.test(line)) {
      const list = make(/^ *\d/.test(line) ? "ol" : "ul", { dir: "auto" });
      const kind = list.localName, first = line.match(ITEM);
      if (kind === "ol") list.start = parseInt(first[2], 10);
      while (index < lines.length) {
        const next = lines[index].match(ITEM);
        if (!next || next[1].length > first[1].length + 1 || /\d/.test(next[2]) !== (kind === "ol")) break;
        const indent = next[1].length + 1;
        const item = [lines[index++].replace(ITEM, "")];
        item.push(...take((next) => !next.trim() || next.search(/\S/) > indent).map((next) => next.slice(indent + 1)));
        list.append(markdown(make("li"), item.join("\n").trimEnd(), depth + 1));
      }
      parent.append(list);
    } else if (line.includes("|") && index + 1 < lines.length && TABLE.test(lines[index + 1])) {
      const [head, , ...rows] = take((next) => next.includes("|"));
      const row = (text, kind) => make("tr", {}, ...text.trim().replace(/^\||\|$/g, "").split("|")
        .map((cell) => inline(make(kind, { dir: "auto" }), cell.trim())));
      parent.append(make("table", { tabindex: 0 }, make("thead", {}, row(head, "th")),
        make("tbody", {}, ...rows.map((text) => row(text, "td")))));
    } else {
      index++;
      const rest = take((next) => next.trim() && ![FENCE, HEADING, RULE].some((each) => each.test(next))
        && !(nested && [QUOTE, ITEM].some((each) => each.test(next))));
      parent.append(inline(make("p", { dir: "auto" }), [line, ...rest].join("\n")));
    }
  }
  return parent;
}

const MARK = /`+|!?\[|\*\*|__|\*|_|~~|https?:\/\/[^\s<>()"']*[^\s<>()"'.,;:!?*_`]|\\[!-\/:-@[-`{-~]/g;
const PAIRS = { "**": "strong", "__": "strong", "*": "em", "_": "em", "~~": "del" };

function inline(parent, text, depth = 0, links = true) {
  let told = 0;
  if (depth > MAX_DEPTH || text.length > MAX_INLINE) {
    parent.append(text);
    return parent;
  }
  for (const { 0: mark, index } of text.matchAll(MARK)) {
    if (index < told) continue;
    const inside = index + mark.length;
    let made = null, end = inside;
    if (mark[0] === "`") {
      const close = text.indexOf(mark, inside);
      if (close > 0) made = make("code", { dir: "ltr" }, text.slice(inside, close).replace(/^ (.*) $/, "$1"));
      end = close + mark.length;
    } else if (mark[0] === "\\") made = mark[1];
    else if (mark.endsWith("[")) {
      const close = text.indexOf("](", inside), after = close < 0 ? -1 : text.indexOf(")", close);
      if (after > 0) {
        const label = inline(make("span"), text.slice(inside, close), depth + 1, false);
        made = links && link(text.slice(close + 2, after).trim().split(/\s/)[0], label, mark[0] === "!");
      }
      end = after + 1;
    } else if (mark.startsWith("http")) made = links && link(mark, make("span", {}, mark));
    else {
      const word = (place) => /[\p{L}\p{N}]/u.test(text[place] || "");
      let close = text.indexOf(mark, inside + 1);
      const within = mark[0] === "_" && (word(index - 1) || word(close + mark.length)); // some_long_name
      if (close > 0 && !within && !/\s/.test(text[inside]) && !/\s/.test(text[close - 1])) {
        made = inline(make(PAIRS[mark]), text.slice(inside, close), depth + 1, links);
      }
      end = close + mark.length;
    }
    if (!made) continue;
    parent.append(text.slice(told, index), made);
    told = end;
  }
  parent.append(text.slice(told));
  return parent;
}

function link(address, label, picture = false) { // a link shows its host; pictures become links
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !["http:", "https:"].includes(url.protocol)) return null;
  const made = make("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank" }, label);
  if (label.textContent === address && !picture) return made;
  return make("span", {}, picture ? "picture: " : "", made, make("span", { class: "address" }, ` (${url.host})`));
}

// -- the conversation ------------------------------------------------------------------------------------------------

function drawTurn(turn) {
  const drawn = make("article", { class: `turn ${turn.role}` });
  paint(drawn, turn);
  at("log").append(drawn);
  return drawn;
}

function paint(drawn, turn) {
  const log = at("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  const open = drawn.querySelector("details")?.open;
  const body = make("div", { class: "body", dir: "auto" });
  drawn.replaceChildren(make("h3", {}, turn.role === "user" ? "You" : "Model"));
  if (turn.reasoning) {
    const details = make("details", {}, make("summary", {}, "Thinking"), markdown(make("div"), turn.reasoning));
    details.open = open ?? !turn.content;
    drawn.append(details);
  }
  if (turn.role === "user") body.append(turn.content);
  else if (server.chats) markdown(body, turn.content);
  else body.append(make("p", {}, turn.content));
  drawn.append(body);
  if (turn.role !== "user" && turn !== generating?.turn) drawn.append(copier("Copy", () => turn.content));
  if (follows) log.scrollTop = log.scrollHeight;
}

function copier(label, text) {
  const button = make("button", { type: "button" }, label);
  button.addEventListener("click", () => copy(button, text()));
  return button;
}

async function copy(button, text) {
  const label = button.textContent;
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else { // browsers have no clipboard API for pages over plain HTTP from another machine
      const field = make("textarea", { "aria-hidden": "true" });
      field.value = text;
      document.body.append(field);
      field.select();
      const done = document.execCommand("copy");
      field.remove();
      button.focus();
      if (!done) throw new Error();
    }
    say(button, "Copied");
  } catch {
    say(button, "The browser does not allow copying");
  }
  setTimeout(() => say(button, label), 2000);
}

function keep() {
  const choice = at("choice").value;
  const settings = Object.fromEntries(SETTINGS.map((id) => [id, at(id).value]));
  try {
    sessionStorage.setItem(KEPT, JSON.stringify({ turns, settings, prompt: at("prompt").value, choice }));
  } catch {
    outcome("The browser cannot store this conversation. A reload of the page deletes it.", true);
  }
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEPT)) || { turns: [], settings: {}, prompt: "" };
    for (const id of SETTINGS) at(id).value = kept.settings[id] || "";
    at("prompt").value = kept.prompt;
    turns = kept.turns;
    chosen = kept.choice;
    turns.forEach(drawTurn);
    at("log").scrollTop = at("log").scrollHeight;
  } catch {
    sessionStorage.removeItem(KEPT); // data of another version of this page
    turns = [];
  }
}

// -- an answer -------------------------------------------------------------------------------------------------------

function request() {
  const body = { model: at("choice").value, stream: true, stream_options: { include_usage: true } };
  for (const id of ["temperature", "top_p", "seed", "max_tokens"]) {
    if (at(id).value !== "") body[id] = Number(at(id).value);
  }
  const stops = at("stops").value.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  const system = at("system").value;
  if (!server.chats) body.prompt = system + turns.map((turn) => turn.content).join("");
  else {
    body.messages = turns.map(({ role, content }) => ({ role, content }));
    if (system) body.messages.unshift({ role: "system", content: system });
  }
  return body;
}

async function send() {
  const wrong = SETTINGS.map(at).find((field) => !field.checkValidity());
  if (wrong) return wrong.reportValidity();
  const text = at("prompt").value;
  if (!text.trim()) return;
  const question = { role: "user", content: text }, turn = { role: "assistant", content: "", reasoning: "" };
  turns.push(question);
  const body = request();
  at("prompt").value = "";
  const drawnQuestion = drawTurn(question);
  turns.push(turn);
  generating = { abort: new AbortController(), turn };
  const drawn = drawTurn(turn);
  busy(true, "Waiting for the first token …");
  at("log").scrollTop = at("log").scrollHeight;
  const begun = performance.now();
  let tokens = null, first = null, timer = null, result = "Stopped.", failed = false;
  try {
    const answer = await fetch(server.chats ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: generating.abort.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      for (const choice of event.choices) {
        const delta = choice.delta || {};
        turn.reasoning += delta.reasoning_content || "";
        turn.content += (delta.content || "") + (choice.text || "");
      }
      if (!turn.content && !turn.reasoning) continue;
      if (first === null) {
        first = performance.now();
        outcome("Writing …");
      }
      timer ??= setTimeout(() => { timer = null; paint(drawn, turn); }, PAINT_SECONDS * 1000);
    }
    const seconds = (performance.now() - begun) / 1000, wait = ((first ?? performance.now()) - begun) / 1000;
    result = `${tokens} tokens in ${seconds.toFixed(1)} s, the first token after ${wait.toFixed(1)} s:`
      + ` ${(tokens / seconds).toFixed(1)} tokens per second.`;
  } catch (error) {
    if (error.name !== "AbortError") [result, failed] = [error.message, true];
  }
  clearTimeout(timer);
  if (!turn.content && !turn.reasoning && tokens === null) { // the unanswered message returns to the input field
    turns = turns.filter((each) => each !== turn && each !== question);
    drawn.remove();
    drawnQuestion.remove();
    at("prompt").value ||= text;
  }
  busy(false, result, failed);
  paint(drawn, turn);
  keep();
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

function busy(is, text, wrong = false) {
  const stopHasFocus = document.activeElement === at("stop");
  if (!is) generating = null;
  at("go").disabled = is || !server.generates;
  at("new").disabled = is;
  at("stop").disabled = !is;
  at("log").setAttribute("aria-busy", String(is));
  if (!is && stopHasFocus) at("prompt").focus();
  outcome(text, wrong);
}

function outcome(text, wrong = false) {
  say(at("outcome"), text);
  at("outcome").classList.toggle("wrong", wrong);
}

// -- the state -------------------------------------------------------------------------------------------------------

const rates = [];

async function look() {
  try {
    const answer = await fetch("status");
    const status = await answer.json();
    if (!answer.ok) throw new Error(status.error.message);
    const before = server;
    server = status;
    say(at("model"), server.model);
    document.title = server.model;
    if (String(before.models) !== String(server.models)) explain();
    at("rate").textContent = server.tokens_per_second.toFixed(1);
    at("running").textContent = `${server.running} of ${server.rows}`;
    at("waiting").textContent = server.waiting;
    draw(server.tokens_per_second);
    ranks(server.memory_bytes);
    say(at("state"), server.generates ? "Ready" : "This model generates no text. Send requests from a program.");
  } catch (error) {
    say(at("state"), `The server does not answer: ${error.message}`);
  }
  setTimeout(look, document.hidden ? 10000 : 1000);
}

function explain() {
  for (const id of ["go", "prompt"]) at(id).disabled = !server.generates;
  at("choice").replaceChildren(...server.models.map((name) => make("option", {}, name)));
  at("choice").value = server.models.includes(chosen) ? chosen : server.model;
  at("choice").parentElement.hidden = server.models.length < 2;
  drawCurl();
  if (server.generates && !server.chats) {
    say(at("chat-title"), "Text");
    at("keys").textContent += " This model has no chat template, so the answer continues the whole text.";
    if (!generating) at("log").replaceChildren(...turns.map(drawTurn)); // plain text, not Markdown
  }
}

function drawCurl() {
  const url = location.href.replace(/[^/]*$/, ""), model = at("choice").value;
  const [path, body] = !server.generates ? ["docs", null]
    : server.chats ? ["v1/chat/completions", { model, messages: [{ role: "user", content: "Hello" }] }]
    : ["v1/completions", { model, prompt: "Once upon a time" }];
  const key = server.needs_key ? ' -H "Authorization: Bearer $KEY"' : "";
  const data = body && ` -H "Content-Type: application/json" -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`;
  at("curl").textContent = `curl ${url}${path}${key}${data || ""}`;
}

function say(place, text) { // a screen reader reads only changed text
  if (place.textContent !== text) place.textContent = text;
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
  at("ranks").replaceChildren(...Object.entries(memory).map(([device, size], rank) => make("tr", {},
    make("th", { scope: "row" }, `${rank} (${device})`),
    make("td", {}, bytes(size)),
    make("td", {}, make("meter", { min: 0, max: most, value: size, "aria-label": `memory of rank ${rank}` })))));
}

// -- the plan --------------------------------------------------------------------------------------------------------

async function plan() {
  const summary = await (await fetch("plan")).json();
  if (summary.error) throw new Error(summary.error.message);
  const sizes = summary.bytes_per_rank.map((size, rank) => `rank ${rank} ${bytes(size)}`).join(", ");
  at("plan-text").textContent = `${summary.model}, ${bytes(summary.bytes_whole)}, policy ${summary.policy}: ${sizes}.`;
  picture(summary);
  const titles = ["Part", "Whole", ...summary.bytes_per_rank.map((_, rank) => `Rank ${rank}`)];
  at("plan-head").replaceChildren(make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title))));
  at("plan-rows").replaceChildren(...summary.parts.map((part) => make("tr", {},
    make("th", { scope: "row" }, part.name), make("td", {}, bytes(part.bytes)),
    ...part.ranks.map((size) => make("td", {}, part.cut ? bytes(size) : "whole")))));
}

function picture(summary) { // one line for each part of the model, one bar for each rank, with the length of the rank's share
  const label = 260, width = 800, line = 22, gap = 6;
  const count = summary.bytes_per_rank.length, column = width / count;
  const most = Math.max(...summary.parts.flatMap((part) => part.ranks));
  const height = (summary.parts.length + 1) * line + gap;
  const drawn = make("svg", {
    viewBox: `0 0 ${label + width} ${height}`, width: label + width, height, role: "img",
    "aria-label": `${summary.parts.length} parts of the model over ${count} ranks; the table below has the figures`,
  });
  for (let rank = 0; rank < count; rank++) {
    drawn.append(make("text", { x: label + rank * column, y: 15 }, `rank ${rank}`));
  }
  summary.parts.forEach((part, index) => {
    const y = (index + 1) * line;
    const name = part.name.length > 38 ? `…${part.name.slice(-37)}` : part.name;
    drawn.append(make("text", { x: 0, y: y + 14 }, name));
    part.ranks.forEach((size, rank) => drawn.append(make("rect", {
      x: label + rank * column, y: y + 3, height: line - gap,
      width: Math.max(size ? 2 : 0, ((column - gap) * size) / most), class: part.cut ? "cut" : "copy",
    }, make("title", {}, `${part.name}, rank ${rank}: ${bytes(size)}`))));
  });
  at("picture").replaceChildren(drawn);
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!generating) send();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // Enter also ends a composition
  event.preventDefault();
  if (!generating) send();
});
at("stop").addEventListener("click", () => generating?.abort.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") generating?.abort.abort();
});
at("new").addEventListener("click", () => {
  turns = [];
  at("log").replaceChildren();
  outcome("");
  keep();
  at("prompt").focus();
});
at("copy-curl").addEventListener("click", () => copy(at("copy-curl"), at("curl").textContent));
at("choice").addEventListener("change", drawCurl);
addEventListener("pagehide", keep);
restore();
look();
plan().catch((error) => { say(at("plan-text"), `The plan cannot be loaded: ${error.message}`); });

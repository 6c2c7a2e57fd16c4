// What pages gain from a script: live updates, ages that count on, sliders, copying. All of it can be read without.
"use strict";
(() => {
  const get = (id) => document.getElementById(id);
  const parse = (html) => {
    const holder = document.createElement("template");
    holder.innerHTML = html.trim();
    return holder.content.firstElementChild;
  };

  // Ages
  const sayAge = (seconds) => {
    for (const [limit, divisor, unit] of [[100, 1, "s"], [6000, 60, "min"], [172800, 3600, "h"]]) {
      if (seconds < limit) return `${Math.max(0, seconds / divisor).toFixed(0)} ${unit}`;
    }
    return `${(seconds / 86400).toFixed(0)} d`;
  };
  const tick = () => document.querySelectorAll("time[data-at]").forEach((each) => {
    const said = sayAge(Date.now() / 1000 - Number(each.dataset.at));
    if (each.textContent !== said) each.textContent = said;
  });
  setInterval(tick, 5000);

  // Pieces of the page, each in the place of the one with its id; where keys are typed stays where it is.
  const put = (id, html) => {
    const fresh = parse(html);
    const old = get(id);
    if (!old) {
      const place = [...document.querySelectorAll("tbody[data-new]")].find((each) => id.startsWith(each.dataset.new));
      if (place && !("chosen" in place.dataset)) place.append(fresh);
      else if (place) reload();
      else if (id.startsWith("campaign-") && location.pathname === "/") reload();
      return;
    }
    const focused = old.contains(document.activeElement) && document.activeElement.getAttribute("href");
    old.replaceWith(fresh);
    if (focused) [...fresh.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus();
    fresh.classList.add("changed");
    const place = fresh.closest("tbody[data-chosen]");
    if (place) reload();
  };
  // Replace the page, except the form in which the user is typing.
  const merge = (old, fresh) => {
    const at = [...old.children].findIndex((each) => each.contains(document.activeElement));
    const kept = old.children[at], twin = fresh.children[at];
    if (!kept || twin?.tagName !== kept.tagName) return old.replaceWith(fresh);
    const around = [[...fresh.children].slice(0, at), [...fresh.children].slice(at + 1)];
    if (kept !== document.activeElement && kept.tagName !== "FORM") merge(kept, twin);
    const now = [...old.children].find((each) => each.contains(document.activeElement)) ?? old.children[at];
    [...old.children].forEach((each) => { if (each !== now) each.remove(); });
    now.before(...around[0]);
    now.after(...around[1]);
  };
  let waiting = 0;
  const swapMain = async (url) => {
    const answer = await fetch(url, { headers: { accept: "text/html" } });
    if (!answer.ok) return;
    merge(get("main"), new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main"));
    start();
  };
  const reload = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => swapMain(location.href), 800);
  };
  // A board's load and sensors, read again while the page is seen.
  setInterval(async () => {
    for (const each of document.hidden ? [] : document.querySelectorAll("[data-refresh]")) {
      const answer = await fetch(each.dataset.refresh).catch(() => null);
      if (answer?.ok) put(each.id, await answer.text());
    }
  }, 2000);
  const live = get("live");
  const source = new EventSource("/live");
  live.hidden = false;
  const showLive = (on) => { live.textContent = on ? "live" : "not live"; live.classList.toggle("off", !on); };
  showLive(false);
  source.addEventListener("parts", (event) => {
    showLive(true);
    for (const [id, html] of JSON.parse(event.data)) put(id, html);
  });
  source.addEventListener("stale", () => location.reload());
  source.addEventListener("error", () => showLive(false));
  addEventListener("pagehide", () => source.close());

  // A sweep's sliders: the pick moves at once by the rule that the farm picks by; then the page says the rest.
  const sliders = (form) => {
    const scatter = get("scatter");
    const words = (input) => {
      const none = Number(input.value) >= Number(input.max) * 0.9999;
      form.querySelector(`output[for="${input.id}"]`).textContent = none ? "none" : `${Number(input.value).toPrecision(4)} ${input.dataset.unit}`;
      return none ? Infinity : Number(input.value);
    };
    const move = () => {
      const limits = Object.fromEntries([...form.querySelectorAll("input[type=range]")].map((each) => [each.id, words(each)]));
      if (!scatter) return;
      JSON.parse(get("scatter").dataset.points).forEach((points, series) => {
        const kept = points.filter((each) => each.latency <= (limits.deadline ?? Infinity) && (!Number.isFinite(limits.max_power ?? Infinity) || (each.power !== null && each.power <= limits.max_power)));
        const best = kept.sort((one, other) => one.cost - other.cost)[0];
        const ring = scatter.querySelector(`#ring-${series} use`);
        const at = best && [...scatter.querySelectorAll(`.point[data-series="${series}"]`)].find((each) => each.dataset.key === best.key);
        if (ring) ring.setAttribute("visibility", at ? "visible" : "hidden");
        if (ring && at) ["x", "y"].forEach((name) => ring.setAttribute(name, at.getAttribute(name)));
      });
    };
    let later = 0;
    const ask = () => {
      clearTimeout(later);
      later = setTimeout(async () => {
        const query = new URLSearchParams(new FormData(form));
        form.querySelectorAll("input[type=range]").forEach((each) => { if (words(each) === Infinity) query.set(each.name, "0"); });
        history.replaceState(null, "", `?${query}`);
        await swapMain(location.href);
      }, 200);
    };
    form.addEventListener("input", () => { move(); ask(); });
  };

  // The course of a campaign, with a cursor that tells values.
  const plot = (figure) => {
    if (!window.uPlot) return;
    const { names, data, log } = JSON.parse(figure.dataset.plot);
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const axis = { stroke: colour("--faint"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { stroke: colour("--rule"), width: 1 } };
    const series = names.map((name, at) => ({ label: name, stroke: colour(`--s${at % 8}`), width: 1.6, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }), value: (_, value, at, index) => say(index == null ? data[at].at(-1) : value) }));
    // Trials are whole numbers.
    const whole = [...Array(12).keys()].flatMap((each) => [1, 2, 5].map((step) => step * 10 ** each));
    const say = (value) => value == null ? "–" : `${value.toPrecision(4)} ms`;
    figure.replaceChildren();
    const width = () => Math.min(800, figure.clientWidth || 800);
    const made = new uPlot({ width: width(), height: 260, scales: { x: { time: false }, y: log ? { distr: 3, log: 10 } : {} }, axes: [{ ...axis, incrs: whole }, { ...axis, size: 64, values: (_, all) => all.map((each) => each == null ? "" : each >= 1000 ? `${each / 1000} s` : `${each} ms`) }], series: [{ label: "trials", value: (_, value) => value ?? data[0].at(-1) }, ...series] }, data, figure);
    addEventListener("resize", () => made.setSize({ width: width(), height: 260 }));
  };

  const start = () => {
    document.querySelectorAll(".copy").forEach((each) => { each.hidden = !navigator.clipboard; });
    document.querySelectorAll("form#limits:not([data-begun])").forEach((each) => { each.dataset.begun = ""; sliders(each); });
    document.querySelectorAll("figure[data-plot]:not([data-begun])").forEach((each) => { each.dataset.begun = ""; plot(each); });
    tick();
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (button?.dataset.sure && !confirm(button.dataset.sure)) event.preventDefault();
    if (!button?.dataset.copy) return;
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  start();
})();

async () => {
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const wide = document.documentElement.clientWidth, faults = [];
  const isCut = (each) => each.scrollWidth > each.clientWidth + 1;
  if (isCut(document.documentElement)) faults.push("the page scrolls sideways");
  const regions = [...document.querySelectorAll(".scroll, nav")];
  regions.filter(isCut).forEach((each) => faults.push(`cut: ${each.innerText.slice(0, 80)}`));
  for (const table of document.querySelectorAll("table.rows")) {
    const heads = [...table.querySelectorAll("thead th")].map((each) => each.textContent);
    for (const { dataset, cellIndex } of table.querySelectorAll("tbody td"))
      if (dataset.label !== heads[cellIndex]) faults.push(`${dataset.label} is under ${heads[cellIndex]}`);
  }
  const isBroken = (each) => each.getClientRects().length > 1;
  if ([...document.querySelectorAll("td label")].some(isBroken)) faults.push("a label is apart from its button");
  const charts = [...document.querySelectorAll("svg.chart:not(.spark), .uplot canvas")];
  for (const chart of charts) {
    const place = chart.getBoundingClientRect();
    if (place.width < 250 || place.height < 30 || place.right > wide) faults.push("a chart cannot be seen");
    const texts = [...chart.querySelectorAll("text")].map((each) => [each.textContent, each.getBoundingClientRect()]);
    texts.forEach(([text, one], at) => {
      const isOutside = one.left < place.left - 1 || one.right > place.right + 1;
      if (one.height < 9 || isOutside) faults.push(`${text} cannot be read`);
      for (const [other, two] of texts.slice(at + 1))
        if (one.left < two.right && two.left < one.right && one.top + 3 < two.bottom && two.top + 3 < one.bottom)
          faults.push(`${text} lies over ${other}`);
    });
  }
  return { faults, charts: charts.length };
}
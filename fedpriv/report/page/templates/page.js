"use strict";
(() => {
  const root = document.documentElement;
  const plots = [...document.querySelectorAll(".plot")];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const paperWidth = 660; // an A4 page between its margins, in CSS pixels
  const [plotHeight, legendHeight, legendWidth] = [340, 22, 220]; // of one entry

  const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";

  // Colours of the page as it looks now: plotly does not read style sheets.
  function colours(plot) {
    const figure = getComputedStyle(plot.closest("figure"));
    const muted = getComputedStyle(plot.nextElementSibling).color;
    const axis = { gridcolor: figure.borderTopColor, linecolor: figure.borderTopColor };
    return {
      font: { color: figure.color, family: getComputedStyle(document.body).fontFamily },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: figure.color },
      hoverlabel: { bgcolor: getComputedStyle(plot).backgroundColor, font: { color: figure.color } },
      xaxis: axis,
      yaxis: axis,
    };
  }

  function merged(layout, changes) {
    const result = { ...layout };
    for (const [key, value] of Object.entries(changes)) {
      const nested = value && typeof value === "object" && !Array.isArray(value);
      result[key] = nested ? merged(layout[key] || {}, value) : value;
    }
    return result;
  }

  function draw(plot, size) {
    const { data, layout } = JSON.parse(document.getElementById(plot.dataset.chart).textContent);
    const settings = {
      displaylogo: false,
      responsive: true,
      // By name, as others send a chart to somebody's server.
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    };
    const entries = data.filter((trace) => trace.showlegend !== false).length;
    const columns = Math.max(1, Math.floor((size.width || plot.clientWidth) / legendWidth));
    plot.style.height = `${plotHeight + legendHeight * Math.ceil(entries / columns)}px`;
    const drawn = Plotly.react(plot, data, merged(layout, { ...colours(plot), ...size }), settings);
    return size.width ? drawn : drawn.then(() => Plotly.Plots.resize(plot));
  }

  const drawAll = (size) => Promise.all(plots.map((plot) => draw(plot, size)));

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    drawAll({});
  });
  dark.addEventListener("change", () => drawAll({}));

  let shown;
  window.addEventListener("beforeprint", () => {
    shown = root.dataset.theme;
    root.dataset.theme = "light";
    drawAll({ width: paperWidth });
  });
  window.addEventListener("afterprint", () => {
    if (shown) root.dataset.theme = shown;
    else delete root.dataset.theme;
    drawAll({});
  });

  drawAll({}).then(() => root.setAttribute("data-drawn", ""));
})();

"""How a sweep's page looks: dark on white, on a screen and on paper. What stands on it is in `sweep_page.py`."""

from __future__ import annotations

STYLE = """
:root { --ink: #222; --faint: #5a5a5a; --line: #d9d9d9; --blue: #0072b2; --red: #b3261e; }
* { box-sizing: border-box; }
body {
  margin: 0; background: #fff; color: var(--ink);
  font: 16px/1.5 "Segoe UI", "Helvetica Neue", Arial, "Liberation Sans", "DejaVu Sans", sans-serif;
}
main { max-width: 1060px; margin: 0 auto; padding: 32px 28px 48px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 {
  font-size: 20px; margin: 40px 0 10px; padding-top: 12px; border-top: 1px solid var(--line);
  break-after: avoid;
}
h3 { font-size: 16px; margin: 22px 0 6px; break-after: avoid; }
p { margin: 0 0 10px; }
p, li { max-width: 84ch; }
p.sub, p.simulated, p.broken { max-width: none; }
ul { margin: 0 0 10px; padding-left: 22px; }
.sub, .how { color: var(--faint); font-size: 14px; }
.simulated {
  border: 1.5px solid var(--red); border-radius: 6px; color: var(--red); padding: 8px 14px;
  margin: 16px 0; font-weight: 600;
}
.broken {
  border: 1.5px solid #a06e00; border-radius: 6px; color: #7a5400; padding: 8px 14px; margin: 16px 0;
}
.answer {
  border-left: 4px solid var(--blue); background: #f4f8fb; padding: 14px 20px 8px; margin: 18px 0;
  break-inside: avoid;
}
.answer .lead { font-size: 20px; font-weight: 600; }
.answer .of { color: var(--faint); font-size: 14px; margin-bottom: 2px; }
.answer.other { border-left-color: #b4b4b4; background: #f7f7f7; }
.answer.other .lead { font-size: 16px; }
figure { margin: 20px 0 28px; break-inside: avoid; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: var(--faint); font-size: 14px; margin-top: 4px; }
.scroll { overflow-x: auto; }
.scroll + .scroll { margin-top: 18px; }
table {
  border-collapse: collapse; width: 100%; font-size: 14px; line-height: 1.3;
  font-variant-numeric: tabular-nums;
}
caption { text-align: left; color: var(--faint); font-size: 13px; padding: 0 0 6px; }
th {
  text-align: left; font-weight: 600; font-size: 13px; vertical-align: bottom;
  border-bottom: 1.5px solid var(--ink); padding: 4px 10px 5px 0;
}
td { vertical-align: top; border-bottom: 1px solid #e8e8e8; padding: 5px 10px 5px 0; }
th.number, td.number { text-align: right; white-space: nowrap; }
td small { display: block; color: var(--faint); font-size: 11.5px; }
tr { break-inside: avoid; }
thead { display: table-header-group; }
tr.pick td { background: #e8f2f9; font-weight: 600; }
tr.pick td small { font-weight: 400; }
tr.predicted td { color: #6a6a6a; font-style: italic; }
tr.void td { color: #8a8a8a; }
td.badges { white-space: nowrap; }
.badge {
  display: inline-block; font-size: 11.5px; font-style: normal; font-weight: 600; line-height: 1;
  padding: 3px 6px; border-radius: 4px; border: 1px solid currentColor; color: var(--faint);
  margin: 0 3px 2px 0; white-space: nowrap;
}
.badge.pick { background: var(--blue); border-color: var(--blue); color: #fff; }
.badge.front { color: var(--blue); }
.badge.predicted { border-style: dashed; }
.badge.bad { color: var(--red); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 0; font-size: 14px; }
dt { color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; }
footer {
  margin-top: 40px; color: var(--faint); font-size: 13px; border-top: 1px solid var(--line);
  padding-top: 10px;
}
@page { size: A4; margin: 14mm 13mm; }
@media print {
  body { font-size: 10.5pt; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  .scroll { overflow: visible; }
  figure { margin: 8px 0 14px; }
  figure img { width: 82%; }
  h2 { margin-top: 22px; }
  table { font-size: 8.5pt; }
  th { font-size: 8pt; }
  td small { font-size: 7pt; }
  td, th { padding-right: 7px; }
  .badge { font-size: 7pt; }
  a { color: inherit; text-decoration: none; }
}
"""

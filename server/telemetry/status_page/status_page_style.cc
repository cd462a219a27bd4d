// How the status page looks, and the few lines that keep it fresh.
#include "server/telemetry/status_page/status_page.h"

namespace lossd::telemetry {

// Colours of bars are those of Okabe and Ito, which people who do not see all colours can tell apart.
const char kStatusStyle[] = R"css(
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --paper: #f6f7f9; --card: #ffffff; --line: #dfe2e6;
  --good: #18794e; --bad: #c62a2f; --warn: #ad5700; --accent: #0072b2; --rest: #e6e8eb; }
@media (prefers-color-scheme: dark) { :root { --ink: #eceef0; --soft: #9ba1a6; --paper: #111315; --card: #1a1d1f;
  --line: #313538; --good: #4cc38a; --bad: #ff8589; --warn: #ffb224; --accent: #56b4e9; --rest: #2b2f31; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .3rem 1rem; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: .8rem; margin: 1.6rem 0 .5rem; letter-spacing: .06em; text-transform: uppercase; color: var(--soft); }
.soft { color: var(--soft); }
.badge { border-radius: 1rem; padding: .1rem .65rem; font-weight: 600; font-size: .8rem; border: 1px solid currentColor; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .75rem; margin-top: 1rem; }
.card, .table { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
.card { padding: .7rem .9rem; }
.card b { display: block; font-size: 1.2rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
.wide { grid-column: span 2; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .4rem .75rem; text-align: right; border-top: 1px solid var(--line); white-space: nowrap; font-variant-numeric: tabular-nums; }
thead th { border-top: 0; font-weight: 500; color: var(--soft); }
th:first-child, td:first-child, .text { text-align: left; }
td.wrap { white-space: normal; overflow-wrap: anywhere; }
@media (max-width: 900px) {
  body { padding: .75rem; }
  thead { display: none; }
  table, tbody { display: block; }
  tr { display: block; padding: .4rem 0; border-top: 1px solid var(--line); }
  tr:first-child { border-top: 0; }
  td, td:first-child, td.text { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem .75rem; border-top: 0;
    text-align: right; white-space: normal; overflow-wrap: anywhere; }
  td::before { content: attr(data-name); color: var(--soft); white-space: nowrap; }
}
.bar { display: block; width: 100%; height: 14px; border-radius: 4px; background: var(--rest); }
.memory { padding: .9rem; display: grid; grid-template-columns: max-content 1fr max-content; gap: .6rem 1rem; align-items: center; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0 .9rem .8rem; }
.legend svg { width: .7rem; height: .7rem; border-radius: 2px; vertical-align: -1px; }
.spark { display: block; width: 100%; height: 34px; }
.spark polyline { fill: none; stroke: var(--accent); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.p0 { fill: #0072b2; } .p1 { fill: #56b4e9; } .p2 { fill: #cc79a7; } .p3 { fill: #d55e00; } .p4 { fill: #e69f00; }
.p5 { fill: #009e73; } .p6 { fill: #8c6bb1; } .p7 { fill: #b5a642; } .p8 { fill: #a0522d; } .p9 { fill: #5f9ea0; }
.p10 { fill: #3b5b92; } .p11 { fill: #7f8c8d; }
footer { margin-top: 1.6rem; }
a { color: var(--accent); }
.lost::before { content: "The server does not answer; this is what it said last."; display: block; margin: -1.5rem -1.5rem 1rem;
  padding: .5rem 1.5rem; background: var(--bad); color: var(--paper); font-weight: 600; }
)css";

const char kStatusScript[] = R"js(
async function refresh() {
  try {
    const answer = await fetch("/", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.statusText);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.querySelector("main").replaceWith(page.querySelector("main"));
    document.title = page.title;
    document.body.classList.remove("lost");
  } catch (error) {
    document.body.classList.add("lost");
  }
  setTimeout(refresh, 2000);
}
setTimeout(refresh, 2000);
)js";

}  // namespace lossd::telemetry

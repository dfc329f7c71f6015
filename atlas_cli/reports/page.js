// Draws the charts of the page, sorts its tables, and shows where one of them goes on.

for (const figure of document.querySelectorAll("figure.chart")) {
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const place = document.createElement("div");
  figure.append(place);
  await vegaEmbed(place, spec, { actions: false, renderer: "svg" });
}
document.documentElement.dataset.drawn = "yes";

const valueOf = (row, column) => {
  const cell = row.cells[column];
  return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
};

const compare = (one, other) =>
  typeof one === "number" && typeof other === "number"
    ? one - other
    : String(one).localeCompare(String(other), "en", { numeric: true });

const sort = (head) => {
  const rising = head.ariaSort !== "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.ariaSort = rising ? "ascending" : "descending";
  const body = head.closest("table").tBodies[0];
  const rows = [...body.rows].sort((one, other) => {
    const order = compare(valueOf(one, head.cellIndex), valueOf(other, head.cellIndex));
    return rising ? order : -order;
  });
  body.append(...rows);
};

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sort(button.parentElement));
}

for (const place of document.querySelectorAll(".scroll")) {
  const mark = () =>
    place.classList.toggle("more", place.scrollLeft + place.clientWidth < place.scrollWidth - 1);
  place.addEventListener("scroll", mark);
  new ResizeObserver(mark).observe(place);
}

"""The small pictures of a report."""

from __future__ import annotations

from pathlib import Path

from conftest import write_images

from atlas_cli.reports.pictures import Thumbnails, image_section
from atlas_cli.reports.runs import ImageRow, Run


def test_the_pictures_that_are_shown_are_of_all_classes(tmp_path: Path):
    """More images changed than a page shows, and they come class by class."""
    names = ("cat", "dog", "fish", "newt")
    data = str(write_images(tmp_path / "data", names, 20))
    rows = tuple(
        ImageRow(data, "all", f"{name}/{path.name}", name, zero_shot="bird", learned=name)
        for name in names
        for path in sorted((tmp_path / "data" / name).iterdir())
    )
    section = "".join(image_section(Run("run", images=rows), Thumbnails()))
    assert "recognised now: 80 (48 of 80 are shown)" in section
    assert [section.count(f"{name}, was bird") for name in names] == [12] * 4

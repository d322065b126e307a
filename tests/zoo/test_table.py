"""The page of all conversions, and what was measured."""

import json

from benchmarks.zoo import table

RESULTS = {
    file.stem: json.loads(file.read_text())
    for file in sorted(table.RESULTS.glob("*.json"), key=lambda file: table._order(file.stem))
}


def test_the_page_is_what_the_results_say():
    assert table.PAGE.read_text() == table.page(RESULTS), "run python -m benchmarks.zoo.table"


def test_no_rules_make_a_wrong_element():
    wrong = {
        f"{source}: {row['name']}": row["wrong"]
        for source, rows in RESULTS.items()
        for row in rows
        if row["result"] == "rules" and row["wrong"]
    }
    assert not wrong


def test_nearly_all_become_rules():
    rows = [row for source, rows in RESULTS.items() for row in rows]
    assert len(rows) >= 250
    assert sum(row["result"] == "rules" for row in rows) >= 0.95 * len(rows)

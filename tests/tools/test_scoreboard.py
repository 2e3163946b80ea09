"""The table of several servers' self-tests."""

from __future__ import annotations

from tools.scoreboard import Result, scoreboard


def result(check: str, outcome: str, seen: str = "") -> Result:
    return {"feature": "chat", "check": check, "outcome": outcome, "seen": seen}


def test_each_server_has_a_column_its_counts_and_a_list_of_what_was_wrong() -> None:
    ours = [result("answers_a_chat", "pass"), result("counts_tokens", "pass")]
    theirs = [result("answers_a_chat", "off"), result("counts_tokens", "fail", "5 `tokens`")]
    assert list(scoreboard({"ours": ours, "theirs": theirs})) == [
        "|  | the server ... | ours | theirs |",
        "| --- | --- | --- | --- |",
        "|  | checks: yes | 2 | 0 |",
        "|  | checks: no | 0 | 1 |",
        "|  | checks: **wrong** | 0 | 1 |",
        "| chat | answers a chat | yes | no |",
        "| chat | counts tokens | yes | **wrong** |",
        "\nWhat was wrong with theirs:\n",
        "- counts tokens: `5 'tokens'`",
    ]

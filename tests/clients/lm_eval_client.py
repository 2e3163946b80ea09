"""lm-evaluation-harness: multiple choice and perplexity by `local-completions`, which scores with
`echo` and `logprobs`, and questions by `local-chat-completions`. The data are in this file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

ROWS = [
    {"text": "Once upon a time", "good": " there was", "bad": " qzx vkj", "sum": "27 plus 15"},
    {"text": "The little dog", "good": " was happy", "bad": " jjq xxv", "sum": "31 plus 12"},
]
DATA = """dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
"""
TASKS = {
    "choices": """task: choices
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{[good, bad]}}"
target_delimiter: ""
doc_to_target: 0
""",
    "perplexity": """task: perplexity
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}{{good}}"
metric_list: [{metric: word_perplexity}]
""",
    "sums": """task: sums
output_type: generate_until
doc_to_text: "What is {{sum}}?"
doc_to_target: "{{27 + 15 if '27' in sum else 43}}"
filter_list:
  - name: number
    filter:
      - {function: regex, regex_pattern: "is (\\\\d+)"}
      - {function: take_first}
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 100, temperature: 0}
metric_list: [{metric: exact_match}]
""",
}


def main(address: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        for name, task in TASKS.items():
            text = DATA.replace("FILE", str(data)) + task
            (Path(folder) / f"{name}.yaml").write_text(text)
        tasks = TaskManager(include_path=folder, include_defaults=False)

        def run(kind: str, path: str, *names: str) -> dict[str, dict[str, float]]:
            arguments = f"model={model},base_url={address}{path},tokenizer_backend=remote"
            arguments += ",max_length=1024,num_concurrent=2"
            return lm_eval.simple_evaluate(
                model=kind,
                model_args=arguments,
                tasks=list(names),
                task_manager=tasks,
                apply_chat_template=kind == "local-chat-completions",
                bootstrap_iters=0,
            )["results"]

        scored = run("local-completions", "/v1/completions", "choices", "perplexity")
        assert scored["choices"]["acc,none"] == 1.0, scored
        assert 1 < scored["perplexity"]["word_perplexity,none"] < 10_000, scored
        told = run("local-chat-completions", "/v1/chat/completions", "sums")
        assert told["sums"]["exact_match,number"] == 1.0, told


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

"""`fem eval`: lm-evaluation-harness's scores against our own computations."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from trainings import save_random_model

from fem.train.checkpoints import load_language_model
from fem.train.generate import continue_prompt
from fem_research.lm import eval as evaluation
from fem_research.lm import suites

CONTEXT = 48
QUESTIONS = [
    ("the sun sees the", ["moon", "river stone", "leaf"], 0),
    ("the bird sees the", ["sun", "leaf", "moon and the stone"], 1),
    ("nobody sees", ["anything", "it", "the"], 2),
]
PAGES = ["the sun sees the moon.", "über dem Fluß: " + "the leaf sees the sun, and so on; " * 6]
COMMON = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
TASKS = {
    "made_up_choice": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "made_up_pages": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list:
  - metric: bits_per_byte
  - metric: byte_perplexity
""",
    "made_up_writing": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 6}
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    texts = [*PAGES, *(question for question, _, _ in QUESTIONS)] * 3
    return save_random_model(tmp_path_factory.mktemp("model"), texts, CONTEXT)


@pytest.fixture(scope="module")
def model(folder):
    return load_language_model(folder)


def log_probabilities(model, ids):
    """log p(ids[t] | ids[:t]) for t >= 1, one forward a token, in float64."""
    with torch.no_grad():
        rows = [model(torch.tensor([ids[:t]])).logits[0, -1].double().log_softmax(-1) for t in range(1, len(ids))]
    return [row[token].item() for row, token in zip(rows, ids[1:])]


def test_the_suite_has_the_papers_columns_beside_the_papers_row():
    recipe = evaluation.EvalRecipe(model="m", suite="paper", tasks="own")
    scores = {"piqa": {"acc": 0.7, "acc_stderr": 0.01, "acc_norm": 0.8}, "own": {"acc": 0.5, "acc_stderr": 0.2}}
    table = {row["task"]: row for row in evaluation.rows(recipe, scores)}
    assert list(table) == [score.column for score in suites.PAPER] + ["own"]
    assert table["PIQA"] == {"task": "PIQA", "metric": "acc", "score": 0.7, "stderr": 0.01, "paper": 0.676}
    assert table["MMLU-P"]["score"] is None
    assert table["own"]["score"] == 0.5
    assert len(recipe.task_names()) == 16  # IFEval gives two columns
    assert len(suites.paper_rows()) == 19
    assert suites.paper_row("1.3B FEM-GLA")["SciQ"] == 0.782


def test_tasks_of_a_tag_or_a_pattern_are_listed_by_their_own_names():
    recipe = evaluation.EvalRecipe(model="m", tasks="one,a_tag", allow_code=True)
    scores = {"one": {"acc": 0.5}, "two": {"acc": 0.7, "acc_stderr": 0.1}}
    assert [(row["task"], row["score"]) for row in evaluation.rows(recipe, scores)] == [("one", 0.5), ("two", 0.7)]
    group = {"a_tag": {"acc": 0.6}} | scores  # a group with a score of its own stands for its tasks
    assert [row["task"] for row in evaluation.rows(recipe, group)] == ["one", "a_tag"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks")
    records = {
        "made_up_choice": [{"question": q, "choices": c, "gold": g} for q, c, g in QUESTIONS],
        "made_up_pages": [{"page": page} for page in PAGES],
        "made_up_writing": [{"question": q, "answer": "no model writes this"} for q, _, _ in QUESTIONS],
    }
    for name, task in TASKS.items():
        data = path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records[name]))
        (path / f"{name}.yaml").write_text(f"task: {name}\n{COMMON.format(data=data)}{task}")
    return path


@pytest.fixture
def offline(monkeypatch, tmp_path):
    pytest.importorskip("lm_eval", reason="needs free-energy-mixer[eval]")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def evaluate(folder, tasks, output, names):
    recipe = evaluation.EvalRecipe(
        model=str(folder), tasks=names, include_path=str(tasks), allow_code=True, batch_size=2
    )
    return evaluation.run(recipe, output)["eval"]


@pytest.mark.slow
def test_bits_per_byte_are_those_of_the_windows(folder, model, tasks, offline, tmp_path):
    """Windows of 48 predictions each; the last begins with earlier tokens, which are not counted again."""
    network, tokenizer = model
    found = evaluate(folder, tasks, tmp_path / "run", "made_up_pages")["made_up_pages"]
    nats = 0.0
    for page in PAGES:
        ids = [tokenizer.eos_token_id, *tokenizer(page)["input_ids"]]
        for start in range(1, len(ids), CONTEXT):
            end = min(start + CONTEXT, len(ids))
            first = 0 if start == 1 else end - 1 - CONTEXT
            nats -= sum(log_probabilities(network, ids[first:end])[-(end - start) :])
    size = sum(len(page.encode()) for page in PAGES)
    assert len(tokenizer(PAGES[1])["input_ids"]) > CONTEXT
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found["byte_perplexity"] == pytest.approx(math.exp(nats / size), rel=1e-5)


@pytest.mark.slow
def test_a_pattern_names_every_task_that_it_matches(folder, tasks, offline, tmp_path):
    found = evaluate(folder, tasks, tmp_path / "run", "made_up_pag*,made_up_cho*")
    assert set(found) == {"made_up_pages", "made_up_choice"}


@pytest.mark.slow
def test_choices_go_to_the_likeliest_answer(folder, model, tasks, offline, tmp_path):
    network, tokenizer = model
    found = evaluate(folder, tasks, tmp_path / "run", "made_up_choice")["made_up_choice"]
    right, right_by_length = [], []
    for question, choices, gold in QUESTIONS:
        begin = tokenizer(question)["input_ids"]
        scores = []
        for choice in choices:
            ids = tokenizer(question + " " + choice)["input_ids"]
            scores.append(sum(log_probabilities(network, ids)[len(begin) - 1 :]))
        right.append(scores.index(max(scores)) == gold)
        by_length = [score / len(choice) for score, choice in zip(scores, choices)]
        right_by_length.append(by_length.index(max(by_length)) == gold)
    assert found["acc"] == pytest.approx(sum(right) / 3)
    assert found["acc_norm"] == pytest.approx(sum(right_by_length) / 3)


@pytest.mark.slow
def test_written_answers_are_those_of_greedy_generation(folder, model, tasks, offline, tmp_path):
    """Left-padded batches of the harness write what single prompts write."""
    network, tokenizer = model
    answers = [continue_prompt(network, tokenizer, q, max_new_tokens=6, temperature=0) for q, _, _ in QUESTIONS]
    records = [{"question": q, "answer": a.partition("\n")[0]} for (q, _, _), a in zip(QUESTIONS, answers)]
    own = tmp_path / "tasks"
    own.mkdir()
    data = own / "made_up_writing.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = f"task: made_up_writing\n{COMMON.format(data=data)}{TASKS['made_up_writing']}"
    (own / "made_up_writing.yaml").write_text(text)
    assert evaluate(folder, own, tmp_path / "run", "made_up_writing")["made_up_writing"]["exact_match"] == 1.0
    assert evaluate(folder, tasks, tmp_path / "other", "made_up_writing")["made_up_writing"]["exact_match"] == 0.0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["eval"]["made_up_writing"]["exact_match"] == 1.0
    assert "made_up_writing" in (tmp_path / "run" / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, old, new, sentence",
    [
        (
            "made_up_writing",
            "max_gen_toks: 6",
            "max_gen_toks: 48",
            r"of 48 tokens, got .*_writing \(48 tokens\)",
        ),
        ("made_up_choice", "{{choices}}", "{{choices + [200 * question]}}", "must fit into the model's context of 48"),
    ],
)
def test_a_task_without_room_in_the_context_is_one_sentence(folder, tasks, offline, tmp_path, name, old, new, sentence):
    (tmp_path / f"{name}.yaml").write_text((tasks / f"{name}.yaml").read_text().replace(old, new))
    with pytest.raises(ValueError, match=sentence):
        evaluate(folder, tmp_path, tmp_path / "run", name)
    assert not (tmp_path / "run").exists()


def test_a_group_of_ones_own_may_name_a_task_of_the_harness(tmp_path):
    for name, text in (("alone", "task: alone\n"), ("group", "group: group\ntask:\n  - arc_easy\n")):
        (tmp_path / f"{name}.yaml").write_text(text)
        recipe = evaluation.EvalRecipe(model="m", tasks=name, include_path=str(tmp_path), allow_code=True)
        assert evaluation._needs_own_tasks(recipe) == (name == "group")


@pytest.mark.slow
def test_two_processes_score_what_one_does(folder, tasks, offline, monkeypatch, tmp_path):
    names = "made_up_choice,made_up_pages,made_up_writing"
    wanted = evaluate(folder, tasks, tmp_path / "one", names)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    words = f"eval --model {folder} --tasks {names} --include-path {tasks} --allow-code --batch-size 2"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fem.cli"]
    done = subprocess.run(
        [*torchrun, *words.split(), "--output", str(tmp_path / "two")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("written to") == 1
    found = json.loads((tmp_path / "two" / "results.json").read_text())["eval"]
    assert found.keys() == wanted.keys()
    for task, scores in wanted.items():
        assert found[task] == pytest.approx(scores, rel=1e-5, nan_ok=True), task


@pytest.mark.slow
def test_an_unknown_task_is_one_sentence_and_leaves_no_folder(folder, tasks, offline, tmp_path):
    with pytest.raises(ValueError, match=r"tasks must be known to lm-evaluation-harness .*got 'made_up_nothing'"):
        evaluate(folder, tasks, tmp_path / "run", "made_up_nothing,made_up_pages")
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "cache"])


def test_a_folder_that_cannot_be_is_said_before_anything_is_scored(folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: pytest.fail("scored for hours, and nowhere to write it"))
    with pytest.raises(FileExistsError):
        evaluation.run(evaluation.EvalRecipe(model=str(folder), tasks="made_up"), tmp_path / "file" / "run")


PRINTED = """
4.44 1  3.38 2  7.63 0  5.75 0  6.63 2  4.56 1  2.06 9  5.63 0  3.88 1
4.38 1  4.25 1  5.44 3  6.50 1  6.63 0  4.81 1  3.31 2  1.81 8  9.38 0  6.56 2
"""


def test_average_ranks_and_firsts_of_table_2_are_those_printed():
    """Which checks the 304 scores that they are made of."""
    rows, numbers = suites.paper_rows(), PRINTED.split()
    wanted = list(zip(map(float, numbers[::2]), map(int, numbers[1::2])))
    assert len(wanted) == len(rows) == 19
    for size, printed in (("1.3B", wanted[:9]), ("340M", wanted[9:])):
        of_its_size = {name: row for name, row in rows.items() if name.startswith(size)}
        for row, (rank, firsts) in zip(suites.ranked(of_its_size), printed, strict=True):
            assert row["average rank"] == pytest.approx(rank, abs=0.006), row
            assert row["firsts"] == firsts, row


def test_our_row_stands_in_table_2_with_its_rank_where_every_task_was_scored():
    ours = suites.paper_row("340M FEM")
    table = {row["row"]: row for row in suites.table_2("340M", ours)}
    assert len(table) == 11
    assert table["ours"] == table["340M FEM"] | {"row": "ours"}
    assert table["ours"]["average rank"] == pytest.approx(1.81, abs=0.006)
    table = {row["row"]: row for row in suites.table_2("340M", ours | {"MATH": None})}
    assert table["ours"]["average rank"] is table["ours"]["firsts"] is None
    assert table["340M FEM"]["firsts"] == 8
    recipe = evaluation.EvalRecipe(model="m", suite="paper", beside="1.3B FEM")
    title, _, page = evaluation._beside_table_2(recipe, evaluation.rows(recipe, {"piqa": {"acc": 0.7}}))
    assert title == "## Table 2, 1.3B"
    assert page.count("1.3B ") == 9
    assert "| ours |" in page

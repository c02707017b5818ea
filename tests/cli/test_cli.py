"""The command line: output, files and exit codes of train, generate, score, list, check and doctor."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from cli_runner import run_cli
from safetensors.torch import load_file

from tastemaker.cli import EXIT_FAILURE, EXIT_USAGE
from tastemaker.core.registry import ConfigError
from tastemaker.data.prompts import PromptSet
from tastemaker.diagnostics.doctor import pass_check
from tastemaker.vlm.question_answering import read_answers

QUICK = ["steps=4", "sample.every=2", "checkpoint.every=2", "batch.prompts=4", "objective.group_size=4"]


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "diagnostics"))


def run_and_read_error(capsys, *arguments: str) -> tuple[int, str]:
    code = run_cli(*arguments)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return code, re.sub(r"\s+", " ", error)


def load_weights(run_name: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(f"runs/{run_name}/checkpoints/step-{step:06d}/weights.safetensors")


def test_train_writes_metrics_samples_and_checkpoints(capsys):
    assert run_cli("train", "grpo-toy-flow", *QUICK) == 0
    error = capsys.readouterr().err
    assert error.index("the report is runs/grpo-toy-flow/report.html") < error.index("next:")
    assert "tastemaker generate runs/grpo-toy-flow\n" in error and "tastemaker export runs/grpo-toy-flow --out" in error
    run_dir = Path("runs/grpo-toy-flow")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 4]  # the guard runs at the first and the last step
    assert {"loss/policy", "reward/mean", "grad_norm", "lr", "ratio"} <= set(rows[1]) and "guard/diversity" in rows[0]
    assert sorted(p.name for p in (run_dir / "samples").glob("*.png")) == [f"step-00000{i}.png" for i in (0, 2, 4)]
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step-000002", "step-000004"]


def test_train_resumes_an_interrupted_run():
    assert run_cli("train", "grpo-toy-flow", *QUICK, "name=uninterrupted") == 0
    assert run_cli("train", "grpo-toy-flow", *QUICK, "name=interrupted") == 0
    shutil.rmtree("runs/interrupted/checkpoints/step-000004")
    assert run_cli("train", "grpo-toy-flow", *QUICK, "name=interrupted") == 0
    uninterrupted, interrupted = load_weights("uninterrupted", 4), load_weights("interrupted", 4)
    assert all(uninterrupted[key].equal(interrupted[key]) for key in uninterrupted)
    rows = [json.loads(line)["step"] for line in Path("runs/interrupted/metrics.jsonl").read_text().splitlines()]
    assert rows == [0, 1, 2, 3, 4, 4]


@pytest.mark.slow
def test_train_resumes_a_moved_run_directory(capsys):
    assert run_cli("train", "grpo-toy-flow", *QUICK, "name=uninterrupted") == 0
    assert run_cli("train", "grpo-toy-flow", *QUICK, "name=interrupted") == 0
    shutil.rmtree("runs/interrupted/checkpoints/step-000004")
    Path("archive").mkdir()
    Path("runs/interrupted").rename("archive/moved")
    capsys.readouterr()
    assert run_cli("train", "archive/moved") == 0
    assert "archive/moved: 4 steps from step 2" in capsys.readouterr().err and not Path("runs/interrupted").exists()
    uninterrupted, moved = (
        load_weights("uninterrupted", 4),
        load_file("archive/moved/checkpoints/step-000004/weights.safetensors"),
    )
    assert all(uninterrupted[key].equal(moved[key]) for key in uninterrupted)
    code, output = run_and_read_error(capsys, "train", "archive/moved/", "steps=3")
    assert code == EXIT_USAGE and "steps: 4 -> 3" in output and "--allow-change steps" in output
    assert run_cli("train", "archive/moved/", "steps=5") == 0
    assert run_cli("train", "archive/moved", "name=branch", "steps=1") == 0
    assert Path("archive/branch/checkpoints/step-000001").is_dir()


def test_changed_configuration_is_refused(capsys):
    assert run_cli("train", "grpo-toy-flow", *QUICK) == 0
    code, output = run_and_read_error(capsys, "train", "grpo-toy-flow", *QUICK, "optim.lr=5e-4")
    assert code == EXIT_USAGE
    assert "optim.lr: 0.001 -> 0.0005" in output and "--allow-change optim.lr" in output
    long_override = f"data={{type: prompts, prompts: [{', '.join(f'a red number {i}' for i in range(200))}]}}"
    assert len(run_and_read_error(capsys, "train", "grpo-toy-flow", *QUICK, long_override)[1]) < 1000
    assert run_cli("train", "grpo-toy-flow", *QUICK, "steps=5") == 0
    assert Path("runs/grpo-toy-flow/checkpoints/step-000005").is_dir()


def test_init_from_loads_weights_only():
    assert run_cli("train", "likelihood-toy-flow", "steps=4", "sample.every=0", "batch.prompts=8") == 0
    assert run_cli("train", "grpo-toy-flow", *QUICK, "--init-from", "runs/likelihood-toy-flow") == 0
    base, start = load_weights("likelihood-toy-flow", 4), load_weights("grpo-toy-flow", 2)
    difference = max((base[key] - start[key]).abs().max().item() for key in base)
    assert 0 < difference < 0.02  # two small updates


def test_resume_continues_under_another_name():
    assert run_cli("train", "grpo-toy-flow", *QUICK, "name=first") == 0
    checkpoint = "runs/first/checkpoints/step-000002"
    assert run_cli("train", "grpo-toy-flow", *QUICK, "name=second", "--resume", checkpoint) == 0
    first, second = load_weights("first", 4), load_weights("second", 4)
    assert all(first[key].equal(second[key]) for key in first)


def test_generated_samples_can_be_scored(capsys):
    assert run_cli("train", "grpo-toy-causal", *QUICK, "ema_decay=0.9") == 0
    for search in ("single", "best_of_n", "parm"):
        out = f"images-{search}"
        arguments = ["--prompt", "a red", "--count", "2", "--search", search, "--out", out, "--weights", "ema"]
        assert run_cli("generate", "runs/grpo-toy-causal", *arguments) == 0
        rows = [json.loads(line) for line in Path(out, "metadata.jsonl").read_text().splitlines()]
        assert [row["prompt"] for row in rows] == ["a red", "a red"] and Path(out, rows[0]["file"]).is_file()
    capsys.readouterr()
    assert run_cli("score", "images-parm", "--reward", "color", "--reward", "{type: jpeg, quality: 80}") == 0
    scores = [json.loads(line) for line in Path("images-parm/scores.jsonl").read_text().splitlines()]
    assert len(scores) == 2 and {"color", "jpeg", "file", "prompt"} <= set(scores[0])


def test_samples_do_not_depend_on_the_batch():
    assert run_cli("generate", "grpo-toy-flow", "-p", "a red", "-p", "a blue", "--out", "both") == 0
    assert run_cli("generate", "grpo-toy-flow", "-p", "a red", "--out", "one") == 0
    name = "00000-a-red.png"
    assert Path("both", name).read_bytes() == Path("one", name).read_bytes()


def test_videos_are_written():
    assert run_cli("generate", "grpo-toy-video", "-p", "a red", "--out", "clips") == 0
    assert Path("clips/00000-a-red.mp4").stat().st_size > 0 and Path("clips/sheet.png").is_file()


@pytest.mark.parametrize("kind", ["models", "rewards", "objectives", "recipes", "data", "searches", "prompts"])
def test_list_prints_every_kind(kind, capsys):
    assert run_cli("list", kind) == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_list_prints_prompt_set_sizes(capsys):
    assert run_cli("list", "prompts", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    for name, row in rows.items():
        assert row["count"] == len(PromptSet(name).load(0)), name
    assert all(PromptSet(alias).load(0) == PromptSet("animals").load(0) for alias in rows["animals"]["aliases"])


def test_check_prints_configuration_and_step_counts(capsys):
    assert run_cli("check", "grpo-toy-flow") == 0
    output = capsys.readouterr().out
    assert "type: grpo" in output and "samples per step" in output and "no problems" in output


def test_check_prints_all_problems(capsys):
    arguments = ["objective={type: reward_gradient}", "rewards.jpeg={type: jpeg}", "rewards.still={type: stillness}"]
    code, output = run_and_read_error(capsys, "check", "draft-toy-flow", *arguments, "--world-size", "3")
    assert code == EXIT_USAGE
    assert "jpeg" in output and "'still'" in output and "3 ranks" in output


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["train", "gropo-toy-flow"], "'grpo-toy-flow'?"),
        (["train", "grpo-toy-flow", "objective.gropu_size=3"], "'group_size'?"),
        (["train", "grpo-toy-flow", "optim.lr=much"], "optim.lr"),
        (["train", "grpo-toy-flow", "steps"], "key=value"),
        (["train", "missing.yaml"], "missing.yaml"),
        (["train", "grpo-toy-flow", "process.dynamics={type: ode}"], "process.dynamics"),
        (["train", "grpo-toy-flow", "--init-from", "nowhere.pt"], "nowhere.pt"),
        (["train", "grpo-toy-flow", "--resume", "nowhere"], "nowhere"),
        (["train", "grpo-toy-flow", "--device", "cuda"], "cuda"),
        (["train", "grpo-toy-flow", "engine.attention_backend=flash"], "flash"),
        (["train", "grpo-toy-flow", "data={type: prompt_file, path: none.txt}"], "none.txt"),
        (["generate", "grpo-toy-flow", "--search", "bestofn"], "'best_of_n'?"),
        (["generate", "grpo-toy-flow", "--prompts", "none.txt"], "none.txt"),
        (["score", "nothing", "--reward", "jpeg"], "nothing"),
        (["score", ".", "--reward", "jpge"], "'jpeg'?"),
        (["generate", "grpo-toy-flow", "-p", "a red", "--weights", "ema"], "'ema'"),
    ],
)
def test_mistakes_are_reported_with_an_exit_code(arguments, fragment, capsys):
    code, error = run_and_read_error(capsys, *arguments)
    assert code in (EXIT_USAGE, EXIT_FAILURE) and fragment in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "grpo-toy-flow", "-p", "a red"],
        ["rank", "grpo-toy-flow"],
        ["evaluate", "playeval", "--model", "grpo-toy-flow"],
        ["evaluate", "geneval", "--images", "."],
        ["embed", "flux", "--tiny", "--prompts", "prompts.txt"],
        ["encode", ".", "--tokenizer", "none"],
        ["encode", ".", "--vae", "none"],
        ["reconstruct", ".", "--model", "none"],
        ["bench", "playground"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
@pytest.mark.parametrize("out", ["file", "file/deep/er"])
def test_output_folder_that_is_a_file_is_refused(arguments, out, capsys):
    Path("file").write_text("kept")
    Path("prompts.txt").write_text("a red")
    code, output = run_and_read_error(capsys, *arguments, "--out", out)
    assert code == EXIT_USAGE and "error: --out: " in output and "TM089" in output
    assert Path("file").read_text() == "kept"


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "runs/none", "--out", "file/a.safetensors"],
        ["export", "runs/none", "--layout", "diffusers", "--out", "file/a"],
        ["report", "runs/none", "--out", "file/a.html"],
        ["pack", ".", "--out", "file/a.npz"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_output_file_in_a_file_is_refused(arguments, capsys):
    Path("file").write_text("kept")
    code, output = run_and_read_error(capsys, *arguments)
    assert code == EXIT_USAGE and "error: --out: " in output and "TM089" in output


def test_answers_are_not_written_to_an_image(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(ConfigError, match=r"a\.png.*--out.*TM724"):
        read_answers(tmp_path / "a.png")


def test_run_directory_that_is_a_file_is_refused(capsys):
    Path("file").write_text("kept")
    code, output = run_and_read_error(capsys, "train", "grpo-toy-flow", *QUICK, "output_dir=file")
    assert code == EXIT_USAGE and "output_dir: " in output and "TM089" in output


@pytest.mark.parametrize("command", [["generate", "grpo-toy-flow"], ["rank", "grpo-toy-flow"], ["embed", "flux"]])
def test_image_is_refused_as_prompt_file(command, capsys):
    Path("a.png").write_bytes(b"")
    code, output = run_and_read_error(capsys, *command, "--tiny", "--prompts", "a.png")
    assert code == EXIT_USAGE and "--prompts: " in output and "'a.png'" in output and ".jsonl" in output


def test_failing_reward_stops_the_run_with_a_checkpoint(capsys):
    assert run_cli("train", "grpo-toy-flow", *QUICK) == 0
    failing_reward = ["rewards.color={type: 'faults:Constant', broken: true}", "--allow-change", "rewards"]
    code, output = run_and_read_error(
        capsys, "train", "grpo-toy-flow", *QUICK, "steps=6", "--allow-change", "steps", *failing_reward
    )
    assert code == EXIT_FAILURE and "reward 'color'" in output and "NaN" in output
    assert Path("runs/grpo-toy-flow/checkpoints/step-000004/weights.safetensors").is_file()


def test_truncated_checkpoint_is_reported(capsys):
    assert run_cli("train", "grpo-toy-flow", *QUICK) == 0
    file = Path("runs/grpo-toy-flow/checkpoints/step-000004/weights.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    code, output = run_and_read_error(capsys, "train", "grpo-toy-flow", *QUICK, "steps=6", "--allow-change", "steps")
    assert code == EXIT_FAILURE and "weights.safetensors" in output and "step-000002" in output


def test_unsafe_pickle_is_refused(capsys, tmp_path):
    torch.save({"weights": Path("x")}, tmp_path / "odd.pt")
    code, output = run_and_read_error(capsys, "train", "grpo-toy-flow", *QUICK, "--init-from", "odd.pt")
    assert code == EXIT_FAILURE and "odd.pt" in output


@pytest.mark.parametrize("command", ["train", "generate", "score", "check", "doctor", "list"])
def test_help_explains_every_command(command, capsys):
    assert run_cli(command, "--help") == 0
    output = capsys.readouterr().out
    assert "Usage" in output and len(output) > 300


@pytest.fixture
def skip_two_ranks(monkeypatch):
    """Skip the doctor's check on two ranks, which starts two processes; tests/diagnostics covers it."""
    monkeypatch.setattr("tastemaker.diagnostics.doctor.check_two_ranks", lambda *_: pass_check("ranks", "left out"))


def test_doctor_prints_every_check(skip_two_ranks, capsys):
    assert run_cli("doctor", "grpo-toy-flow", "--tiny") == 0
    output = capsys.readouterr().out
    assert output.count("pass") + output.count("skip") >= 10 and "passed" in output


def test_doctor_prints_advice_on_failure(skip_two_ranks, capsys):
    assert run_cli("doctor", "grpo-toy-flow", "model={type: 'faults:WrongRange'}") == EXIT_FAILURE
    output = capsys.readouterr().out
    assert "FAIL" in output and "[0, 1]" in output

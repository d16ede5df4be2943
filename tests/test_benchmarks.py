"""The benchmarks: the counts that a GPU's programs must keep, and that every command runs."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meshes import counts_programs

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def command(monkeypatch):
    """A benchmark's `main`, from the file that one runs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: runpy.run_path(str(BENCHMARKS / name))["main"]


@counts_programs
@pytest.mark.slow
@pytest.mark.usefixtures("loose")
def test_what_a_gpu_would_run_stays_within_its_limits(command, capsys):
    assert command("gpu_program.py")(["--check", "--quick"]) == 0
    assert "| step: recipe, scanned" in capsys.readouterr().out


def test_a_program_past_its_limits_is_named(command):
    module = runpy.run_path(str(BENCHMARKS / "gpu_program.py"))
    case = next(case for case in module["CASES"] if case.name == "norm, fp32")
    counts = module["Counts"](
        launches=17, bytes=10**9, temporary=10**6, collectives={"all-gather": 2}, microseconds=None, seconds=1
    )
    past = module["excesses"](case, counts)
    assert [text.split(": ")[1].split(",")[0].split(" ", 1)[1] for text in past] == [
        "launches",
        "bytes per parameter",
        "temporary bytes",
        "all-gather",
    ]
    assert not module["excesses"](case._replace(limits=None), counts)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("gpu_program.py", ["--devices", "1"], "--devices must be 2 or more, not 1"),
        ("gpu_program.py", ["--spec", "b9000"], "--spec must be a100, h100 or a file that exists, not b9000"),
        ("optimizer_step.py", ["--rounds", "0"], "--rounds must be 1 or more, not 0"),
        ("optimizer_step.py", ["--png", "x.png"], "--png, --counts, --only and --trace-only need --growth"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(command, capsys, name, given, said):
    main = command(name)
    with pytest.raises(SystemExit) as refused:
        main(given)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


@counts_programs
@pytest.mark.slow
@pytest.mark.usefixtures("loose")
def test_remainders_save_two_bytes_and_mu_in_bf16_two_more(command, capsys):
    """On one layer: parameters, gradients, state, arguments, in place, results, temporary, in all."""
    assert command("memory.py")(["--quick", "--only", "bf16, remainders"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| bf16")]
    numbers = {name.strip(): [float(cell) for cell in cells] for name, _, *cells in rows}
    assert numbers == {
        "bf16, remainders": [2, 2, 10, 14, 12, 12, 0, 14],
        "bf16, remainders, mu in bf16": [2, 2, 8, 12, 10, 10, 0, 12],
    }


@pytest.mark.slow
@pytest.mark.usefixtures("loose")
@pytest.mark.parametrize("along", ["parameters", "arrays"])
def test_the_growth_of_the_cost_is_printed_and_drawn(command, capsys, tmp_path, along):
    drawing = tmp_path / "growth.png"
    given = ["--growth", along, "--quick", "--rounds", "1", "--only", "apply", "--png", str(drawing)]
    assert command("optimizer_step.py")(given) == 0
    table = capsys.readouterr().out
    assert table.count("| adamw alone ") == table.count("| recipe, apply_gradients |") == 2
    assert "| links" not in table
    assert drawing.stat().st_size > 10_000


@pytest.mark.usefixtures("loose")
def test_a_step_that_is_only_traced_has_no_time_of_its_own(command, capsys):
    assert command("optimizer_step.py")(["--growth", "arrays", "--quick", "--trace-only", "--only", "recipe"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "recipe, apply_gradients" in line]
    for row in rows:
        assert [cell.strip() for cell in (row[4], row[8])] == ["", ""]
        assert float(row[6]) > 0
    assert len(rows) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("loose")
def test_the_norm_alone_is_timed_in_three_dtypes(command, capsys):
    assert command("optimizer_step.py")(["--norm", "--quick", "--rounds", "1"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "grad_global_norm" in line]
    assert [row[1].strip() for row in rows] == ["float32", "bfloat16", "float16"]
    assert all(float(row[7]) >= float(row[6]) > 0 for row in rows)  # GB/s, at best and in the middle


@pytest.mark.slow
@pytest.mark.usefixtures("loose")
def test_bert_takes_a_step_with_fp16_parameters(command, capsys):
    given = ["--size", "tiny", "--batch", "1", "--length", "8", "--rounds", "1", "--precision", "fp16, O2"]
    assert command("bert_step.py")(given) == 0
    _, _, row = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert row[1].strip() == "fp16, O2"
    assert 10 < float(row[9]) < 12  # ln 30522 + ln 2 is 11.0


@pytest.mark.slow
def test_the_script_for_a_gpu_says_that_there_is_none(tmp_path):
    script = subprocess.run(
        ["sh", str(BENCHMARKS / "gpu.sh"), str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert script.returncode == 2
    assert script.stderr.strip().endswith("or set QUICK=1 to try the script on a CPU")


@pytest.mark.parametrize("quick", ["", "1"])
def test_the_script_for_a_gpu_gives_every_command_options_that_it_has_and_8_minutes_in_all(tmp_path, command, quick):
    script, python, log = BENCHMARKS / "gpu.sh", tmp_path / "python", tmp_path / "log"
    python.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "QUICK": quick}
    subprocess.run(["sh", str(script), str(tmp_path / "out")], env=env, check=True, capture_output=True, timeout=60)
    given = [line.split() for line in log.read_text().splitlines() if line.startswith("benchmarks/")]
    for name, *options in given:
        arguments = runpy.run_path(str(BENCHMARKS.parent / name))["arguments"]
        assert (arguments(options).rounds == 1) is bool(quick)
    limits = [int(seconds) for seconds in re.findall(r"^measure \S+ (\d+)", script.read_text(), re.MULTILINE)]
    assert len(given) == len(limits)
    assert sum(limits) <= 8 * 60

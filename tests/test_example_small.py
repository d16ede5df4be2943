"""The one-file examples: they show what they say."""

import numpy as np
import pytest

import exponents
import overflow
import quickstart


@pytest.mark.slow
def test_the_quickstart_learns_in_fp16_as_in_fp32_and_not_without_a_loss_scale(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["quickstart.py", "--steps", "60", "--picture", str(tmp_path / "losses.png")])
    drawn = []
    monkeypatch.setattr(
        quickstart, "draw", lambda path, losses, draw=quickstart.draw: drawn.append(losses) or draw(path, losses)
    )
    quickstart.main()
    fp32, without, scaled = (np.mean(losses[-10:]) for losses in drawn[0].values())
    assert scaled == pytest.approx(fp32, rel=0.02)
    assert without > 2 * fp32
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_overflows_are_survived_step_by_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["overflow.py", "--picture", str(tmp_path / "overflow.png")])
    rows = overflow.train()
    _, losses, scales, norms, moved, skipped = map(np.array, zip(*rows, strict=True))
    bad = np.isinf(norms)
    np.testing.assert_array_equal(moved == 0, bad)
    np.testing.assert_array_equal(np.cumsum(bad), skipped)
    np.testing.assert_array_equal(scales[1:][bad[:-1]], scales[:-1][bad[:-1]] / 2)
    assert bad[0]
    assert bad[overflow.POISONED - 1]
    assert losses[-1] < 0.2 * losses[0]
    assert "w: 32 NaN" in capsys.readouterr().out
    overflow.draw(tmp_path / "overflow.png", rows)
    assert (tmp_path / "overflow.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_exponents_are_drawn_and_underflow_less_at_a_higher_scale(tmp_path, capsys, monkeypatch):
    smaller = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 64}
    monkeypatch.setitem(exponents.SIZES, "tiny", smaller)
    assert exponents.main(["--steps", "1", "--picture", str(tmp_path / "exponents.png")]) == 0
    without, with_scale, _ = capsys.readouterr().out.splitlines()
    share = [float(line.split(": ")[1].split("%")[0]) for line in (without, with_scale)]
    assert share[0] > 10 * share[1]
    assert (tmp_path / "exponents.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        (quickstart, ["--steps", "0"], "--steps is 0; give 1 or more"),
        (quickstart, ["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (overflow, ["--picture", "/nowhere/picture.png"], "give a path that can be written"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_status_2(module, arguments, words, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["example.py", *arguments])
    monkeypatch.setattr(overflow, "train", lambda: [(1, 1.0, 1.0, 1.0, 1.0, 0)])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("example.py: error: ")
    assert words in line

"""Why masters exist: a BERT of one layer, 200 steps."""

import jax
import numpy as np
import pytest

import masters


@pytest.fixture
def quickly_compiled(loose):
    """Compilation is most of what these runs cost."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
def test_masters_end_where_fp32_does_and_fp16_alone_does_not(quickly_compiled, tmp_path, capsys):
    runs = masters.compare(200, 1e-3, ["fp32", "fp16 with fp32 masters", "fp16, Optax alone"])
    fp32, with_masters, alone = (losses[-masters.AVERAGED :].mean() for losses in runs.values())
    start = runs["fp32"][0]
    assert fp32 < 0.92 * start, "it learns"
    assert abs(with_masters - fp32) < 0.01 * fp32
    assert not alone < fp32 + 0.5 * (start - fp32), "worse than half of what fp32 has learnt, or NaN"
    masters.show(runs)
    assert "fp16 with fp32 masters" in capsys.readouterr().out
    masters.draw(tmp_path / "masters.png", runs)
    assert (tmp_path / "masters.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(masters, "compare", lambda *_: {"fp32": np.ones(30), "other": np.ones(30)})
    (tmp_path / "file").write_text("")
    status = masters.exit_status(masters.main, ["--picture", str(tmp_path / "file" / "masters.png")])
    assert status == 2
    assert "give --picture another path" in capsys.readouterr().err

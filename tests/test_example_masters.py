"""Why masters exist: a BERT of one layer, 200 steps of fine-tuning."""

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
def test_with_masters_fine_tuning_goes_as_in_fp32_and_without_it_stays_behind(quickly_compiled, tmp_path, capsys):
    runs = masters.compare(200, 1e-5, ["fp32", "fp16 with fp32 masters", "fp16 without masters"])
    fp32, with_masters, without = runs.values()
    np.testing.assert_allclose(with_masters, fp32, rtol=0.001)
    assert masters.learnt(fp32) > 0.02, "it learns"
    assert masters.learnt(with_masters) == pytest.approx(masters.learnt(fp32), rel=0.03)
    assert masters.learnt(without) < 0.6 * masters.learnt(fp32)
    masters.show(runs)
    assert "fp16 with fp32 masters" in capsys.readouterr().out
    masters.draw(tmp_path / "masters.png", runs)
    assert (tmp_path / "masters.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(masters, "compare", lambda *_: {"fp32": np.arange(30.0), "fp16 with": np.arange(30.0)})
    (tmp_path / "file").write_text("")
    status = masters.exit_status(masters.main, ["--picture", str(tmp_path / "file" / "masters.png")])
    assert status == 2
    assert "give --picture another path" in capsys.readouterr().err

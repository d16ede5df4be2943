"""The examples' checkpoints: whole or not there, sealed, and refused when a byte has changed."""

import resource
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_fp16 as fp16
from training import seals
from training.checkpoints import Checkpoints
from training.errors import InputError
from training.loop import State, saver
from training.resume import refuse_to_overwrite, resumed

FACTS = {"options": {"size": "tiny", "seed": 0}, "model": {"hidden_size": 4}, "devices": 1}


class Moments(NamedTuple):
    count: jax.Array
    mu: dict[str, jax.Array]


def state_of(value):
    kernel = jnp.full((3, 200), value, jnp.float32)
    moments = Moments(jnp.int32(value), {"kernel": kernel.astype(jnp.float16)})
    scale = fp16.dynamic_loss_scale(2.0**value).init({"kernel": kernel})
    return {"params": {"kernel": kernel}, "opt_state": (moments, scale)}


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 3):
        assert made.save(step, state_of(step), FACTS) is None
    return made


def files_of(checkpoints, step):
    return sorted(path for path in checkpoints.path(step).rglob("*") if path.is_file() and path.stat().st_size)


def names_in(checkpoints):
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_a_state_comes_back_bit_for_bit_with_its_structure_and_dtypes(checkpoints):
    saved, back = state_of(3), checkpoints.restore(3, state_of(0))
    assert jax.tree.structure(back) == jax.tree.structure(saved)
    for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(back), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert checkpoints.facts(3) == {**FACTS, "step": 3}


def test_the_newest_stay_and_nothing_else_is_left(checkpoints):
    assert checkpoints.steps() == [2, 3]
    assert names_in(checkpoints) == ["step_00000002", "step_00000003"]


def test_a_flipped_bit_or_a_cut_end_in_any_file_is_refused_and_the_checkpoint_before_is_offered(checkpoints):
    for path in files_of(checkpoints, 3):
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (flipped, content[:-1], b""):
            path.write_bytes(damaged)
            with pytest.raises(InputError, match=r"step_00000003 is damaged: .*step_00000002, is whole: .*--resume 2$"):
                checkpoints.facts(3)
        path.write_bytes(content)
    assert checkpoints.facts(3)["step"] == 3


def test_a_missing_and_an_added_file_are_refused(checkpoints):
    path = files_of(checkpoints, 3)[0]
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(InputError, match=r"(is missing|can't be read)"):
        checkpoints.facts(3)
    path.write_bytes(content)
    path.with_name("stray").touch()
    with pytest.raises(InputError, match="stray doesn't belong there"):
        checkpoints.facts(3)


def test_a_seal_of_nothing_is_no_seal(tmp_path):
    (tmp_path / "seal.json").write_text("{}")
    assert seals.damage(tmp_path) == "seal.json names no files"


def test_only_whole_checkpoints_are_offered(checkpoints):
    for step in (2, 3):
        (checkpoints.path(step) / "facts.json").write_text("{")
    with pytest.raises(InputError, match="there is none before it: start again in another --run-dir"):
        checkpoints.facts(3)


def test_what_a_killed_process_left_is_no_checkpoint_and_is_tidied_away(checkpoints):
    for name in ("writing-step_00000004-77", "removing-step_00000001-77"):
        shutil.copytree(checkpoints.path(3), checkpoints.folder / name)
    assert checkpoints.steps() == [2, 3]
    checkpoints.tidy()
    assert names_in(checkpoints) == ["step_00000002", "step_00000003"]


def test_a_full_disk_while_saving_leaves_the_last_checkpoint_and_the_run_goes_on(checkpoints, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a write past it fails, as on a full disk
    try:
        state = state_of(4)
        saver(checkpoints, FACTS)(State(state["params"], state["opt_state"], 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    warning = capsys.readouterr().err
    assert warning.startswith("warning: step 4 could not be saved (")
    assert warning.endswith("step_00000003 is still there\n")
    assert warning.count("\n") == 1
    assert names_in(checkpoints) == ["step_00000002", "step_00000003"]
    assert checkpoints.facts(3)["step"] == 3


def test_a_folder_that_became_read_only_costs_a_warning(tmp_path, capsys):
    (tmp_path / "checkpoints").touch()  # nothing can be made inside a file
    state = state_of(4)
    saver(Checkpoints(tmp_path / "checkpoints", keep=2), FACTS)(State(state["params"], state["opt_state"], 4))
    assert "the run goes on, there is no earlier one" in capsys.readouterr().err


def test_a_run_that_skips_every_step_is_told_so_when_it_saves(tmp_path, capsys):
    tx = fp16.skip_if_nonfinite(optax.sgd(0.1))
    state = tx.init({"kernel": jnp.zeros(2)})._replace(skipped_in_a_row=jnp.int32(70))
    saver(Checkpoints(tmp_path, keep=2), FACTS)(State({"kernel": jnp.zeros(2)}, state, 4))
    assert capsys.readouterr().err.startswith("warning: The last 70 steps were all skipped")


def test_a_new_run_does_not_overwrite_another(checkpoints, tmp_path):
    with pytest.raises(InputError, match=r"holds the checkpoints of a run, up to step 3; add --resume"):
        refuse_to_overwrite(checkpoints)
    refuse_to_overwrite(Checkpoints(tmp_path / "elsewhere", keep=1))


def resume(checkpoints, wanted="latest", **changes):
    fresh = state_of(0)
    return resumed(checkpoints, wanted, FACTS | changes, State(fresh["params"], fresh["opt_state"], 0))


def test_resume_takes_the_newest_checkpoint(checkpoints):
    state = resume(checkpoints)
    assert state.step == 3
    assert state.params["kernel"][0, 0] == 3


def test_going_back_sets_later_checkpoints_aside_and_deletes_nothing(checkpoints, capsys):
    assert resume(checkpoints, 2).step == 2
    assert names_in(checkpoints) == ["set-aside-step_00000003", "step_00000002"]
    assert "set-aside-step_00000003" in capsys.readouterr().out


def test_a_step_without_checkpoint_is_refused_with_those_there_are(checkpoints):
    with pytest.raises(InputError, match=r"no checkpoint of step 7; there are: 2, 3$"):
        resume(checkpoints, 7)


def test_nothing_to_resume_yet_starts_at_step_0_and_says_so(tmp_path, capsys):
    assert resume(Checkpoints(tmp_path, keep=1)).step == 0
    assert "starting at step 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"size": "mini", "seed": 1}}, "with --size tiny, not mini; write --size tiny"),
        ({"options": {"size": "tiny", "seed": 1}}, "with --seed 0, not 1; write --seed 0"),
        ({"options": {"size": "tiny", "seed": 0, "new_knob": 1}}, "with --new-knob None, not 1"),
        ({"options": {"size": "tiny", "seed": 0, "text": "abc"}}, "is of a run on another --text; give the same"),
        ({"model": {"hidden_size": 8}}, "is of another model"),
    ],
)
def test_a_run_goes_on_only_as_the_same_run(checkpoints, changes, message):
    with pytest.raises(InputError, match=message):
        resume(checkpoints, **changes)


def test_other_devices_may_go_on_but_are_told_that_the_bits_differ(checkpoints, capsys):
    assert resume(checkpoints, devices=4).step == 3
    assert "no longer bit for bit" in capsys.readouterr().out
